# SPDX-License-Identifier: Apache-2.0
"""What a run needs: time, disk and memory, with stored features and with the target beside it."""

from __future__ import annotations

import shutil
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from vllm_specplug.train.online import OnlineFeatures
from vllm_specplug.train.order import EvenlySpread
from vllm_specplug.train.trainer import Trainer

# Weights, gradients and average of a head, float32, and the moments of its optimiser.
_BYTES_PER_PARAMETER = {"muon": 16, "adamw": 20}
_STEPS, _SEQUENCES = 3, 8


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
