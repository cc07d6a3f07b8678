# SPDX-License-Identifier: Apache-2.0
"""Acceptance of block heads, of DDTree and of DeLS beside each other, from cached features.

The simulation of `specplug train evaluate`: every policy drafts for the same greedy answers, at
the same budgets. alpha and beta are chosen on the held-out features by the chain's acceptance
length and reported on the others.

    python bench/acceptance.py --target MODEL --heldout FEATURES --features FEATURES \\
        --dflash HEAD --jetspec HEAD --local gru=HEAD --local markov=HEAD

Drafts are kept under --cache, so that another local head is measured without drafting again.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from harness import HEADS, Benchmark

from vllm_specplug.bench.result_page import ResultPage, Section
from vllm_specplug.methods.block.train.evaluate import Acceptance, AcceptanceReport
from vllm_specplug.methods.block.train.evaluate_run import DEFAULT_CANDIDATES, Evaluation
from vllm_specplug.methods.dels.train.evaluate import (
    Fusion,
    LocalTables,
    evaluate_local_chains,
    local_tree_policy,
)
from vllm_specplug.train.walk import DraftedSequence, Slots, walk

BUDGETS = (8, 16, 32)
WIDTH = 8
ALPHAS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.85, 1.0)
BETAS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8)
CANDIDATES = (8, 16, 32, 64, 128)
# Later drafts have read more; the last factor of a ramp is 1.
RAMPS = {"constant": 1.0, "rising from 0.5": 0.5, "falling to 0.5": 2.0}


@dataclass
class Results:
    """Everything measured, as it goes into the JSON file."""

    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    grids: dict[str, dict[str, list[list[float]]]] = field(default_factory=dict)
    chosen: dict[str, dict[str, Any]] = field(default_factory=dict)
    candidates: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    ramps: dict[str, dict[str, float]] = field(default_factory=dict)
    paper: dict[str, float] = field(default_factory=dict)
    tree_weights: dict[str, dict[str, float]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def add(self, name: str, budget: int, counts: Acceptance, report_name: str, report) -> None:  # type: ignore[no-untyped-def]
        """One policy: its length in all, by data set, and the shares reaching each depth."""
        self.rows[name] = {
            "budget": budget,
            "length": round(counts.mean_acceptance_length, 4),
            "rounds": counts.rounds,
            "by_source": {
                source: round(policies[report_name].mean_acceptance_length, 4)
                for source, policies in sorted(report.by_source.items())
            },
            "reaching": [round(counts.share_reaching(d), 4) for d in range(1, 8)],
        }


def evaluation(options: argparse.Namespace, head: Path, features: Path) -> Evaluation:
    """A backbone on a feature folder, its drafts taken from the cache where they are there."""
    weights = hashlib.sha256((head / "model.safetensors").read_bytes()).hexdigest()[:16]
    name = f"{head.name}-{weights}-{features.resolve().name}-{DEFAULT_CANDIDATES}.pt"
    path = Path(options.cache) / name if options.cache else None
    if path is not None and path.is_file():
        rows = torch.load(path, weights_only=True)
        drafted = [DraftedSequence(t, p, Slots(*slots), source) for t, p, slots, source in rows]
        return Evaluation(options.target, head, features, drafted=drafted)
    made = Evaluation(options.target, head, features)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [
            (s.tokens, s.prompt_len, (s.slots.rows, s.slots.logits, s.slots.log_norm), s.source)
            for s in made.drafted
        ]
        torch.save(rows, path)
    return made


def grid(tables: LocalTables, made: Evaluation) -> list[list[float]]:
    """Chain acceptance length for every pair of ALPHAS (rows) and BETAS (columns)."""
    report = AcceptanceReport()
    names = {(a, b): f"{a} {b}" for a in ALPHAS for b in BETAS}
    fusions = {name: Fusion.of(tables, made.depth, *pair) for pair, name in names.items()}
    evaluate_local_chains(tables, made.drafted, fusions, report)
    lengths = report.lengths()
    return [[round(lengths[names[a, b]], 4) for b in BETAS] for a in ALPHAS]


def best_of(values: list[list[float]]) -> tuple[float, float, float]:
    """alpha, beta and length of the best cell; the smallest weights where cells are equal."""
    length, a, b = max(
        (values[i][j], -i, -j) for i in range(len(ALPHAS)) for j in range(len(BETAS))
    )
    return ALPHAS[-a], BETAS[-b], length


def ramp(tables: LocalTables, depth: int, value: float, factor: float) -> list[float]:
    """A weight for each corrected depth, from `factor` times the value (or, above 1, from the value
    down to 1 / factor of it) to the value."""
    count = depth if tables.anchor_input else depth - 1
    low, high = (factor, 1.0) if factor <= 1 else (1.0, 1.0 / factor)
    return [value * (low + (high - low) * i / (count - 1)) for i in range(count)]


def measure(options: argparse.Namespace) -> Iterator[Results]:
    """The results so far, after each local head."""
    results = Results(facts={"backbone": options.backbone})
    heads = {"DFlash": Path(options.dflash), "JetSpec": Path(options.jetspec)}
    for name, head in heads.items():
        made = evaluation(options, head, Path(options.features))
        made.add_backbone(BUDGETS, ["best_first"], WIDTH)
        report = made.report
        tree = "DDTree" if name == "DFlash" else "JetSpec tree"
        results.add(f"{name} chain", made.depth, report.total["chain"], "chain", report)
        for budget in BUDGETS:
            key = f"best_first/{budget}"
            results.add(f"{tree} {budget}", budget, report.total[key], key, report)
        print(f"{name}: {report.lengths()}", flush=True)
        results.facts[name] = {
            "head": head.name,
            "sequences": len(made.drafted),
            "slot_accuracy": [round(v, 4) for v in report.slot_accuracy()],
        }
        if name == options.backbone:
            dev = made
    held = evaluation(options, heads[options.backbone], Path(options.heldout))
    for entry in options.local:
        kind, _, folder = entry.partition("=")
        measure_local(options, results, kind, Path(folder), held, dev)
        yield results


def measure_local(
    options: argparse.Namespace,
    results: Results,
    kind: str,
    folder: Path,
    held: Evaluation,
    dev: Evaluation,
) -> None:
    unigram = options.unigram or folder / "unigram.safetensors"
    results.grids[kind] = {}
    best: tuple[float, float, float, bool] = (0.0, 0.0, 0.0, False)
    for fed in (False, True):
        tables = held.local_tables(folder, unigram, fed)
        values = grid(tables, held)
        results.grids[kind]["anchor fed" if fed else "anchor not fed"] = values
        alpha, beta, length = best_of(values)
        if length > best[2]:
            best = (alpha, beta, length, fed)
    alpha, beta, length, fed = best
    results.chosen[kind] = {
        "head": folder.name,
        "alpha": alpha,
        "beta": beta,
        "anchor_input": fed,
        "heldout_length": length,
        "heldout_backbone": results.grids[kind]["anchor not fed"][0][0],
    }
    held_tables = held.local_tables(folder, unigram, fed)
    ramps = {
        name: Fusion.of(
            held_tables,
            held.depth,
            ramp(held_tables, held.depth, alpha, factor),
            ramp(held_tables, held.depth, beta, factor),
        )
        for name, factor in RAMPS.items()
    }
    report = AcceptanceReport()
    evaluate_local_chains(held_tables, held.drafted, ramps, report)
    print(f"{kind}: {results.chosen[kind]}", flush=True)
    results.ramps[kind] = {n: round(v, 4) for n, v in report.lengths().items()}
    report = AcceptanceReport()
    scales = {0.5: "1/2", 1.0: "1"}
    for scale, label in scales.items():
        fusion = Fusion.of(held_tables, held.depth, alpha * scale, beta * scale)
        walk(held.drafted[::2], label, local_tree_policy(held_tables, fusion, 16, WIDTH), report)
    results.tree_weights[kind] = {n: round(v, 4) for n, v in report.lengths().items()}

    tables = dev.local_tables(folder, unigram, fed)
    fusion = Fusion.of(tables, dev.depth, alpha, beta)
    report = AcceptanceReport()
    plain = dev.local_tables(folder, unigram, False)
    named = {"chain": fusion}
    evaluate_local_chains(tables, dev.drafted, named, report)
    published = {"paper": Fusion.of(plain, dev.depth, 0.3, 0.3)}
    evaluate_local_chains(plain, dev.drafted, published, report)
    results.paper[kind] = round(report.total["paper"].mean_acceptance_length, 4)
    label = kind.upper() if kind == "gru" else kind.capitalize()
    results.add(f"DeLS {label} chain", dev.depth, report.total["chain"], "chain", report)
    for budget in BUDGETS:
        walk(dev.drafted, str(budget), local_tree_policy(tables, fusion, budget, WIDTH), report)
        counts = report.total[str(budget)]
        results.add(f"DeLS {label} tree {budget}", budget, counts, str(budget), report)
        print(f"{kind} tree {budget}: {counts.mean_acceptance_length:.4f}", flush=True)
    results.candidates[kind] = {}
    for count in CANDIDATES:
        narrow = [s.narrowed(count) for s in held.drafted]
        report = AcceptanceReport()
        held_fusion = Fusion.of(held_tables, held.depth, alpha, beta)
        evaluate_local_chains(held_tables, narrow, {"chain": held_fusion}, report)
        results.candidates[kind][str(count)] = {n: round(v, 4) for n, v in report.lengths().items()}


def make_page(results: Results, record: dict[str, Any]) -> ResultPage:
    rows = results.rows
    sources = list(next(iter(rows.values()))["by_source"])
    sections = [
        Section(
            ["Method", "budget", "all", *sources],
            [
                [
                    name,
                    str(row["budget"]),
                    f"**{row['length']:.2f}**",
                    *(f"{row['by_source'][s]:.2f}" for s in sources),
                ]
                for name, row in rows.items()
            ],
        ),
        Section(
            ["Method", *map(str, range(1, 8))],
            [[name, *(f"{v:.3f}" for v in row["reaching"])] for name, row in rows.items()],
            "By position",
            ["Share of rounds that accept at least this many drafts."],
        ),
        Section(
            ["Local head", "alpha", "beta", "anchor fed", "held-out", "backbone", "0.3/0.3"],
            [
                [
                    kind,
                    str(c["alpha"]),
                    str(c["beta"]),
                    "yes" if c["anchor_input"] else "no",
                    f"{c['heldout_length']:.3f}",
                    f"{c['heldout_backbone']:.3f}",
                    f"{results.paper[kind]:.3f}",
                ]
                for kind, c in results.chosen.items()
            ],
            "Weights",
            [
                "Chosen on the held-out answers by the chain's length; with the published 0.3/0.3, "
                "the anchor not fed, the last column is the chain on the prompts above."
            ],
        ),
        Section(
            ["Local head", *RAMPS, "tree, weights x 1/2", "x 1"],
            [
                [
                    kind,
                    *(f"{results.ramps[kind][n]:.3f}" for n in RAMPS),
                    *(f"{v:.3f}" for v in results.tree_weights[kind].values()),
                ]
                for kind in results.chosen
            ],
            "Weights that change along the block",
            [
                "Held-out chain; and trees of 16 nodes with half of the chosen weights and with "
                "all, on every second held-out answer."
            ],
        ),
        *(
            Section(
                ["", *map(str, BETAS)],
                [[str(a), *(f"{v:.3f}" for v in values[i])] for i, a in enumerate(ALPHAS)],
                f"Grid, {kind}, {name}",
                ["Held-out chain; rows alpha, columns beta."],
            )
            for kind, grids in results.grids.items()
            for name, values in grids.items()
        ),
        Section(
            ["Local head", *map(str, CANDIDATES)],
            [
                [kind, *(f"{v['chain']:.3f}" for v in values.values())]
                for kind, values in results.candidates.items()
            ],
            "Candidates of a slot",
            ["How many of the backbone's likeliest tokens the local head scores: the chain, "
             "held-out."],
        ),
    ]  # fmt: skip
    return ResultPage(
        name="dels_acceptance",
        title="Acceptance of DFlash, DDTree, JetSpec and of local heads",
        about="Mean acceptance length (accepted drafts + 1 per round) on greedy answers of the "
        f"target to {results.facts['DFlash']['sequences']} prompts that no head was trained on; "
        "block of 8, so 7 drafts at most. Estimated from cached features; the budget is in nodes "
        "without the root. Local heads correct the "
        f"{results.facts['backbone']} head; their weights were chosen on other, held-out answers.",
        sections=sections,
        data=vars(results),
        made_by=[record],
        figure=plot(results),
    )


def plot(results: Results) -> Any:
    from matplotlib.figure import Figure

    kinds = list(results.grids)
    figure = Figure(figsize=(10, 4.2 * len(kinds)), layout="constrained")
    axes = figure.subplots(len(kinds), 2, squeeze=False)
    low = min(v for g in results.grids.values() for t in g.values() for r in t for v in r)
    high = max(v for g in results.grids.values() for t in g.values() for r in t for v in r)
    base = results.grids[kinds[0]]["anchor not fed"][0][0]
    for row, kind in enumerate(kinds):
        for column, (name, values) in enumerate(results.grids[kind].items()):
            axis = axes[row][column]
            image = axis.imshow(
                values, origin="lower", aspect="auto", vmin=max(low, base - 0.15), vmax=high
            )
            axis.set_xticks(range(len(BETAS)), [str(b) for b in BETAS])
            axis.set_yticks(range(len(ALPHAS)), [str(a) for a in ALPHAS])
            axis.set_xlabel("beta (unigram prior)")
            axis.set_ylabel("alpha (local head)")
            axis.set_title(f"{kind}, {name}")
            for i, line in enumerate(values):
                for j, value in enumerate(line):
                    axis.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize=6, color="w")
    figure.colorbar(image, ax=axes, label="mean acceptance length of the chain, held-out")
    figure.suptitle(f"Fusion weights; {results.facts['backbone']} alone: {base:.3f}")
    return figure


def main() -> None:
    benchmark = Benchmark("dels_acceptance", __doc__, runs_vllm=False)
    add = benchmark.parser.add_argument
    add("--target", required=True)
    add("--heldout", required=True, help="features the weights are chosen on")
    add("--features", required=True, help="features that are reported")
    add("--dflash", default=str(HEADS / "smollm2-135m-dflash"))
    add("--jetspec", default=str(HEADS / "smollm2-135m-jetspec"))
    add("--local", action="append", required=True, help="NAME=FOLDER")
    add("--backbone", choices=("DFlash", "JetSpec"), default="DFlash", help="what they correct")
    add("--unigram", default="", help="default: unigram.safetensors in the folder")
    add("--cache", default="", help="folder for drafts")
    args = benchmark.parse()
    for results in measure(args):
        # Also on the way, so that a run that is cut off leaves what it measured.
        text = make_page(results, benchmark.provenance(args)).write(args.out)
    print(text)


if __name__ == "__main__":
    main()
