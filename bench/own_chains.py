# SPDX-License-Identifier: Apache-2.0
"""Trees of this plugin against the chains that vLLM's own method drafts with the same EAGLE-3 head.

    python bench/own_chains.py --data PROMPTS [--head heads/smollm2-135m-eagle3] [--nodes 16]

vLLM's own `dflash` and `mtp` are not here: the mask of the shipped DFlash head is a trained vector,
which vLLM does not read, and the target ships no module.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from harness import BASELINE, HEADS, Benchmark, Cells, by_load, ratios, total
from interleave import Load

from vllm_specplug.bench.result_page import ResultPage, Section
from vllm_specplug.bench.summary import format_number


def whole_head(head: Path, target: str, folder: Path) -> Path:
    """The head with an LM head of its own, the target's rows, without which vLLM's method does not
    load it."""
    import torch

    from vllm_specplug.methods.eagle3_tree.checkpoint import load_eagle3_head, save_eagle3_head
    from vllm_specplug.train.target import TargetWeights

    weights = TargetWeights(target)
    module, extras = load_eagle3_head(head, weights.config, dtype=torch.float32)
    ids = extras.target_ids
    lm_head = extras.lm_head
    if lm_head is None:
        table = weights.tables().lm_head
        lm_head = table if ids is None else table[ids]
    save_eagle3_head(folder, module, target_ids=ids, lm_head=lm_head)
    return folder


def make_systems(
    head: Path, nodes: int, depths: tuple[int, ...]
) -> dict[str, dict[str, Any] | None]:
    systems: dict[str, dict[str, Any] | None] = {BASELINE: None}
    shared = {"model": str(head), "ngram_topk": 0, "method": "eagle3_tree"}
    for depth in depths:
        own = {"method": "eagle3", "model": str(head), "num_speculative_tokens": depth}
        systems[f"vLLM's chain of {depth}"] = own
        budget = {"num_speculative_tokens": depth, "tree_budget": depth}
        systems[f"our chain of {depth}"] = {**shared, **budget, "tree_width": 1}
    budget = {"num_speculative_tokens": nodes, "tree_budget": nodes}
    systems[f"tree of {nodes}"] = {**shared, **budget}
    systems["tree, adaptive budget"] = {**shared, "num_speculative_tokens": nodes}
    return systems


def make_loads(args: Any, target: str) -> list[Load]:
    from vllm_specplug.bench.prompts import chat_token_ids

    prompts = chat_token_ids(target, args.data, 400, 1500)
    return [
        Load(f"{concurrency} at once", number, prompts[first : first + args.prompts], concurrency)
        for number in range(args.rounds)
        for first in (args.prompts * number,)
        for concurrency in args.concurrency
    ]


def page(cells: Cells) -> ResultPage:
    sections, data = [], []
    for load, found in by_load(cells).items():
        rows = []
        for name, group in found.items():
            drafts = total(group, "drafts")
            values = {
                "load": load,
                "system": name,
                "tokens_per_s": median(c["tokens_per_s"] for c in group),
                "over_plain": median(ratios(group, found[BASELINE], lambda c: c["tokens_per_s"])),
                "tokens_per_step": total(group, "decode_tokens") / total(group, "decode_steps"),
                "mean_acceptance_length": 1 + total(group, "accepted") / drafts if drafts else None,
            }
            data.append(values)
            rows.append(
                [
                    name,
                    f"{values['tokens_per_s']:.1f}",
                    f"{values['over_plain']:.2f} x",
                    f"{values['tokens_per_step']:.2f}",
                    format_number(values["mean_acceptance_length"], 2),
                ]
            )
        header = ("", "tokens/s", "against plain", "tokens per step", "mean acceptance length")
        rounds = len(found[BASELINE])
        sections.append(Section(header, rows, f"{load} ({rounds} rounds)", []))
    return ResultPage(
        name="own_chains",
        title="EAGLE-3 trees and vLLM's own chains",
        about="SmolLM2-135M-Instruct in bfloat16, greedy, one head. The engines answer the same "
        "prompts side by side in one process, in turns of a second; times are CPU seconds of one "
        "thread.",
        sections=sections,
        data=data,
        made_by=[cell["provenance"] for cell in cells],
    )


def main() -> None:
    benchmark = Benchmark("own_chains", __doc__)
    benchmark.add_comparison_flags(minutes=6.0, rounds=2, tokens=64)
    add = benchmark.parser.add_argument
    add("--head", type=Path, default=HEADS / "smollm2-135m-eagle3")
    add("--concurrency", type=int, nargs="+", default=(1, 4))
    add("--nodes", type=int, default=16)
    add("--depths", type=int, nargs="+", default=(2, 4))
    add("--prompts", type=int, default=12, help="per round")
    args = benchmark.parse()
    if not args.report_only:
        # Written by a process of its own: this one is confined before it imports torch.
        folder = Path(tempfile.gettempdir()) / f"specplug-own-chains-{args.head.name}"
        _write_in_child(args.head, folder)
        benchmark.compare(
            args, make_systems(folder, args.nodes, tuple(args.depths)),
            lambda target: make_loads(args, target),
            engine={"max_num_seqs": 8}, sampling={"max_tokens": args.tokens},
        )  # fmt: skip
    benchmark.publish(args, page(benchmark.cells(args)))


def _write_in_child(head: Path, folder: Path) -> None:
    import subprocess
    import sys

    code = (
        "import json, sys; from pathlib import Path; from own_chains import whole_head\n"
        "from vllm_specplug.targets import prepare_target\n"
        "head, folder = json.loads(sys.argv[1])\n"
        "whole_head(Path(head), str(prepare_target('smollm2')), Path(folder))\n"
    )
    given = json.dumps([str(head.resolve()), str(folder)])
    subprocess.run(
        [sys.executable, "-c", code, given], check=True, cwd=Path(__file__).resolve().parent
    )


if __name__ == "__main__":
    main()
