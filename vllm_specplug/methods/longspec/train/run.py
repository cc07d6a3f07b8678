# SPDX-License-Identifier: Apache-2.0
"""A whole LongSpec training run: set up or resume, loop, estimate acceptance, export the layer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from vllm_specplug.methods.block.checkpoint import read_tensors
from vllm_specplug.methods.block.train.run import draft_vocabulary
from vllm_specplug.methods.longspec.checkpoint import load_longspec_head, save_longspec_head
from vllm_specplug.methods.longspec.config import DEFAULT_WINDOW, LongSpecConfig, check_window
from vllm_specplug.methods.longspec.head import LongSpecHead
from vllm_specplug.methods.longspec.train.evaluate import evaluate_longspec
from vllm_specplug.methods.longspec.train.features import KVFeatureStore
from vllm_specplug.methods.longspec.train.trainer import (
    LongSpecRecipe,
    LongSpecTrainer,
    init_longspec_from_target,
)
from vllm_specplug.train.loop import (
    Log,
    LoopOptions,
    OnStep,
    head_identity,
    progress_facts,
    rounded,
    run_loop,
)
from vllm_specplug.train.order import evenly_spread
from vllm_specplug.train.provenance import write_provenance
from vllm_specplug.train.target import TargetWeights


@dataclass(frozen=True)
class LongSpecRun:
    """What a run reads and the shape of its head. `init_from` continues from the weights of another
    head (the next stage) and takes its shape and draft vocabulary; `vocab_from` takes the draft
    vocabulary of any head for this target."""

    target: str
    features: str
    heldout: str
    window_size: int = DEFAULT_WINDOW
    draft_vocab_size: int = 8192
    vocab_from: str = ""
    intermediate_size: int = 0
    init_from: str = ""
    eval_sequences: int = 24


def vocabulary_of(folder: str) -> torch.Tensor:
    """Target token of each draft id of a head, int64 [V'].

    Raises:
        ValueError: when the head drafts over the whole vocabulary, or cannot be read.
    """
    d2t = read_tensors(Path(folder)).get("d2t")
    if d2t is None:
        raise ValueError(
            f"--vocab-from {folder!r} has no reduced draft vocabulary (tensor 'd2t'); leave it out "
            "or name another head"
        )
    return d2t.to(torch.int64) + torch.arange(len(d2t))


def train_longspec(
    run: LongSpecRun,
    options: LongSpecRecipe,
    loop: LoopOptions,
    log: Log = print,
    on_step: OnStep | None = None,
) -> dict[str, Any]:
    """Trains and writes into `loop.out`: `state.pt` to resume and `head/` (config.json,
    model.safetensors, provenance.json). Returns the provenance facts."""
    check_window("window_size", run.window_size)
    loop.refuse_overwriting()
    accelerator = Accelerator(mixed_precision="bf16")
    store, heldout = KVFeatureStore(run.features), KVFeatureStore(run.heldout)
    weights = TargetWeights(run.target)
    tables = weights.tables()
    torch.manual_seed(options.seed)
    vocab_size = int(weights.config["vocab_size"])
    if run.init_from:
        head, extras = load_longspec_head(run.init_from, weights.config, dtype=torch.float32)
        ids = torch.arange(vocab_size) if extras.target_ids is None else extras.target_ids
        coverage = None
    else:
        size = min(run.draft_vocab_size, vocab_size)
        if run.vocab_from:
            ids, coverage = vocabulary_of(run.vocab_from), None
        else:
            ids, coverage = draft_vocabulary(store, size, vocab_size, weights.end_token_ids)
        head = LongSpecHead(
            LongSpecConfig.for_target(
                weights.config,
                window_size=run.window_size,
                draft_vocab_size=len(ids),
                intermediate_size=run.intermediate_size or None,
            )
        )
        init_longspec_from_target(head, weights)
    trainer = LongSpecTrainer(
        head,
        store,
        options,
        embed_tokens=tables.embed_tokens,
        draft_lm_head=tables.lm_head[ids].contiguous(),
        target_ids=ids,
        accelerator=accelerator,
    )
    if loop.resume:
        trainer.resume(loop.out)
    count = sum(p.numel() for p in head.parameters())
    log(
        f"{len(store)} sequences, {store.num_answer_tokens} supervised tokens, "
        f"{count / 1e6:.1f}M parameters, draft vocabulary {len(ids)}, from step {trainer.step}"
    )
    held = evenly_spread(heldout, run.eval_sequences)
    facts: dict[str, Any] = {}

    def export() -> None:
        averaged = trainer.averaged_head()
        report = evaluate_longspec(
            averaged, held, tables.embed_tokens.float(), trainer.lm_head.cpu(), ids
        )
        facts.update(
            {
                "target": Path(run.target).name,
                "shape": {
                    "window_size": head.config.window_size,
                    "draft_vocab_size": len(ids),
                    "intermediate_size": head.config.intermediate_size,
                },
                **progress_facts(trainer),
                "init_from": head_identity(run.init_from) if run.init_from else None,
                "data": {
                    "sequences": len(store),
                    "by_source": store.sources(),
                    "supervised_tokens": store.num_answer_tokens,
                    "draft_vocabulary_coverage": coverage,
                },
                "heldout": {
                    "sequences": len(held),
                    "mean_acceptance_length": rounded(report.lengths()),
                },
            }
        )
        lengths = "  ".join(f"{k} {v:.3f}" for k, v in report.lengths().items())
        log(f"step {trainer.step}: mean acceptance length {lengths}")
        # A draft vocabulary that is the whole one needs no map.
        whole = len(ids) == vocab_size
        folder = Path(loop.out) / "head"
        save_longspec_head(folder, averaged, target_ids=None if whole else ids)
        write_provenance(folder, facts)

    run_loop(trainer, loop, export, log, on_step)
    return facts
