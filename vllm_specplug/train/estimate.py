# SPDX-License-Identifier: Apache-2.0
"""What a run needs: time, disk and memory, with stored features and with the target beside it."""

from __future__ import annotations

import shutil
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vllm_specplug.train.answers import answer_shards, read_answers
from vllm_specplug.train.features import chosen_layers
from vllm_specplug.train.online import OnlineFeatures
from vllm_specplug.train.options import FeatureRunOptions, Recipe
from vllm_specplug.train.order import EvenlySpread
from vllm_specplug.train.target import decoder_of, empty_target
from vllm_specplug.train.trainer import Trainer

# Weights, gradients and average of a head, float32, and the moments of its optimiser.
_BYTES_PER_PARAMETER = {"muon": 16, "adamw": 20}
_STEPS, _SEQUENCES = 3, 8
# Of a device whose time cannot be measured: a fifth of an H100's dense bfloat16 peak.
ASSUMED_FLOPS = 200e12


def estimate(trainer: Trainer, out: Path) -> list[str]:
    """Returns what a run needs as lines of text, measured with a few steps, which are not kept."""
    options, store = trainer.options, trainer.store
    seconds = []
    for _ in range(_STEPS):
        _synchronise(trainer.device)
        began = time.perf_counter()
        trainer.train_step()
        _synchronise(trainer.device)
        seconds.append(time.perf_counter() - began)
    # The first step compiles kernels.
    step = min(seconds[1:])
    drawn = trainer.order.epoch * trainer.order.size + trainer.order.cursor
    epoch = max(1, round(len(store) * trainer.step / max(1, drawn)))
    parameters = sum(p.numel() for p in trainer.head.parameters())
    memory = parameters * _BYTES_PER_PARAMETER[options.optimizer]
    memory += sum(_bytes(t) for t in (trainer.tables.embed_tokens, trainer.tables.lm_head))
    lines = [
        f"an epoch is about {epoch:,} steps; --total-steps {options.total_steps:,} is "
        f"{options.total_steps / epoch:.1f} epochs",
        f"head and tables: {_size(memory)} of memory per process, besides activations",
    ]
    if not isinstance(store, OnlineFeatures):
        lines.append(f"training: {_duration(step * options.total_steps)}, {step:.2f} s per step")
    else:
        lines += _choice(store, step, options.total_steps, drawn / trainer.step, trainer, out)
    if trainer.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(trainer.device)
        lines.append(f"measured peak of device memory: {_size(peak)}")
    return lines


def _choice(
    store: OnlineFeatures, step: float, steps: int, drawn: float, trainer: Trainer, out: Path
) -> list[str]:
    """Returns the lines that compare stored features with a target beside the trainer."""
    processes = trainer.accelerator.num_processes
    tokens = sum(store.length(index) for index in range(len(store)))
    sample = [store.text(index) for index in EvenlySpread(store, _SEQUENCES).indices]
    sample_tokens = sum(len(text) for text in sample)
    _synchronise(trainer.device)
    began = time.perf_counter()
    states = store.with_states(sample)
    _synchronise(trainer.device)
    per_token = (time.perf_counter() - began) / sample_tokens
    disk = tokens * state_bytes(states[0]) // len(states[0].tokens)
    target = sum(_bytes(p) for p in store.model.parameters())
    # Each process draws its share of the order's positions.
    in_target = per_token * tokens / len(store) * drawn / processes
    stored_step = max(step - in_target, 0.0)
    forward = per_token * tokens / processes
    stored = forward + stored_step * steps
    lines = [
        f"{len(store):,} sequences, {tokens:,} tokens; the target reads {1 / per_token:,.0f} "
        f"tokens/s per process",
        f"--answers (target beside the trainer): {_duration(step * steps)}, {step:.2f} s per step; "
        f"no disk; {_size(target)} more memory per process",
        f"stored features: {_duration(stored)}, of which {_duration(forward)} are `specplug data "
        f"features`; {_size(disk)} of disk, {_size(disk / tokens)} per token",
    ]
    return [*lines, advice(disk, free_space(out), step * steps, stored)]


