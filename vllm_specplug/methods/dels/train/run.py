# SPDX-License-Identifier: Apache-2.0
"""A whole run of a local head: set up or resume, train, measure, export."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator

from vllm_specplug.methods.block.checkpoint import load_block_head
from vllm_specplug.methods.block.train.evaluate_run import Evaluation
from vllm_specplug.methods.dels.checkpoint import save_local_head
from vllm_specplug.methods.dels.train.batch import pack_local
from vllm_specplug.methods.dels.train.evaluate import Fusion, LocalTables, evaluate_local_chains
from vllm_specplug.methods.dels.train.trainer import LocalOptions, LocalTrainer
from vllm_specplug.methods.dels.unigram import UnigramCounts
from vllm_specplug.methods.local.head import LocalHead, LocalHeadConfig
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
from vllm_specplug.train.text import TextSequence, TextStore
from vllm_specplug.train.walk import AcceptanceReport

KINDS = ("gru", "markov")


@dataclass(frozen=True, kw_only=True)
class LocalRunOptions(LoopOptions):
    """Folders, shape and loop options of a local head's run.

    `data` and `heldout` hold answers or features. With a `backbone` only the tokens it drafts are
    scored in training, and its acceptance is measured where `heldout` holds features. The prior
    of that measurement is counted on `data`.
    """

    target: str
    data: str
    heldout: str
    kind: str = "gru"
    backbone: str = ""
    block_size: int = 0
    hidden_size: int = 1024
    rank: int = 256
    input_size: int = 0
    parameterization: str = "target_factorized"
    lm_head_mode: str = "target_lm_head"
    rank_activation: str = "silu"
    anchor_input: bool = False
    min_supervised: int = 32
    eval_sequences: int = 64
    eval_alpha: float = 0.3
    eval_beta: float = 0.3


def local_config(run: LocalRunOptions, target: dict[str, Any], drafted: int) -> LocalHeadConfig:
    """Shape of the head to train; `drafted` tokens are scored where the output is a table."""
    if run.kind not in KINDS:
        raise ValueError(f"kind = {run.kind!r}, legal: {', '.join(KINDS)}; choose one of them")
    gru = run.kind == "gru"
    return LocalHeadConfig(
        kind=run.kind,  # type: ignore[arg-type]
        vocab_size=int(target["vocab_size"]),
        target_hidden_size=int(target["hidden_size"]),
        rank=run.rank,
        hidden_size=run.hidden_size if gru else 0,
        input_size=run.input_size,
        # The target's LM head scores every token, trained on or not.
        draft_vocab_size=drafted if run.lm_head_mode == "low_rank" else 0,
        parameterization=run.parameterization,  # type: ignore[arg-type]
        lm_head_mode=run.lm_head_mode,  # type: ignore[arg-type]
        rank_activation=run.rank_activation if gru else "identity",  # type: ignore[arg-type]
        anchor_input=run.anchor_input,
    )


def train_local_head(
    run: LocalRunOptions,
    options: LocalOptions,
    log: Log = print,
    on_step: OnStep | None = None,
) -> dict[str, Any]:
    """Trains until `options.total_steps` or `run.max_minutes`; writes `state.pt` to resume and
    `head/` (config.json, model.safetensors, provenance.json) into `run.out`. Returns the
    provenance facts."""
    out = Path(run.out)
    accelerator = Accelerator(mixed_precision="bf16")
    run.refuse_overwriting()
    weights = TargetWeights(run.target)
    tables = weights.tables()
    vocab_size = int(weights.config["vocab_size"])
    store = TextStore(run.data, run.min_supervised)
    heldout = TextStore(run.heldout)
    ids, block_size = torch.arange(vocab_size), run.block_size
    if run.backbone:
        backbone, extras = load_block_head(run.backbone, weights.config)
        ids = extras.target_ids(backbone.config.draft_vocab_size)
        block_size = block_size or backbone.config.block_size
    block_size = block_size or 16
    if block_size < 2:
        raise ValueError(f"block_size = {block_size}, legal: an integer >= 2; raise it")
    counts = store.answer_counts(vocab_size)
    config = local_config(run, weights.config, len(ids))
    torch.manual_seed(options.seed)
    head = LocalHead(config)
    trainer = LocalTrainer(
        head,
        store,
        options,
        block_size=block_size,
        embed_tokens=tables.embed_tokens,
        lm_head=tables.lm_head[ids].contiguous(),
        target_ids=ids,
        counts=counts,
        accelerator=accelerator,
    )
    if run.resume:
        trainer.resume(out)
    parameters = sum(p.numel() for p in head.parameters())
    log(
        f"{len(store)} sequences, {int(counts.sum())} answer tokens, {parameters / 1e6:.2f}M "
        f"parameters, {len(ids)} tokens scored, from step {trainer.step}"
    )
    evaluation = None
    if run.backbone and heldout.has_teacher:
        evaluation = Evaluation(run.target, run.backbone, run.heldout, run.eval_sequences)
    held = evenly_spread(heldout, run.eval_sequences)
    prior = UnigramCounts(counts).log_probs(vocab_size)
    facts: dict[str, Any] = {}

    def export() -> None:
        averaged = trainer.averaged_head()
        losses = heldout_losses(
            averaged, held, block_size, trainer.embed_tokens, trainer.lm_head, ids
        )
        reached: dict[str, Any] = {
            "sequences": len(held),
            "cross_entropy_by_tokens_read": [round(v, 4) for v in losses],
            "unigram_cross_entropy": round(unigram_loss(prior, held, ids), 4),
        }
        if evaluation is not None:
            reached["mean_acceptance_length"] = rounded(
                heldout_lengths(averaged, evaluation, prior, run.eval_alpha, run.eval_beta)
            )
        log(f"step {trainer.step}: held-out {reached}")
        facts.update(
            {
                "target": Path(run.target).name,
                "shape": {"block_size": trainer.block_size, **_shape(config)},
                "data": {
                    "kind": "features" if store.has_teacher else "answers",
                    "sequences": len(store),
                    "by_source": store.sources(),
                    "answer_tokens": int(counts.sum()),
                },
                **({"backbone": head_identity(run.backbone)} if run.backbone else {}),
                **progress_facts(trainer),
                "heldout": reached,
            }
        )
        part = config.draft_vocab_size < vocab_size
        d2t = ids - torch.arange(len(ids)) if part else None
        save_local_head(out / "head", averaged, d2t=d2t)
        write_provenance(out / "head", facts)

    run_loop(trainer, run, export, log, on_step)
    return facts


def _shape(config: LocalHeadConfig) -> dict[str, Any]:
    names = ("kind", "hidden_size", "input_size", "rank", "parameterization", "lm_head_mode")
    return {name: getattr(config, name) for name in (*names, "rank_activation", "anchor_input")}


@torch.no_grad()
def heldout_losses(
    head: LocalHead,
    sequences: Sequence[TextSequence],
    block_size: int,
    embed_tokens: torch.Tensor,
    lm_head: torch.Tensor,
    target_ids: torch.Tensor,
) -> list[float]:
    """Mean cross-entropy in nats after reading 1, 2, .. tokens, over the scored tokens."""
    where = torch.full((head.config.vocab_size,), -1, dtype=torch.int64)
    where[target_ids] = torch.arange(len(target_ids))
    length = block_size - 1
    total, count = torch.zeros(length), torch.zeros(length)
    for sequence in sequences:
        anchors = torch.arange(sequence.prompt_len, len(sequence.tokens) - 1)[::4]
        if not len(anchors):
            continue
        batch = pack_local([sequence], [anchors], block_size)
        labels = where[batch.labels]
        known = batch.valid & (labels >= 0)
        ranks = head.ranks(batch.tokens, embed_tokens)[0]
        logits = head.logits(ranks.to(lm_head.dtype).to(ranks.dtype), lm_head)
        losses = F.cross_entropy(
            logits.float().flatten(0, 1), labels.clamp_min(0).flatten(), reduction="none"
        )
        total += (losses.view_as(labels) * known).sum(0)
        count += known.sum(0)
    return (total / count.clamp_min(1)).tolist()


def unigram_loss(
    log_prior: torch.Tensor, sequences: Sequence[TextSequence], target_ids: torch.Tensor
) -> float:
    """Mean cross-entropy in nats of the prior alone, renormalised to the scored tokens."""
    scored = torch.full_like(log_prior, -math.inf)
    scored[target_ids] = torch.log_softmax(log_prior[target_ids], -1)
    answers = torch.cat([s.tokens[s.prompt_len + 1 :] for s in sequences])
    losses = -scored[answers]
    return float(losses[losses.isfinite()].mean())


def heldout_lengths(
    head: LocalHead, evaluation: Evaluation, log_prior: torch.Tensor, alpha: float, beta: float
) -> dict[str, float]:
    """Acceptance length of the backbone's chain and of the fused chain, the anchor fed or not."""
    report = AcceptanceReport()
    for name, fed in (("dels", False), ("dels, anchor fed", True)):
        # A head with a table of its own scores the backbone's tokens, row for row.
        tables = LocalTables.build(
            head, evaluation.draft, log_prior, evaluation.draft.target_ids, fed
        )
        fusion = Fusion.of(tables, evaluation.depth, alpha, beta)
        none = Fusion.of(tables, evaluation.depth, 0.0, 0.0)
        fusions = {name: fusion} if fed else {"backbone": none, name: fusion}
        evaluate_local_chains(tables, evaluation.drafted, fusions, report)
    return report.lengths()
