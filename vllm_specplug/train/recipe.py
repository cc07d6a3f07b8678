# SPDX-License-Identifier: Apache-2.0
"""What every training recipe shares: optimiser, schedule, weight averaging."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

OPTIMIZERS = ("adamw", "muon")


@dataclass(frozen=True)
class Recipe:
    """Options of the optimisation. Changing one between checkpoint and resume is allowed, except
    `optimizer`; shapes are not here."""

    optimizer: str = "muon"
    learning_rate: float = 3e-3
    adam_learning_rate: float = 1e-3
    weight_decay: float = 0.0
    warmup_steps: int = 50
    total_steps: int = 2000
    decay_share: float = 0.3
    grad_clip: float = 1.0
    ema_decay: float = 0.995
    seed: int = 0
    compile: bool = False

    def __post_init__(self) -> None:
        self.require_one_of("optimizer", OPTIMIZERS)
        self.require_least(total_steps=1, warmup_steps=0, weight_decay=0)
        self.require_positive("learning_rate", "adam_learning_rate", "grad_clip")
        self.require_share("decay_share", "ema_decay")

    def require_one_of(self, name: str, legal: Iterable[str]) -> None:
        """Raises ValueError unless the field is one of `legal`."""
        if getattr(self, name) not in legal:
            raise ValueError(
                f"{name} = {getattr(self, name)!r}, legal: {', '.join(legal)}; choose one of them"
            )

    def require_least(self, **lowest: int) -> None:
        """Raises ValueError for a field below its lowest legal value."""
        for name, low in lowest.items():
            if not getattr(self, name) >= low:
                raise ValueError(
                    f"{name} = {getattr(self, name)}, legal: a number >= {low}; raise it"
                )

    def require_positive(self, *names: str) -> None:
        """Raises ValueError for a field that is not above 0."""
        for name in names:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} = {getattr(self, name)}, legal: a number > 0; raise it")

    def require_share(self, *names: str) -> None:
        """Raises ValueError for a field outside 0..1."""
        for name in names:
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

    def make_optimizers(self, module: nn.Module) -> list[torch.optim.Optimizer]:
        """Muon on matrices and AdamW on the rest, or AdamW alone; weight decay on matrices only.

        Every parameter group keeps its rate before the schedule as `base_lr`.
        """
        # An embedding table is looked up, not multiplied: orthogonal updates do not fit it.
        tables = {id(p) for m in module.modules() for p in _tables_of(m)}
        matrices = [p for p in module.parameters() if p.ndim == 2 and id(p) not in tables]
        others = [p for p in module.parameters() if p.ndim != 2 or id(p) in tables]
        made: list[torch.optim.Optimizer] = []
        if self.optimizer == "muon":
            if matrices:
                made.append(
                    torch.optim.Muon(
                        matrices,
                        lr=self.learning_rate,
                        momentum=0.95,
                        weight_decay=self.weight_decay,
                        adjust_lr_fn="match_rms_adamw",
                    )
                )
            groups = [{"params": others, "weight_decay": 0.0}]
        else:
            groups = [
                {"params": matrices, "weight_decay": self.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ]
        groups = [group for group in groups if group["params"]]
        if groups:
            made.append(torch.optim.AdamW(groups, lr=self.adam_learning_rate, betas=(0.9, 0.95)))
        for optimizer in made:
            for group in optimizer.param_groups:
                group["base_lr"] = group["lr"]
        return made


def _tables_of(module: nn.Module) -> Iterable[torch.Tensor]:
    if isinstance(module, nn.Embedding):
        yield module.weight
