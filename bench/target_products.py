# SPDX-License-Identifier: Apache-2.0
"""What packed products bring a served target: with trees, and to plain decoding alone.

    python bench/target_products.py --rounds 5 [--data PROMPTS]

There is an engine process for each side; they answer the same prompts in turns, and which goes
first alternates. Plain vLLM is the first side. Two sides have jetspec's defaults, with vLLM's
products and with packed ones; one drafts nothing (`tree_budget` 0) and multiplies packed weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness import Benchmark
from model_runners import BATCHES, JETSPEC, compare_batches, measured_batches
from sides import Round, table

from vllm_specplug.bench.result_page import ResultPage, Section

SIDES: dict[str, dict[str, Any] | None] = {
    "plain vLLM": None,
    "no drafts, packed": {**JETSPEC, "tree_budget": 0, "target_products": "packed"},
    "trees, vLLM's products": {**JETSPEC, "target_products": "vllm"},
    "trees, packed": {**JETSPEC, "target_products": "packed"},
}


def page(rounds: list[Round], record: dict[str, Any]) -> ResultPage:
    """The page of these rounds."""
    lines = table(rounds, list(SIDES), BATCHES, 1)
    header = ("batch", *SIDES, *(f"{side}, over plain" for side in list(SIDES)[1:]))
    return ResultPage(
        name="target_products",
        title="Packed products of the target",
        about=f"A process for each side, {len(rounds)} rounds in turns; tokens per second of "
        "SmolLM2-135M-Instruct in bfloat16, greedy, with the shipped JetSpec head where there are "
        "trees: medians over the rounds, and of the rounds' ratios; in brackets the lowest and the "
        "highest. `no drafts` has the head's engine, whose budget is 0.",
        sections=[Section(header, lines)],
        data=rounds,
        made_by=[record],
    )


def serve(side: str, data: Path | None, eager: bool) -> None:
    measured_batches(SIDES[side], data, eager, async_scheduling=False)


def main() -> None:
    compare_batches(
        Benchmark("target_products", __doc__), list(SIDES), 5, lambda side: "0", serve, page
    )


if __name__ == "__main__":
    main()
