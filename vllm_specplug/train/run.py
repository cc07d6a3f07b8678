# SPDX-License-Identifier: Apache-2.0
"""A whole training run: set up or resume, loop, estimate acceptance, export the head."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from vllm_specplug.models.block_head import BlockHead
from vllm_specplug.models.checkpoint import save_block_head
from vllm_specplug.train.evaluate import AcceptanceReport, evaluate_head
from vllm_specplug.train.features import FeatureStore
from vllm_specplug.train.jetspec import STATE_NAME, JetSpecTrainer, TrainOptions
from vllm_specplug.train.provenance import write_provenance
from vllm_specplug.train.target import TargetWeights, head_config_for, init_from_target


@dataclass(frozen=True)
class RunOptions:
    """Folders and rhythm of a run. `max_minutes` 0 means no limit; a limited run saves and stops,
    and continues with `resume`."""

    target: str
    features: str
    heldout: str
    out: str
    num_layers: int = 2
    intermediate_size: int = 0
    block_size: int = 8
    draft_vocab_size: int = 8192
    causal: bool = True
    eval_every: int = 250
    save_every: int = 100
    log_every: int = 25
    eval_sequences: int = 64
    max_minutes: float = 0.0
    resume: bool = False


def draft_vocabulary(
    store: FeatureStore, size: int, vocab_size: int, always: Sequence[int] = ()
) -> tuple[torch.Tensor, float]:
    """The `size` most frequent answer tokens, and `always` (end-of-turn ids).

    Returns:
        their ids, int64 [size] ascending, and the share of answer tokens they cover.
    """
    counts: Counter[int] = Counter()
    for shard in store.shards:
        for i in range(len(shard)):
            start = int(shard.offsets[i]) + int(shard.prompt_lens[i])
            counts.update(shard.tokens[start : int(shard.offsets[i + 1])].tolist())
    total = sum(counts.values())
    ranked = [t for t in always] + [t for t, _ in counts.most_common() if t not in always]
    # Unseen tokens fill up a small corpus: low ids are the frequent merges of a BPE vocabulary.
    seen = set(ranked)
    fill = (t for t in range(vocab_size) if t not in seen)
    while len(ranked) < size:
        ranked.append(next(fill))
    ids = sorted(ranked[:size])
    covered = sum(counts[t] for t in ids) / max(total, 1)
    return torch.tensor(ids, dtype=torch.int64), covered


def layer_scales(store: FeatureStore, layers: int, sequences: int = 32) -> list[float]:
    """Root mean square of every selected layer's output over a sample. The first token is left out:
    language models keep an outlier state there."""
    stride = max(1, len(store) // sequences)
    rows = torch.cat([store[i].aux[1:].float() for i in range(0, len(store), stride)][:sequences])
    return [float(part.pow(2).mean().sqrt()) for part in rows.chunk(layers, dim=-1)]


def train_jetspec(
    run: RunOptions,
    options: TrainOptions,
    log: Callable[[str], None] = print,
    on_step: Callable[[int, dict[str, float]], None] | None = None,
) -> dict[str, Any]:
    """Trains until `options.total_steps` or `run.max_minutes`; writes into `run.out`:

    `state.pt` to resume, `draft_ids.pt`, and `head/` (config.json, model.safetensors,
    provenance.json), exported at every evaluation. Returns the provenance facts.
    """
    out = Path(run.out)
    accelerator = Accelerator(mixed_precision="bf16")
    store, heldout = FeatureStore(run.features), FeatureStore(run.heldout)
    if store.target_layer_ids != heldout.target_layer_ids:
        raise ValueError(
            f"features hold layers {store.target_layer_ids}, held-out features "
            f"{heldout.target_layer_ids}; make both with the same layers"
        )
    weights = TargetWeights(run.target)
    tables = weights.tables()
    ids_path = out / "draft_ids.pt"
    if run.resume and ids_path.is_file():
        saved = torch.load(ids_path, weights_only=True)
        ids, coverage = saved["ids"], saved["coverage"]
    else:
        if (out / STATE_NAME).is_file():
            raise ValueError(
                f"{out / STATE_NAME} exists; pass --resume to continue it, or name "
                "another output folder"
            )
        eos = weights.config.get("eos_token_id")
        always = eos if isinstance(eos, list) else [eos] if eos is not None else []
        size = min(run.draft_vocab_size, int(weights.config["vocab_size"]))
        ids, coverage = draft_vocabulary(store, size, int(weights.config["vocab_size"]), always)
        if accelerator.is_main_process:
            out.mkdir(parents=True, exist_ok=True)
            torch.save({"ids": ids, "coverage": coverage}, ids_path)
    config = head_config_for(
        weights.config,
        store.target_layer_ids,
        num_layers=run.num_layers,
        block_size=run.block_size,
        draft_vocab_size=len(ids),
        intermediate_size=run.intermediate_size or None,
        causal=run.causal,
    )
    torch.manual_seed(options.seed)
    head = BlockHead(config)
    init_from_target(
        head,
        weights,
        tables,
        layer_scales(store, len(config.target_layer_ids)),
        generator=torch.Generator().manual_seed(options.seed),
    )
    draft_lm_head = tables.lm_head[ids].contiguous()
    trainer = JetSpecTrainer(
        head,
        store,
        options,
        embed_tokens=tables.embed_tokens,
        draft_lm_head=draft_lm_head,
        target_ids=ids,
        accelerator=accelerator,
    )
    if run.resume:
        trainer.resume(out)
    count = sum(p.numel() for p in head.parameters())
    log(
        f"{len(store)} sequences, {store.num_answer_tokens} answer tokens, "
        f"{count / 1e6:.1f}M parameters, draft vocabulary {len(ids)} covers {coverage:.2%}, "
        f"from step {trainer.step}"
    )
    stride = max(1, len(heldout) // run.eval_sequences)
    held = [heldout[i] for i in range(0, len(heldout), stride)][: run.eval_sequences]
    facts: dict[str, Any] = {}

    def export() -> None:
        averaged = trainer.averaged_head()
        report = evaluate_head(averaged, held, trainer.drafting_embeds(), trainer.lm_head, ids)
        facts.update(run_facts(run, trainer, coverage, len(held), report))
        lengths = "  ".join(f"{k} {v:.3f}" for k, v in report.lengths().items())
        slots = " ".join(f"{v:.2f}" for v in report.slot_accuracy())
        log(f"step {trainer.step}: mean acceptance length {lengths}; slot accuracy {slots}")
        save_block_head(out / "head", averaged, d2t=ids - torch.arange(len(ids)))
        write_provenance(out / "head", facts)

    began, losses = time.monotonic(), math.nan
    while trainer.step < options.total_steps:
        numbers = trainer.train_step()
        loss = numbers["loss"]
        losses = loss if math.isnan(losses) else 0.95 * losses + 0.05 * loss
        if on_step is not None:
            on_step(trainer.step, {**numbers, "loss_average": losses})
        if trainer.step % run.log_every == 0 and accelerator.is_main_process:
            log(
                f"step {trainer.step}: loss {losses:.4f}, {numbers['slots_per_second']:.0f}"
                " slots/s, "
                f"{trainer.seconds / 60:.1f} min of steps"
            )
        done = trainer.step >= options.total_steps
        late = run.max_minutes > 0 and time.monotonic() - began > run.max_minutes * 60
        if accelerator.is_main_process:
            if trainer.step % run.save_every == 0 or done or late:
                trainer.save(out)
            if trainer.step % run.eval_every == 0 or done or late:
                export()
        if late:
            log(
                f"stopped at step {trainer.step} after {run.max_minutes} minutes; continue with "
                "--resume"
            )
            break
    return facts


def run_facts(
    run: RunOptions,
    trainer: JetSpecTrainer,
    coverage: float,
    held: int,
    report: AcceptanceReport,
) -> dict[str, Any]:
    """The run's part of provenance.json."""

    def rounded(values: dict[str, float]) -> dict[str, float]:
        return {name: round(value, 3) for name, value in values.items()}

    sources: Counter[str] = Counter()
    for shard in trainer.store.shards:
        sources.update(source.split("/")[0] for source in shard.meta["sources"])
    return {
        "target": Path(run.target).name,
        "shape": {
            "num_layers": run.num_layers,
            "block_size": run.block_size,
            "target_layer_ids": list(trainer.store.target_layer_ids),
            "draft_vocab_size": len(trainer.lm_head),
            "causal": run.causal,
        },
        "recipes": trainer.recipes,
        "data": {
            "sequences": len(trainer.store),
            "by_source": dict(sorted(sources.items())),
            "answer_tokens": trainer.store.num_answer_tokens,
            "draft_vocabulary_coverage": round(coverage, 5),
        },
        "progress": {
            "step": trainer.step,
            "epochs": trainer.order.epoch,
            "slots_trained": trainer.slots_trained,
            "training_minutes": round(trainer.seconds / 60, 1),
        },
        "heldout": {
            "sequences": held,
            "mean_acceptance_length": rounded(report.lengths()),
            "mean_acceptance_length_by_source": {
                source: rounded(values) for source, values in report.lengths_by_source().items()
            },
            "slot_accuracy": [round(v, 3) for v in report.slot_accuracy()],
        },
    }
