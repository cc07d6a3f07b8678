# SPDX-License-Identifier: Apache-2.0
"""One training run of any head: step, checkpoint, resume.

Parameters are float32, forwards run in bfloat16 autocast. Every random choice is a function of the
seed and the step, so a run that resumes from a checkpoint continues bit for bit.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from vllm_specplug.train.order import DataOrder
from vllm_specplug.train.recipe import Recipe

STATE_NAME = "state.pt"


@dataclass(frozen=True)
class StepLoss:
    """What a step minimises (`total`), what it reports (`reported`: the main loss, a weighted mean
    per slot), and how many slots it supervised and ran."""

    total: torch.Tensor
    reported: torch.Tensor
    supervised: int
    slots: int


class Trainer(ABC):
    """Optimises the parameters of `module`; subclasses say what a step's loss is.

    Args:
        module: what is trained and exported; its parameters become float32.
        forward_module: what a step calls, wrapped for many devices; contains `module`.
        order: over the sequences.
    """

    def __init__(
        self,
        module: nn.Module,
        forward_module: nn.Module,
        order: DataOrder,
        options: Recipe,
        accelerator: Accelerator | None = None,
    ):
        self.options, self.order = options, order
        self.accelerator = accelerator or Accelerator(mixed_precision="bf16")
        self.device = self.accelerator.device
        self.module = module.float().requires_grad_(True).train()
        self.step = 0
        self.seconds = 0.0
        self.slots_trained = 0
        # Of the reported losses, for people; not a number before the first step.
        self.loss_average = math.nan
        # Every recipe of the run and the step it began at: a resumed run may change it.
        self.recipes: list[dict[str, Any]] = [{"from_step": 0, **asdict(options)}]
        optimizers = options.make_optimizers(module)
        prepared = self.accelerator.prepare(forward_module, *optimizers)
        self.forward_module, self.optimizers = prepared[0], list(prepared[1:])
        self.ema = {name: p.detach().clone() for name, p in module.named_parameters()}

    @abstractmethod
    def step_loss(self) -> StepLoss:
        """Forward of the next step on this process."""

    def step_generator(self) -> torch.Generator:
        """Random numbers of the next step on this process."""
        return torch.Generator().manual_seed(
            (self.options.seed * 7919 + self.step) * 1024 + self.accelerator.process_index
        )

    def next_index(self) -> int:
        """The next sequence of this process.

        Each place of an epoch's order belongs to one process, however many places a step takes:
        steps need not take equally many on all processes. Counting the epoch in gives every
        process its turn where there are fewer sequences than processes.
        """
        while True:
            index = next(self.order)
            place = self.order.cursor + self.order.epoch
            if place % self.accelerator.num_processes == self.accelerator.process_index:
                return index

    def train_step(self) -> dict[str, float]:
        """One optimiser step; returns its loss (a weighted mean per slot) and rates."""
        began = time.perf_counter()
        loss = self.step_loss()
        self.accelerator.backward(loss.total)
        norm = self.accelerator.clip_grad_norm_(self.module.parameters(), self.options.grad_clip)
        scale = self.options.lr_scale(self.step)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["base_lr"] * scale
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self._update_ema()
        self.step += 1
        self.slots_trained += loss.supervised * self.accelerator.num_processes
        elapsed = time.perf_counter() - began
        self.seconds += elapsed
        value = float(loss.reported.detach())
        if not math.isfinite(value):
            raise RuntimeError(
                f"the loss became {value} at step {self.step}; lower the learning "
                "rate or resume from an earlier checkpoint"
            )
        first = math.isnan(self.loss_average)
        self.loss_average = value if first else 0.95 * self.loss_average + 0.05 * value
        return {
            "loss": value,
            "loss_average": self.loss_average,
            "grad_norm": float(norm),
            "lr_scale": scale,
            "slots_per_second": loss.slots / elapsed,
        }

    def _update_ema(self) -> None:
        # The average of the first steps would be dominated by the initial weights.
        decay = min(self.options.ema_decay, (self.step + 1) / (self.step + 10))
        with torch.no_grad():
            for name, parameter in self.module.named_parameters():
                self.ema[name].lerp_(parameter, 1.0 - decay)

    def averaged_weights(self) -> dict[str, torch.Tensor]:
        """Copies of the exponentially averaged parameters (the raw ones at ema_decay 0)."""
        averaged = self.options.ema_decay > 0
        source = self.ema if averaged else dict(self.module.named_parameters())
        return {name: tensor.detach().clone() for name, tensor in source.items()}

    def save(self, folder: str | Path) -> None:
        """Writes everything `resume` needs, replacing the old state only when complete."""
        if not self.accelerator.is_main_process:
            return
        path = Path(folder) / STATE_NAME
        path.parent.mkdir(parents=True, exist_ok=True)
        state: dict[str, Any] = {
            "head": self.module.state_dict(),
            "ema": self.ema,
            "optimizers": [o.state_dict() for o in self.optimizers],
            "order": self.order.state(),
            "step": self.step,
            "seconds": self.seconds,
            "slots_trained": self.slots_trained,
            "loss_average": self.loss_average,
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
        own = {name: tuple(tensor.shape) for name, tensor in self.module.state_dict().items()}
        saved_shapes = {name: tuple(tensor.shape) for name, tensor in state["head"].items()}
        if own != saved_shapes:
            name = min(n for n in own | saved_shapes if own.get(n) != saved_shapes.get(n))
            raise ValueError(
                f"{name} = {own.get(name)}, but the checkpoint has {saved_shapes.get(name)}; "
                "resume with the shape options of the first start"
            )
        self.module.load_state_dict(state["head"])
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
        self.loss_average = state.get("loss_average", math.nan)
        self.recipes = state.get("recipes", [{"from_step": 0, **state["options"]}])
        if {"from_step": self.recipes[-1]["from_step"], **asdict(self.options)} != self.recipes[-1]:
            self.recipes.append({"from_step": self.step, **asdict(self.options)})
