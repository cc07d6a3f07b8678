# SPDX-License-Identifier: Apache-2.0
"""Trees of a causal block head (JetSpec) beside those of a bidirectional one (DDTree), by size.

Tokens per step on the same greedy answers, with 95 % intervals over prompts, by kind of prompt:

    python bench/block_trees.py --target MODEL --features FEATURES --jetspec HEAD --dflash HEAD

Heads that are trained alike, and differ in the mask within the block alone, are trained by

    specplug train jetspec --target MODEL --features TRAIN --heldout HELD --seed 1 --out causal
    specplug train dflash --loss forward_kl --target MODEL --features TRAIN --heldout HELD \\
        --seed 1 --out whole

with all other flags equal, and are then in causal/head and whole/head. The page says where the
training of the heads that it compares differs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness import HEADS, Benchmark
from prompt_resampling import PromptCounts

from vllm_specplug.bench.result_page import ResultPage, Section
from vllm_specplug.methods.block.train.evaluate_run import Evaluation

BUDGETS = (8, 16, 32, 64, 128)
WIDTH = 16
POLICIES = ("chain", *(f"best_first/{budget}" for budget in BUDGETS))


def counted(args: Any, head: Path) -> tuple[list[str], dict[str, PromptCounts]]:
    """The kind of every prompt, and the counts of every policy."""
    made = Evaluation(args.target, head, args.features, candidates=WIDTH)
    kinds = [sequence.source for sequence in made.drafted]
    # A source of its own for every prompt: the report counts by source.
    made.drafted = [replace(s, source=f"{r}") for r, s in enumerate(made.drafted)]
    made.add_backbone(BUDGETS, ["best_first"], WIDTH)
    by_prompt = [made.report.by_source[f"{r}"] for r in range(len(kinds))]
    return kinds, {
        policy: PromptCounts.of(
            [(c[policy].rounds + c[policy].accepted, c[policy].rounds) for c in by_prompt]
        )
        for policy in POLICIES
    }


def training(head: Path) -> dict[str, Any]:
    """What tells the training of two heads apart, apart from the mask."""
    facts = json.loads((head / "provenance.json").read_text())
    # Of a head its identity; else what layers of the target it began from.
    began = facts.get("init_from")
    shape = {k: v for k, v in facts["shape"].items() if "causal" not in k}
    recipes = [
        {k: v for k, v in recipe.items() if k != "short_block_share"}
        for recipe in facts.get("recipes", [])
    ]
    return {
        "shape": shape,
        "progress": {k: v for k, v in facts["progress"].items() if k != "training_minutes"},
        "data": facts["data"],
        "the head they began from": began["sha256"] if isinstance(began, dict) else began,
        "recipes": recipes,
    }


def differences(some: Mapping[str, Any], others: Mapping[str, Any]) -> list[str]:
    """Names of what differs, those of `shape` and `progress` with their values."""
    found = []
    for name, value in some.items():
        other = others[name]
        if name not in ("shape", "progress"):
            found += [name] if value != other else []
            continue
        keys = sorted({*value, *other})
        found += [
            f"{key} ({value.get(key)} against {other.get(key)})"
            for key in keys
            if value.get(key) != other.get(key)
        ]
    return found


def measure(args: Any) -> dict[str, Any]:
    kinds, causal = counted(args, args.jetspec)
    same, whole = counted(args, args.dflash)
    assert kinds == same
    rows: dict[str, Sequence[int]] = {"all": range(len(kinds))}
    rows |= {k: [r for r, kind in enumerate(kinds) if kind == k] for k in sorted(set(kinds))}
    return {
        "prompts": {kind: len(chosen) for kind, chosen in rows.items()},
        "differences": differences(training(args.jetspec), training(args.dflash)),
        "by_kind": {
            kind: {
                policy: {
                    "JetSpec": causal[policy].of_prompts(chosen).rate().to_json(),
                    "DDTree": whole[policy].of_prompts(chosen).rate().to_json(),
                    "ratio": causal[policy]
                    .of_prompts(chosen)
                    .over(whole[policy].of_prompts(chosen))
                    .to_json(),
                }
                for policy in POLICIES
            }
            for kind, chosen in rows.items()
        },
    }


def make_page(found: dict[str, Any], record: Mapping[str, Any]) -> ResultPage:
    sections = []
    for kind, by_policy in found["by_kind"].items():
        rows = [
            [name, *(f"{v:.2f} ({a:.2f}, {b:.2f})" for v, a, b in (p[name] for p in columns))]
            for columns in [list(by_policy.values())]
            for name in ("JetSpec", "DDTree", "ratio")
        ]
        header = ["", "chain", *(f"{budget} nodes" for budget in BUDGETS)]
        sections.append(Section(header, rows, f"{kind}, {found['prompts'][kind]} prompts"))
    training_text = (
        f"**The heads were not trained alike**: {', '.join(found['differences'])} differ, so this "
        "compares two heads and not two masks."
        if found["differences"]
        else "Both heads were trained alike."
    )
    return ResultPage(
        name="block_trees",
        title="Trees of causal and of bidirectional block heads",
        about="Tokens per step of best-first trees, estimated on greedy answers; in brackets 95 % "
        f"intervals over prompts, of the ratio on the same prompts. {training_text}",
        sections=sections,
        data=found,
        made_by=[record],
    )


def main() -> None:
    benchmark = Benchmark("block_trees", __doc__, runs_vllm=False)
    add = benchmark.parser.add_argument
    add("--target", type=Path, required=True)
    add("--features", type=Path, required=True, help="features of greedy answers")
    add("--jetspec", type=Path, default=HEADS / "smollm2-135m-jetspec", help="a causal head")
    add("--dflash", type=Path, default=HEADS / "smollm2-135m-dflash", help="a bidirectional head")
    args = benchmark.parse()
    found = measure(args)
    benchmark.publish(args, make_page(found, benchmark.provenance(args)))


if __name__ == "__main__":
    main()
