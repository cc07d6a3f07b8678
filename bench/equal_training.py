# SPDX-License-Identifier: Apache-2.0
"""Trains one head of each kind at equal parameters and training tokens, and compares acceptance.

    python bench/equal_training.py --target MODEL --features FEATURES --heldout HELDOUT \
        --runs RUNS [--longspec-features F --longspec-heldout H] [--tokens 200000]

All kinds but LongSpec read the same features, and all draft over one vocabulary: the one that the
first run counts. The width of the MLP makes up for what else a kind has. DeLS is two heads, a block
head and a local one; each is trained on as many tokens as any other. A run that was interrupted is
resumed. `bench/equal_serving.py` serves what this leaves in RUNS.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import Benchmark

from vllm_specplug.bench.result_page import ResultPage, Section

DELS_BACKBONE = "dels-backbone"
POLICIES = ("chain", "best_first/8", "best_first/16")
BY_SOURCE = "mean_acceptance_length_by_source"
BLOCK, RANK, STEPS = 8, 8, 5


@dataclass(frozen=True)
class Setup:
    """What all runs have in common; `tokens` are supervised tokens, of a step and in all."""

    target: str
    features: str
    heldout: str
    draft_vocab_size: int
    parameters: float
    tokens: int
    tokens_per_step: int
    eval_sequences: int

    @property
    def steps(self) -> int:
        return max(1, self.tokens // self.tokens_per_step)

    def recipe(self) -> dict[str, Any]:
        steps = self.steps
        return {"total_steps": steps, "warmup_steps": min(20, steps // 10), "ema_decay": 0.98}


def mlp_width(setup: Setup, config: dict[str, Any], others: Callable[..., int]) -> int:
    """The width, a multiple of 16, that gives a head of one MLP `setup.parameters`, but at most the
    target's, from whose rows a head starts; `others` counts the rest from the hidden size, the
    widths of queries and of keys, and the vocabulary."""
    hidden = config["hidden_size"]
    heads = config["num_attention_heads"]
    size = config.get("head_dim") or hidden // heads
    kv = (config.get("num_key_value_heads") or heads) * size
    rest = others(hidden, heads * size, kv, config["vocab_size"] + setup.draft_vocab_size)
    width = int((setup.parameters - rest) / (3 * hidden)) // 16 * 16
    if width < 16:
        raise SystemExit(
            f"--parameters {setup.parameters:.3g} leaves no MLP: a head has {rest:,} parameters "
            "beside it; raise it"
        )
    return min(width, config["intermediate_size"])


def train_all(setup: Setup, runs: Path, longspec: tuple[str, str] | None) -> dict[str, Any]:
    """Provenance facts by kind, and the parameters of each."""
    from vllm_specplug.methods.block.train.run import RunOptions, train_block_head
    from vllm_specplug.methods.block.train.trainer import TrainOptions
    from vllm_specplug.methods.dels.train.run import (
        LocalRunOptions,
        local_config,
        train_local_head,
    )
    from vllm_specplug.methods.dels.train.trainer import LocalOptions
    from vllm_specplug.methods.dels.train.unigram_counts import write_unigram
    from vllm_specplug.methods.dspark_tree.train.run import DSparkRun, train_dspark
    from vllm_specplug.methods.dspark_tree.train.trainer import DSparkRecipe
    from vllm_specplug.methods.eagle3_tree.train.run import Eagle3Run, train_eagle3
    from vllm_specplug.methods.eagle3_tree.train.trainer import Eagle3Recipe
    from vllm_specplug.methods.local.head import LocalHead
    from vllm_specplug.methods.longspec.train.run import LongSpecRun, train_longspec
    from vllm_specplug.methods.longspec.train.trainer import LongSpecRecipe
    from vllm_specplug.train.features import FeatureStore
    from vllm_specplug.train.loop import LoopOptions
    from vllm_specplug.train.trainer import STATE_NAME

    config = json.loads(Path(setup.target, "config.json").read_text())
    layers = len(FeatureStore(setup.features).target_layer_ids)
    data = {"target": setup.target, "features": setup.features, "heldout": setup.heldout}
    vocabulary = {"draft_vocab_size": setup.draft_vocab_size}
    shared = {**vocabulary, "eval_sequences": setup.eval_sequences}
    blocks = setup.tokens_per_step // (BLOCK - 1)

    def loop(kind: str) -> dict[str, Any]:
        out = runs / kind
        return {"out": str(out), "resume": (out / STATE_NAME).is_file(), "eval_every": 10**9}

    def block(h: int, q: int, kv: int, vocab: int) -> int:
        return 2 * h * (q + kv) + layers * h * h

    def train_block(kind: str, causal: bool, beside: int = 0) -> dict[str, Any]:
        width = mlp_width(setup, config, lambda *sizes: block(*sizes) + beside)
        run = RunOptions(
            **data, **shared, **loop(kind), causal=causal, num_layers=1, block_size=BLOCK,
            intermediate_size=width,
        )  # fmt: skip
        return train_block_head(run, TrainOptions(**setup.recipe(), anchors_per_step=blocks))

    def train_markov() -> dict[str, Any]:
        width = mlp_width(setup, config, lambda *sizes: block(*sizes) + RANK * sizes[3])
        run = DSparkRun(
            **data, **shared, num_layers=1, block_size=BLOCK - 1, markov_rank=RANK,
            intermediate_size=width, vocab_from=str(runs / "jetspec" / "head"),
        )  # fmt: skip
        recipe = DSparkRecipe(**setup.recipe(), anchors_per_step=blocks)
        return train_dspark(run, recipe, LoopOptions(**loop("dspark")))

    def train_fused() -> dict[str, Any]:
        hidden = config["hidden_size"]
        run = LocalRunOptions(
            target=setup.target, data=setup.features, heldout=setup.heldout, **loop("dels"),
            backbone=str(runs / DELS_BACKBONE / "head"),
            hidden_size=hidden // 4, rank=hidden // 16, min_supervised=1,
            eval_sequences=setup.eval_sequences,
        )  # fmt: skip
        shape = local_config(run, config, setup.draft_vocab_size)
        local = LocalHead(shape)
        train_block(DELS_BACKBONE, False, sum(p.numel() for p in local.parameters()))
        recipe = LocalOptions(**setup.recipe(), anchors_per_step=blocks)
        facts = train_local_head(run, recipe)
        write_unigram(setup.target, setup.features, runs / "dels" / "head" / "unigram.safetensors")
        return {**facts, "heldout": fused_acceptance(setup, runs)}

    def train_level() -> dict[str, Any]:
        width = mlp_width(
            setup, config, lambda h, q, kv, _: 2 * h * (q + 2 * kv) + q * h + layers * h * h
        )
        run = Eagle3Run(
            **data, **shared, intermediate_size=width, save_lm_head=False,
            vocab_from=str(runs / "jetspec" / "head"),
        )  # fmt: skip
        anchors = setup.tokens_per_step // STEPS
        recipe = Eagle3Recipe(**setup.recipe(), anchors_per_step=anchors, steps=STEPS)
        return train_eagle3(run, recipe, LoopOptions(**loop("eagle3")))

    def train_long(features: str, heldout: str) -> dict[str, Any]:
        width = mlp_width(setup, config, lambda h, q, kv, _: 2 * h * (q + kv) + 2 * h * q)
        run = LongSpecRun(
            setup.target, features, heldout, **shared, intermediate_size=width,
            vocab_from=str(runs / "jetspec" / "head"),
        )  # fmt: skip
        recipe = LongSpecRecipe(**setup.recipe(), tokens_per_step=setup.tokens_per_step)
        return train_longspec(run, recipe, LoopOptions(**loop("longspec")))

    found = {
        "jetspec": train_block("jetspec", causal=True),
        "dflash": train_block("dflash", causal=False),
        "dels": train_fused(),
        "dspark": train_markov(),
        "eagle3": train_level(),
    }
    if longspec is not None:
        found["longspec"] = train_long(*longspec)
    # What a run that was finished before returns says nothing of its head.
    found = {
        kind: {**provenance_of(runs / kind / "head"), **facts} for kind, facts in found.items()
    }
    parts = {kind: (kind, DELS_BACKBONE) if kind == "dels" else (kind,) for kind in found}
    return {
        kind: {**facts, "parameters": sum(parameters(runs / part / "head") for part in parts[kind])}
        for kind, facts in found.items()
    }


def provenance_of(head: Path) -> dict[str, Any]:
    """What a trained head says of its training and its acceptance; what made it is the page's."""
    facts: dict[str, Any] = json.loads((head / "provenance.json").read_text())
    made_by = ("command", "git_revision", "versions", "hardware")
    return {name: value for name, value in facts.items() if name not in made_by}


