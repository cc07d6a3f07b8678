# SPDX-License-Identifier: Apache-2.0
"""The loop of a training run: steps, log lines, checkpoints, exports, the time limit."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_specplug.train.provenance import PROVENANCE_NAME
from vllm_specplug.train.trainer import STATE_NAME, Trainer

Log = Callable[[str], None]
OnStep = Callable[[int, dict[str, float]], None]


@dataclass(frozen=True)
class LoopOptions:
    """Output folder, and how often to log, save and evaluate, in steps. `max_minutes` 0 means no
    limit; a limited run saves and stops, and continues with `resume`."""

    out: str
    eval_every: int = 250
    save_every: int = 100
    log_every: int = 25
    max_minutes: float = 0.0
    resume: bool = False

    def refuse_overwriting(self) -> None:
        """Raises ValueError where a new run would write over a saved one."""
        state = Path(self.out) / STATE_NAME
        if not self.resume and state.is_file():
            raise ValueError(
                f"{state} exists; pass --resume to continue it, or name another output folder"
            )


def run_loop(
    trainer: Trainer,
    loop: LoopOptions,
    export: Callable[[], None],
    log: Log = print,
    on_step: OnStep | None = None,
) -> None:
    """Trains until `total_steps` of the recipe or `max_minutes`; saves and calls `export` (which
    evaluates and writes the head) on the way and at the end."""
    total = trainer.options.total_steps
    main = trainer.accelerator.is_main_process
    began = time.monotonic()
    while trainer.step < total:
        numbers = trainer.train_step()
        if on_step is not None:
            on_step(trainer.step, numbers)
        if trainer.step % loop.log_every == 0 and main:
            log(
                f"step {trainer.step}: loss {trainer.loss_average:.4f}, "
                f"{numbers['slots_per_second']:.0f} slots/s, "
                f"{trainer.seconds / 60:.1f} min of steps"
            )
        done = trainer.step >= total
        late = loop.max_minutes > 0 and time.monotonic() - began > loop.max_minutes * 60
        if main:
            if trainer.step % loop.save_every == 0 or done or late:
                trainer.save(loop.out)
            if trainer.step % loop.eval_every == 0 or done or late:
                export()
        if late:
            log(
                f"stopped at step {trainer.step} after {loop.max_minutes} minutes; continue "
                "with --resume"
            )
            break


def progress_facts(trainer: Trainer) -> dict[str, Any]:
    """Recipes and progress, for provenance.json."""
    return {
        "recipes": trainer.recipes,
        "progress": {
            "step": trainer.step,
            "epochs": trainer.order.epoch,
            "slots_trained": trainer.slots_trained,
            "training_minutes": round(trainer.seconds / 60, 1),
        },
    }


def head_identity(folder: str | Path) -> dict[str, Any]:
    """Which head a run started from or was measured with: folder name, hash of the weights, and
    how far its own training went where it says so."""
    folder = Path(folder).resolve()
    identity: dict[str, Any] = {"name": folder.name}
    weights = folder / "model.safetensors"
    if weights.is_file():
        identity["sha256"] = hashlib.sha256(weights.read_bytes()).hexdigest()
    provenance = folder / PROVENANCE_NAME
    if provenance.is_file():
        record = json.loads(provenance.read_text(encoding="utf-8"))
        identity["progress"] = record.get("progress")
    return identity


def rounded(values: dict[str, float]) -> dict[str, float]:
    """Values with three decimals."""
    return {name: round(value, 3) for name, value in values.items()}