def estimate_from_config(run: FeatureRunOptions, recipe: Recipe) -> list[str]:
    """Returns what a run needs by arithmetic, for a target without weights: time at
    `ASSUMED_FLOPS`, with a head of `num_layers` layers of the target.

    Raises:
        ValueError: without answers, whose tokens are counted.
    """
    if run.answers is None:
        raise ValueError("--dry-run without the target's weights needs --answers; name the folder")
    model = empty_target(run.target)
    decoder, hidden = decoder_of(model), int(model.config.get_text_config().hidden_size)  # type: ignore[union-attr, operator]
    layers = len(chosen_layers(run.layers, len(decoder.layers)))
    target = sum(p.numel() for p in model.parameters())
    table = model.get_input_embeddings().weight.numel()  # type: ignore[operator]
    stride = getattr(recipe, "anchor_stride", 1)
    most = getattr(recipe, "anchors_per_sequence", 0)
    tokens = anchors = 0
    for path in answer_shards(run.answers):
        for answer in read_answers(path):
            length = len(answer.answer_ids)
            tokens += len(answer.prompt_ids) + length
            anchors += min(length // stride, most or length)
    experts = getattr(model.config.get_text_config(), "num_experts_per_tok", None) or 0  # type: ignore[union-attr, operator]
    active = active_weights(decoder.layers, experts)
    layer = active / len(decoder.layers)
    head = layer * (getattr(run, "num_layers", 1) or 2) + layers * hidden**2
    batch = getattr(recipe, "anchors_per_step", 0) or getattr(recipe, "tokens_per_step", 1)
    per_anchor = getattr(run, "block_size", 1) or getattr(recipe, "steps", 1)
    positions = batch * per_anchor * recipe.gradient_accumulation
    epoch = max(1.0, anchors / batch / recipe.gradient_accumulation)
    # 2 FLOPs per weight and position forward, 4 backward; three products with the LM head: logits
    # of the draft, of the target, and a gradient.
    step = positions * 6 * (head + table) / ASSUMED_FLOPS
    forward = 2 * active * tokens / ASSUMED_FLOPS
    disk = tokens * 2 * hidden * (layers + 1)
    stored = forward + step * recipe.total_steps
    online = (forward / epoch + step) * recipe.total_steps
    memory = head * _BYTES_PER_PARAMETER[recipe.optimizer] + 4 * table
    return [
        "the target has no weights here, so nothing is measured; device-hours at "
        f"{ASSUMED_FLOPS / 1e12:.0f} TFLOP/s, to be divided by the number of devices",
        f"{tokens:,} tokens; an epoch is about {epoch:,.0f} steps on one device",
        f"head of about {head / 1e6:,.0f}M parameters, and tables: {_size(memory)} of memory per "
        "process, besides activations",
        f"--answers (target beside the trainer): {_duration(online)}; no disk; "
        f"{_size(2 * target)} more memory per process",
        f"stored features: {_duration(stored)}, of which {_duration(forward)} are `specplug data "
        f"features`; {_size(disk)} of disk, {_size(disk / tokens)} per token",
        advice(disk, free_space(run.out), online, stored),
    ]


def active_weights(layers: nn.Module, experts_per_token: int) -> float:
    """Returns the number of weights of decoder layers that a token is multiplied with: of stacked
    experts [E, out, in] those that it is routed to. `experts_per_token` is 0 without experts."""
    count = 0.0
    for weight in layers.parameters():
        # The weight of a depthwise convolution is [C, 1, K].
        is_stacked = experts_per_token > 0 and weight.ndim == 3 and weight.shape[1] > 1
        count += weight.numel() * (experts_per_token / weight.shape[0] if is_stacked else 1)
    return count


def advice(disk: float, free: float, online_seconds: float, stored_seconds: float) -> str:
    """Returns which of the two to take."""
    if disk > 0.9 * free:
        return f"take --answers: {_size(free)} of disk are free"
    if stored_seconds < 0.95 * online_seconds:
        return "take stored features: faster, and the disk has room"
    return "take --answers: as fast, and nothing is stored"


def free_space(path: Path) -> int:
    """Returns the free bytes of the disk that will hold a folder."""
    existing = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
    return shutil.disk_usage(existing).free


def state_bytes(sequence: Any) -> int:
    """Returns the size of a sequence's states."""
    parts = (getattr(sequence, field.name) for field in fields(sequence))
    return sum(_bytes(t) for t in parts if isinstance(t, torch.Tensor) and t.is_floating_point())


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _size(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} minutes" if minutes < 90 else f"{minutes / 60:,.1f} hours"