def fused_acceptance(setup: Setup, runs: Path) -> dict[str, Any]:
    """Held-out acceptance of the block and the local head together, under the policies' names."""
    from vllm_specplug.methods.block.train.evaluate_run import Evaluation
    from vllm_specplug.methods.dels.options import DelsOptions
    from vllm_specplug.train.run import heldout_facts

    local = runs / "dels" / "head"
    backbone = runs / DELS_BACKBONE / "head"
    evaluation = Evaluation(setup.target, backbone, setup.heldout, setup.eval_sequences)
    tables = evaluation.local_tables(local, local / "unigram.safetensors")
    weights = ([DelsOptions.model_fields[name].default] for name in ("alpha", "beta"))
    evaluation.add_local(tables, *weights, budgets=(8, 16), width=16)
    names = {"dels chain": "chain", "dels tree/8": "best_first/8", "dels tree/16": "best_first/16"}
    report = evaluation.report
    for counts in (report.total, *report.by_source.values()):
        for old, new in names.items():
            counts[new] = counts.pop(old)
    return heldout_facts(report, len(evaluation.drafted))


def parameters(head: Path) -> int:
    """Floating-point numbers of a head's checkpoint."""
    from safetensors import safe_open

    count = 0
    with safe_open(head / "model.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a mapping
            tensor = file.get_tensor(name)
            count += tensor.numel() if tensor.is_floating_point() else 0
    return count


def page(found: dict[str, Any], record: dict[str, Any]) -> ResultPage:
    rows, depths = [], []
    for kind, facts in found.items():
        lengths = facts["heldout"]["mean_acceptance_length"]
        trained = facts["progress"]["slots_trained"]
        rows.append(
            [
                kind, f"{facts['parameters'] / 1e6:.2f}", f"{trained:,}",
                *(f"{lengths[p]:.2f}" if p in lengths else "-" for p in POLICIES),
            ]
        )  # fmt: skip
        shares = facts["heldout"]["rounds_reaching_depth"]["best_first/16"]
        depths.append([kind, " ".join(f"{share:.2f}" for share in shares)])
    sources = sorted({s for facts in found.values() for s in facts["heldout"][BY_SOURCE]})
    by_source = [
        [
            kind,
            *(
                f"{lengths[source][POLICIES[-1]]:.2f}" if source in lengths else "-"
                for source in sources
            ),
        ]
        for kind, lengths in ((k, facts["heldout"][BY_SOURCE]) for k, facts in found.items())
    ]
    header = ("head", "M parameters", "supervised tokens", *POLICIES)
    return ResultPage(
        name="equal_training",
        title="Heads of equal size after equal training",
        about="Mean acceptance length on held-out greedy answers of the target, estimated as "
        "serving drafts. jetspec and dflash are the block heads of JetSpec and DDTree, dels is a "
        "smaller dflash and a local head. longspec reads features of another kind, made of other "
        "answers to the same prompts, so its held-out answers are not those of the others.",
        sections=[
            Section(header, rows),
            Section(("head", *sources), by_source, "Trees of 16 nodes, by kind of prompt"),
            Section(("head", "from depth 1 on"), depths, "Share of rounds that reach each depth"),
        ],
        data=found,
        made_by=[record],
    )


def main() -> None:
    benchmark = Benchmark("equal_training", __doc__, runs_vllm=False)
    add = benchmark.parser.add_argument
    for name in ("target", "features", "heldout"):
        add(f"--{name}", type=Path, required=True)
    add("--longspec-features", type=Path)
    add("--longspec-heldout", type=Path)
    add("--runs", type=Path, required=True, help="folder of the trained heads")
    add("--tokens", type=int, default=200_000, help="supervised tokens of each training")
    add("--tokens-per-step", type=int, default=2240)
    add("--parameters", type=float, default=4.5e6)
    add("--draft-vocab-size", type=int, default=8192)
    add("--eval-sequences", type=int, default=24)
    args = benchmark.parse()
    setup = Setup(
        str(args.target), str(args.features), str(args.heldout), args.draft_vocab_size,
        args.parameters,
        args.tokens, args.tokens_per_step, args.eval_sequences,
    )  # fmt: skip
    longspec = (args.longspec_features, args.longspec_heldout)
    given = (str(longspec[0]), str(longspec[1])) if all(longspec) else None
    found = train_all(setup, args.runs, given)
    benchmark.publish(args, page(found, benchmark.provenance(args)))


if __name__ == "__main__":
    main()
