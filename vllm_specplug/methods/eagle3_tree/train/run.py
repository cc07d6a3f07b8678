# SPDX-License-Identifier: Apache-2.0
"""A whole EAGLE-3 training run: set up or resume, loop, estimate acceptance, export the head."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from vllm_specplug.methods.block.train.run import draft_vocabulary, layer_scales
from vllm_specplug.methods.eagle3_tree.checkpoint import load_eagle3_head, save_eagle3_head
from vllm_specplug.methods.eagle3_tree.config import Eagle3Config
from vllm_specplug.methods.eagle3_tree.head import Eagle3Head
from vllm_specplug.methods.eagle3_tree.train.evaluate import evaluate_eagle3
from vllm_specplug.methods.eagle3_tree.train.trainer import (
    Eagle3Recipe,
    Eagle3Trainer,
    init_eagle3_from_target,
)
from vllm_specplug.methods.longspec.train.run import vocabulary_of
from vllm_specplug.train.features import FeatureStore
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

# Of each held-out answer: a round costs a forward per level.
EVAL_ROUNDS = 24
VOCABULARY_NAME = "draft_ids.pt"


@dataclass(frozen=True)
class Eagle3Run:
    """What a run reads and the shape of its head. `init_from` continues from the weights of another
    head and takes its shape and draft vocabulary; `vocab_from` takes the draft vocabulary of any
    head for this target. `save_lm_head` writes the LM head too, which vLLM's own method needs."""

    target: str
    features: str
    heldout: str
    draft_vocab_size: int = 8192
    intermediate_size: int = 0
    norm_output: bool = False
    init_from: str = ""
    vocab_from: str = ""
    save_lm_head: bool = True
    eval_sequences: int = 24


def eagle3_config(
    target: dict[str, Any],
    layers: tuple[int, ...],
    *,
    draft_vocab_size: int,
    intermediate_size: int = 0,
    norm_output: bool = False,
) -> Eagle3Config:
    """A head of the width, heads and rotary embedding of a target's config."""
    hidden, heads = target["hidden_size"], target["num_attention_heads"]
    rope = target.get("rope_parameters") or target.get("rope_scaling") or {}
    layer = {
        "hidden_size": hidden,
        "intermediate_size": intermediate_size or target["intermediate_size"],
        "num_attention_heads": heads,
        "num_key_value_heads": target.get("num_key_value_heads") or heads,
        "head_dim": target.get("head_dim") or hidden // heads,
        "vocab_size": target["vocab_size"],
        "rms_norm_eps": target["rms_norm_eps"],
        "rope_theta": target.get("rope_theta"),
        "rope_parameters": rope,
        "max_position_embeddings": target.get("max_position_embeddings"),
        "draft_vocab_size": draft_vocab_size,
        "norm_output": norm_output,
        "target_layer_ids": list(layers),
    }
    return Eagle3Config.from_dict(layer, num_target_layers=target["num_hidden_layers"])


def train_eagle3(
    run: Eagle3Run,
    options: Eagle3Recipe,
    loop: LoopOptions,
    log: Log = print,
    on_step: OnStep | None = None,
) -> dict[str, Any]:
    """Trains and writes into `loop.out`: `state.pt` and `draft_ids.pt` to resume, and `head/`
    (config.json, model.safetensors, provenance.json). Returns the provenance facts."""
    loop.refuse_overwriting()
    accelerator = Accelerator(mixed_precision="bf16")
    store, heldout = FeatureStore(run.features), FeatureStore(run.heldout)
    layers = store.target_layer_ids
    if layers != heldout.target_layer_ids:
        raise ValueError(
            f"features hold layers {layers}, held-out features {heldout.target_layer_ids}; make "
            "both with the same layers"
        )
    weights = TargetWeights(run.target)
    tables = weights.tables()
    torch.manual_seed(options.seed)
    vocab_size = int(weights.config["vocab_size"])
    ids_path = Path(loop.out) / VOCABULARY_NAME
    lm_head: torch.Tensor | None = None
    if run.init_from:
        head, extras = load_eagle3_head(run.init_from, weights.config, dtype=torch.float32)
        if head.config.target_layer_ids != layers:
            raise ValueError(
                f"--init-from {run.init_from!r} reads layers {head.config.target_layer_ids}, the "
                f"features hold {layers}; make features with its layers"
            )
        ids = torch.arange(vocab_size) if extras.target_ids is None else extras.target_ids
        lm_head = extras.lm_head
    else:
        size = min(run.draft_vocab_size, vocab_size)
        if loop.resume and ids_path.is_file():
            # Data may have grown since, and with it the counts.
            ids = torch.load(ids_path, weights_only=True)
        elif run.vocab_from:
            ids = vocabulary_of(run.vocab_from)
        else:
            ids, coverage = draft_vocabulary(store, size, vocab_size, weights.end_token_ids)
            log(f"draft vocabulary {len(ids)} covers {coverage:.2%}")
        ids_path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(ids, ids_path)
        config = eagle3_config(
            weights.config,
            layers,
            draft_vocab_size=len(ids),
            intermediate_size=run.intermediate_size,
            norm_output=run.norm_output,
        )
        head = Eagle3Head(config)
        init_eagle3_from_target(
            head,
            weights,
            tables,
            layer_scales(store, len(layers)),
            generator=torch.Generator().manual_seed(options.seed),
        )
    trainer = Eagle3Trainer(
        head,
        store,
        options,
        embed_tokens=tables.embed_tokens,
        draft_lm_head=(tables.lm_head[ids] if lm_head is None else lm_head).contiguous(),
        target_ids=ids,
        accelerator=accelerator,
    )
    if loop.resume:
        trainer.resume(loop.out)
    count = sum(p.numel() for p in head.parameters())
    log(
        f"{len(store)} sequences, {store.num_answer_tokens} answer tokens, "
        f"{count / 1e6:.1f}M parameters, draft vocabulary {len(ids)}, from step {trainer.step}"
    )
    held = evenly_spread(heldout, run.eval_sequences)
    facts: dict[str, Any] = {}

    def export() -> None:
        averaged = trainer.averaged_head()
        report = evaluate_eagle3(
            averaged,
            held,
            tables.embed_tokens.float(),
            trainer.lm_head.float().cpu(),
            ids,
            max_rounds=EVAL_ROUNDS,
        )
        facts.update(
            {
                "target": Path(run.target).name,
                "shape": {
                    "draft_vocab_size": len(ids),
                    "intermediate_size": head.config.intermediate_size,
                    "target_layer_ids": list(layers),
                    "norm_output": head.config.norm_output,
                },
                **progress_facts(trainer),
                "init_from": head_identity(run.init_from) if run.init_from else None,
                "data": {
                    "sequences": len(store),
                    "by_source": store.sources(),
                    "answer_tokens": store.num_answer_tokens,
                },
                "heldout": {
                    "sequences": len(held),
                    "mean_acceptance_length": rounded(report.lengths()),
                    "mean_acceptance_length_by_source": {
                        source: rounded(lengths)
                        for source, lengths in report.lengths_by_source().items()
                    },
                },
            }
        )
        lengths = "  ".join(f"{k} {v:.3f}" for k, v in report.lengths().items())
        log(f"step {trainer.step}: mean acceptance length {lengths}")
        save_eagle3_head(
            Path(loop.out) / "head",
            averaged,
            target_ids=ids,
            lm_head=trainer.lm_head if run.save_lm_head else None,
        )
        write_provenance(Path(loop.out) / "head", facts)

    run_loop(trainer, loop, export, log, on_step)
    return facts
