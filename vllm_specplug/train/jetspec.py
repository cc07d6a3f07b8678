# SPDX-License-Identifier: Apache-2.0
"""Training of a JetSpec head from cached features.

Each step packs blocks of several sequences, runs the head in bfloat16 autocast over float32
parameters and distils the target's distribution. Every random choice is a function of the seed and
the step, so a run that resumes from a checkpoint continues bit for bit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn

from vllm_specplug.models.block_head import BlockHead
from vllm_specplug.train.blocks import (
    BlockBatch,
    pack_blocks,
    run_blocks,
    sample_anchors,
    thin_anchors,
)
from vllm_specplug.train.features import FeatureSequence, FeatureStore
from vllm_specplug.train.losses import LOSSES, head_loss, position_weights

STATE_NAME = "state.pt"
# Shapes are rounded so that the GEMM library's cache of compiled kernels is hit.
_ANCHOR_MULTIPLE, _CONTEXT_MULTIPLE = 8, 64


@dataclass(frozen=True)
class TrainOptions:
    """Recipe of a run. Changing one between checkpoint and resume is allowed; the shape of the
    head is not here."""

    loss: str = "forward_kl"
    temperature: float = 1.0
    position_gamma: float = 4.0
    regression_weight: float = 0.0
    optimizer: str = "muon"
    learning_rate: float = 3e-3
    adam_learning_rate: float = 1e-3
    weight_decay: float = 0.0
    warmup_steps: int = 50
    total_steps: int = 2000
    decay_share: float = 0.3
    grad_clip: float = 1.0
    ema_decay: float = 0.995
    anchors_per_step: int = 640
    anchor_stride: int = 3
    short_block_size: int = 0
    short_block_share: float = 0.0
    seed: int = 0
    compile: bool = False

    def __post_init__(self) -> None:
        for name, legal in (("loss", LOSSES), ("optimizer", ("adamw", "muon"))):
            if getattr(self, name) not in legal:
                raise ValueError(
                    f"{name} = {getattr(self, name)!r}, legal: {', '.join(legal)}; "
                    "choose one of them"
                )
        for name, low in (
            ("total_steps", 1),
            ("anchors_per_step", 1),
            ("anchor_stride", 1),
            ("warmup_steps", 0),
        ):
            if getattr(self, name) < low:
                raise ValueError(
                    f"{name} = {getattr(self, name)}, legal: an integer >= {low}; raise it"
                )
        for name in ("learning_rate", "adam_learning_rate", "temperature"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} = {getattr(self, name)}, legal: a number > 0; raise it")
        for name in ("decay_share", "short_block_share", "ema_decay"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} = {getattr(self, name)}, legal: 0..1; correct it")

    def lr_scale(self, step: int) -> float:
        """Warm-up, constant, then linear to zero over the last `decay_share` of the steps.

        The constant part does not depend on `total_steps`, so a run can be extended on resume.
        """
        warm = min(1.0, (step + 1) / max(1, self.warmup_steps))
        decay_steps = max(1, round(self.total_steps * self.decay_share))
        left = (self.total_steps - step) / decay_steps
        return warm * min(1.0, max(0.0, left))


class Drafting(nn.Module):
    """The head with its frozen tables, so that one forward is a whole training forward."""

    def __init__(self, head: BlockHead, embed_tokens: torch.Tensor):
        super().__init__()
        self.head = head
        self.register_buffer("embed_tokens", embed_tokens, persistent=False)

    def forward(self, batch: BlockBatch) -> torch.Tensor:
        """[A*(b-1), H], final normed states of slots 1.."""
        return run_blocks(self.head, batch, self.embed_tokens)


class DataOrder:
    """Endless shuffled order over a feature store that may grow between epochs.

    State is (epoch, cursor, size): an epoch is a permutation of the first `size` sequences drawn
    from (seed, epoch). Shards must only be appended.
    """

    def __init__(self, store: FeatureStore, seed: int):
        self.store, self.seed = store, seed
        self.epoch, self.cursor, self.size = 0, 0, len(store)
        self._order: list[int] | None = None

    def state(self) -> dict[str, int]:
        """What `restore` needs."""
        return {"epoch": self.epoch, "cursor": self.cursor, "size": self.size}

    def restore(self, state: dict[str, int]) -> None:
        """Continues where `state` was taken."""
        if state["size"] > len(self.store):
            raise ValueError(
                f"the checkpoint saw {state['size']} sequences, the feature folder "
                f"holds {len(self.store)}; resume with the folder it was made with"
            )
        self.epoch, self.cursor, self.size = state["epoch"], state["cursor"], state["size"]
        self._order = None

    def __next__(self) -> int:
        if self.cursor >= self.size:
            self.epoch, self.cursor, self.size = self.epoch + 1, 0, len(self.store)
            self._order = None
        if self._order is None:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
            self._order = torch.randperm(self.size, generator=generator).tolist()
        self.cursor += 1
        return self._order[self.cursor - 1]

    def __iter__(self) -> Iterator[int]:
        return self


class JetSpecTrainer:
    """One training run: step, checkpoint, resume.

    Args:
        head: initialised head; its parameters become float32.
        embed_tokens: [V, H]; draft_lm_head: [V', H] rows of the target's LM head;
        target_ids: int64 [V'] token of each draft id.
    """

    def __init__(
        self,
        head: BlockHead,
        store: FeatureStore,
        options: TrainOptions,
        *,
        embed_tokens: torch.Tensor,
        draft_lm_head: torch.Tensor,
        target_ids: torch.Tensor,
        accelerator: Accelerator | None = None,
    ):
        self.options = options
        self.accelerator = accelerator or Accelerator(mixed_precision="bf16")
        self.device = self.accelerator.device
        self.head = head.float().requires_grad_(True).train()
        self.store = store
        self.order = DataOrder(store, options.seed)
        self.step = 0
        self.seconds = 0.0
        self.slots_trained = 0
        # Every recipe of the run and the step it began at: a resumed run may change it.
        self.recipes: list[dict[str, Any]] = [{"from_step": 0, **asdict(options)}]
        self.lm_head = draft_lm_head.to(self.device, torch.bfloat16)
        self.to_draft = torch.full((embed_tokens.shape[0],), -1, dtype=torch.int64)
        self.to_draft[target_ids] = torch.arange(len(target_ids))
        matrices = [p for p in head.parameters() if p.ndim == 2]
        others = [p for p in head.parameters() if p.ndim != 2]
        if options.optimizer == "muon":
            optimizers: list[torch.optim.Optimizer] = [
                torch.optim.Muon(
                    matrices,
                    lr=options.learning_rate,
                    momentum=0.95,
                    weight_decay=options.weight_decay,
                    adjust_lr_fn="match_rms_adamw",
                ),
                torch.optim.AdamW(
                    others, lr=options.adam_learning_rate, betas=(0.9, 0.95), weight_decay=0.0
                ),
            ]
        else:
            optimizers = [
                torch.optim.AdamW(
                    [
                        {"params": matrices, "weight_decay": options.weight_decay},
                        {"params": others, "weight_decay": 0.0},
                    ],
                    lr=options.adam_learning_rate,
                    betas=(0.9, 0.95),
                )
            ]
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["base_lr"] = group["lr"]
        drafting = Drafting(head, embed_tokens.to(torch.bfloat16))
        prepared = self.accelerator.prepare(drafting, *optimizers)
        self.drafting, self.optimizers = prepared[0], list(prepared[1:])
        self.ema = {name: p.detach().clone() for name, p in head.named_parameters()}
        if options.compile:
            compile_head(self.head)

    def next_batch(self) -> BlockBatch:
        """The blocks of the next step on this process."""
        options = self.options
        generator = torch.Generator().manual_seed(
            (options.seed * 7919 + self.step) * 1024 + self.accelerator.process_index
        )
        size = self.head.config.block_size
        short = torch.rand((), generator=generator).item() < options.short_block_share
        if short and options.short_block_size >= 2:
            size = options.short_block_size
        wanted = options.anchors_per_step * self.head.config.block_size // size
        sequences: list[FeatureSequence] = []
        anchors: list[torch.Tensor] = []
        count = taken = 0
        while count < wanted:
            index = next(self.order)
            taken += 1
            if taken % self.accelerator.num_processes != self.accelerator.process_index:
                continue
            sequence = self.store[index]
            at = sample_anchors(sequence, options.anchor_stride, generator)
            at = thin_anchors(at, _ANCHOR_MULTIPLE, generator)[: wanted - count]
            if len(at):
                sequences.append(sequence)
                anchors.append(at)
                count += len(at)
        return pack_blocks(sequences, anchors, size, _CONTEXT_MULTIPLE)

    def train_step(self) -> dict[str, float]:
        """One optimiser step; returns its loss (a weighted mean per slot) and rates."""
        began = time.perf_counter()
        options = self.options
        batch = self.next_batch()
        weights = position_weights(batch.block_size - 1, options.position_gamma)
        weights = weights.repeat(len(batch.anchor_tokens)) * batch.valid
        weights /= weights.sum()
        labels = self.to_draft[batch.labels]
        batch = batch.to(self.device)
        weights, labels = weights.to(self.device), labels.to(self.device)
        with self.accelerator.autocast():
            hidden = self.drafting(batch)
        loss = head_loss(
            hidden.to(torch.bfloat16),
            batch.teacher,
            self.lm_head,
            labels,
            weights,
            options.loss,
            options.temperature,
            compiled=options.compile,
        )
        total = loss
        if options.regression_weight > 0:
            distance = F.smooth_l1_loss(hidden.float(), batch.teacher.float(), reduction="none")
            total = loss + options.regression_weight * (distance.mean(-1) * weights).sum()
        self.accelerator.backward(total)
        norm = self.accelerator.clip_grad_norm_(self.head.parameters(), options.grad_clip)
        scale = options.lr_scale(self.step)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["base_lr"] * scale
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self._update_ema()
        self.step += 1
        self.slots_trained += int(batch.valid.sum()) * self.accelerator.num_processes
        elapsed = time.perf_counter() - began
        self.seconds += elapsed
        value = float(loss.detach())
        if not math.isfinite(value):
            raise RuntimeError(
                f"the loss became {value} at step {self.step}; lower the learning "
                "rate or resume from an earlier checkpoint"
            )
        return {
            "loss": value,
            "grad_norm": float(norm),
            "lr_scale": scale,
            "slots_per_second": len(batch.positions) / elapsed,
        }

    def drafting_embeds(self) -> torch.Tensor:
        """The frozen token embeddings, on the training device."""
        return self.accelerator.unwrap_model(self.drafting).embed_tokens

    def _update_ema(self) -> None:
        # The average of the first steps would be dominated by the initial weights.
        decay = min(self.options.ema_decay, (self.step + 1) / (self.step + 10))
        with torch.no_grad():
            for name, parameter in self.head.named_parameters():
                self.ema[name].lerp_(parameter, 1.0 - decay)

    def averaged_head(self) -> BlockHead:
        """A copy of the head with the exponentially averaged weights (raw ones at ema_decay 0)."""
        with torch.device("meta"):
            head = BlockHead(self.head.config)
        source = self.ema if self.options.ema_decay > 0 else dict(self.head.named_parameters())
        head.load_state_dict({k: v.detach().clone() for k, v in source.items()}, assign=True)
        return head.eval()

    def save(self, folder: str | Path) -> None:
        """Writes everything `resume` needs, replacing the old state only when complete."""
        if not self.accelerator.is_main_process:
            return
        path = Path(folder) / STATE_NAME
        path.parent.mkdir(parents=True, exist_ok=True)
        state: dict[str, Any] = {
            "head": self.head.state_dict(),
            "ema": self.ema,
            "optimizers": [o.state_dict() for o in self.optimizers],
            "order": self.order.state(),
            "step": self.step,
            "seconds": self.seconds,
            "slots_trained": self.slots_trained,
            "options": asdict(self.options),
            "recipes": self.recipes,
        }
        torch.save(state, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").replace(path)

    def resume(self, folder: str | Path) -> None:
        """Continues a saved run; learning rates and schedule come from the current options."""
        path = Path(folder) / STATE_NAME
        if not path.is_file():
            raise ValueError(
                f"{path} does not exist; start without resuming, or name the folder "
                "of a run that has saved"
            )
        state = torch.load(path, map_location=self.device, weights_only=True)
        if state["options"]["optimizer"] != self.options.optimizer:
            raise ValueError(
                f"optimizer = {self.options.optimizer!r}, but the checkpoint has "
                f"{state['options']['optimizer']!r}; resume with that one"
            )
        self.head.load_state_dict(state["head"])
        for name, tensor in state["ema"].items():
            self.ema[name].copy_(tensor)
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            base = [group["base_lr"] for group in optimizer.param_groups]
            optimizer.load_state_dict(saved)
            for group, lr in zip(optimizer.param_groups, base, strict=True):
                group["base_lr"] = lr
        self.order.restore(state["order"])
        self.step, self.seconds = state["step"], state["seconds"]
        self.slots_trained = state["slots_trained"]
        self.recipes = state.get("recipes", [{"from_step": 0, **state["options"]}])
        if {"from_step": self.recipes[-1]["from_step"], **asdict(self.options)} != self.recipes[-1]:
            self.recipes.append({"from_step": self.step, **asdict(self.options)})


def compile_head(head: BlockHead) -> None:
    """Fuses the elementwise work around the GEMMs with torch.compile (dynamic shapes)."""
    compiled: Callable[..., Any] = torch.compile
    for layer in head.layers:
        layer.project = compiled(layer.project, dynamic=True)  # type: ignore[method-assign]
        layer.finish = compiled(layer.finish, dynamic=True)  # type: ignore[method-assign]
        layer.self_attn.key_value = compiled(  # type: ignore[method-assign]
            layer.self_attn.key_value, dynamic=True
        )
    head.context_features = compiled(head.context_features, dynamic=True)  # type: ignore
