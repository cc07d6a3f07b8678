# SPDX-License-Identifier: Apache-2.0
"""Acceptance of block heads, of DDTree and of DeLS beside each other, from cached features.

The simulation of `specplug train evaluate`: every policy drafts for the same greedy answers, at
the same budgets. alpha and beta are chosen on the held-out features by the chain's acceptance
length and reported on the others.

    python bench/acceptance.py --target MODEL --heldout FEATURES --features FEATURES \\
        --dflash HEAD --jetspec HEAD --local gru=HEAD --local markov=HEAD

writes OUT/dels_acceptance.{json,md,png}. Drafts are kept under --cache, so that another local head
is measured without drafting again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from vllm_specplug.train.evaluate import Acceptance, AcceptanceReport
from vllm_specplug.train.evaluate_local import (
    Fusion,
    LocalTables,
    evaluate_local_chains,
    local_tree_policy,
)
from vllm_specplug.train.evaluate_run import DEFAULT_CANDIDATES, Evaluation
from vllm_specplug.train.provenance import hardware, package_versions
from vllm_specplug.train.walk import DraftedSequence, Slots, walk

ROOT = Path(__file__).resolve().parents[1]
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


def say(text: str) -> None:
    print(text, flush=True)


def measure(options: argparse.Namespace) -> Results:
    results = Results()
    results.facts["versions"] = package_versions()
    results.facts["hardware"] = hardware()
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
        say(f"{name}: {report.lengths()}")
        results.facts[name] = {
            "head": head.name,
            "sequences": len(made.drafted),
            "slot_accuracy": [round(v, 4) for v in report.slot_accuracy()],
        }
        if name == "DFlash":
            dev = made
    held = evaluation(options, heads["DFlash"], Path(options.heldout))
    for entry in options.local:
        kind, _, folder = entry.partition("=")
        measure_local(options, results, kind, Path(folder), held, dev)
        write(options, results)
    return results


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
    say(f"{kind}: {results.chosen[kind]}")
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
        say(f"{kind} tree {budget}: {counts.mean_acceptance_length:.4f}")
    results.candidates[kind] = {}
    for count in CANDIDATES:
        narrow = [s.narrowed(count) for s in held.drafted]
        report = AcceptanceReport()
        held_fusion = Fusion.of(held_tables, held.depth, alpha, beta)
        evaluate_local_chains(held_tables, narrow, {"chain": held_fusion}, report)
        results.candidates[kind][str(count)] = {n: round(v, 4) for n, v in report.lengths().items()}


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def to_markdown(results: Results) -> str:
    rows = results.rows
    sources = list(next(iter(rows.values()))["by_source"])
    parts = [
        "# Acceptance of DFlash, DDTree, DeLS and JetSpec",
        "Mean acceptance length (accepted drafts + 1 a round) on greedy answers of the target to "
        f"{results.facts['DFlash']['sequences']} prompts that no head was trained on; block of 8, "
        "so 7 drafts at most. Estimated from cached features by `bench/acceptance.py`; the budget "
        "is in nodes without the root. Weights of DeLS were chosen on other, held-out answers.",
        table(
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
        "## By position",
        "Share of rounds that accept at least so many drafts.",
        table(
            ["Method", *map(str, range(1, 8))],
            [[name, *(f"{v:.3f}" for v in row["reaching"])] for name, row in rows.items()],
        ),
        "## Weights",
        "Chosen on the held-out answers by the chain's length; with the published 0.3/0.3, the "
        "anchor not fed, the last column is the chain on the prompts above.",
        table(
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
        ),
        "Weights that change along the block, held-out chain; and trees of 16 nodes with half of "
        "the chosen weights and with all, on every second held-out answer:",
        table(
            ["Local head", *RAMPS, "tree, weights x 1/2", "x 1"],
            [
                [
                    kind,
                    *(f"{results.ramps[kind][n]:.3f}" for n in RAMPS),
                    *(f"{v:.3f}" for v in results.tree_weights[kind].values()),
                ]
                for kind in results.chosen
            ],
        ),
    ]
    for kind, grids in results.grids.items():
        for name, values in grids.items():
            parts += [
                f"### Grid, {kind}, {name}",
                "Held-out chain; rows alpha, columns beta.",
                table(
                    ["", *map(str, BETAS)],
                    [[str(a), *(f"{v:.3f}" for v in values[i])] for i, a in enumerate(ALPHAS)],
                ),
            ]
    parts += [
        "## Candidates of a slot",
        "How many of the backbone's likeliest tokens the local head scores: the chain, held-out.",
        table(
            ["Local head", *map(str, CANDIDATES)],
            [
                [kind, *(f"{v['chain']:.3f}" for v in values.values())]
                for kind, values in results.candidates.items()
            ],
        ),
    ]
    return "\n\n".join(parts) + "\n"


def plot(results: Results, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    kinds = list(results.grids)
    figure, axes = plt.subplots(
        len(kinds), 2, figsize=(10, 4.2 * len(kinds)), squeeze=False, layout="constrained"
    )
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
    figure.suptitle(f"Fusion weights; DFlash alone: {base:.3f}")
    figure.savefig(path, dpi=110)


def write(options: argparse.Namespace, results: Results) -> None:
    """Also called on the way, so that a run that is cut off leaves what it measured."""
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "dels_acceptance.json").write_text(json.dumps(vars(results), indent=1) + "\n")
    (out / "dels_acceptance.md").write_text(to_markdown(results))
    plot(results, out / "dels_acceptance.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--heldout", required=True, help="features the weights are chosen on")
    parser.add_argument("--features", required=True, help="features that are reported")
    parser.add_argument("--dflash", default=str(ROOT / "heads" / "smollm2-135m-dflash"))
    parser.add_argument("--jetspec", default=str(ROOT / "heads" / "smollm2-135m-jetspec"))
    parser.add_argument("--local", action="append", required=True, help="NAME=FOLDER")
    parser.add_argument("--unigram", default="", help="default: unigram.safetensors in the folder")
    parser.add_argument("--cache", default="", help="folder for drafts")
    parser.add_argument("--out", default=str(ROOT / "bench" / "results"))
    options = parser.parse_args()
    results = measure(options)
    write(options, results)
    print(to_markdown(results))


if __name__ == "__main__":
    main()
