# SPDX-License-Identifier: Apache-2.0
"""Training of any head: step, checkpoint, resume.

Parameters are float32, forwards run in `forward_dtype`. Every random choice is a function of the
seed and the step, so a run that resumes from a checkpoint continues bit for bit.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate import Accelerator
from torch import nn

from vllm_specplug.train.heldout import ChainAcceptance
from vllm_specplug.train.losses import head_loss
from vllm_specplug.train.options import STATE_NAME, DistillationRecipe, Recipe
from vllm_specplug.train.order import DataOrder
from vllm_specplug.train.saved import read_state, unreadable, write_saved
from vllm_specplug.train.vocabulary import DraftTables


@dataclass(frozen=True)
class StepLoss:
    """The loss that a step minimises (`total`), the main loss as a weighted mean per slot
    (`reported`), and the numbers of supervised and of all slots."""

    total: torch.Tensor
    reported: torch.Tensor
    supervised: int
    slots: int


class Objective(ABC):
    """The training objective of a method, whose heads draft several tokens after each token of an
    answer."""

    recipe: Any
    """A `Recipe`."""

    anchors_per_batch: ClassVar[int] = 512
    """Anchors whose drafts are computed at once; 0: all of a sequence."""

    @abstractmethod
    def draw(self, trainer: Trainer) -> Any:
        """Returns the batch of the next step on this process: tensors, or tuples of tensors."""

    @abstractmethod
    def forward(self, head: Any, *inputs: Any) -> Any:
        """Computes `Trainer.forward`; the last input is the target's embeddings [V, H]."""

    @abstractmethod
    def loss(self, trainer: Trainer, batch: Any) -> StepLoss:
        """Returns the loss of a drawn batch, which is on the trainer's device."""

    @abstractmethod
    def drafts(
        self, head: Any, sequence: Any, anchors: torch.Tensor, tables: DraftTables
    ) -> torch.Tensor:
        """Returns the draft ids of the chains after the tokens at indices `anchors` int64 [A] of a
        sequence, int64 [A, D], each draft given that the ones before it are right."""

    @torch.no_grad()
    def measure(self, head: Any, sequences: Sequence[Any], tables: DraftTables) -> ChainAcceptance:
        """Returns the acceptance of a head's chains on greedy answers, on the device of
        `tables`."""
        found = ChainAcceptance()
        for sequence in sequences:
            start = max(sequence.prompt_len, 1)
            anchors = torch.arange(start, max(len(sequence.tokens) - 1, start))
            if not len(anchors):
                continue
            with tables.autocast():
                drafts = [
                    self.drafts(head, sequence, part, tables).cpu()
                    for part in anchors.split(self.anchors_per_batch or len(anchors))
                ]
            tokens = tables.target_ids[torch.cat(drafts)]
            found.add(tokens, sequence.tokens, start, sequence.source)
        return found


class _Forward(nn.Module):
    """The head with its frozen table, as one module for accelerate."""

    def __init__(self, head: nn.Module, embed_tokens: torch.Tensor, run: Callable[..., Any]):
        super().__init__()
        # A buffer would be broadcast to all processes in every step.
        self.head, self.embed_tokens, self.run = head, embed_tokens, run

    def forward(self, *inputs: Any) -> Any:
        return self.run(self.head, *inputs, self.embed_tokens)


class Trainer:
    """Optimises the parameters of `head`, an initialised module with a `config`.

    Args:
        tables: frozen rows of the target.
        store: the training sequences.
        fixed: other values that a resumed run must not change, by name.
    """

    def __init__(
        self,
        head: nn.Module,
        tables: DraftTables,
        store: Any,
        objective: Objective,
        accelerator: Accelerator | None = None,
        fixed: dict[str, Any] | None = None,
    ):
        self.objective, self.options, self.store = objective, objective.recipe, store
        self.accelerator = accelerator or Accelerator(mixed_precision="no")
        self.device = self.accelerator.device
        # A head of another kind or meaning may have tensors of the same shapes.
        config: Any = head.config
        own = {**asdict(config), "optimizer": self.options.optimizer}
        given = fixed or {}
        # A refusal names the first that differs: the kind of head, then what is given.
        self.fixed: dict[str, Any] = {"head": type(head).__name__, **given, **own, **given}
        self.order = DataOrder(store, self.options.seed)
        # Any: torch types attributes of a module as tensors or modules.
        self.head: Any = head.float().requires_grad_(True).train()
        self.tables = tables.to(self.device)
        # Draft id of each target token, -1 for none.
        self.to_draft = tables.draft_ids().to(self.device)
        self.step = 0
        # Batch of the step, of `gradient_accumulation`.
        self.part = 0
        self.seconds = 0.0
        self.slots_trained = 0
        # Moving average of the reported losses; NaN before the first step.
        self.loss_average = math.nan
        # Every recipe of the run and its first step: a resumed run may change it.
        self.recipes: list[dict[str, Any]] = [{"from_step": 0, **asdict(self.options)}]
        module = _Forward(head, self.tables.embed_tokens, objective.forward)
        prepared = self.accelerator.prepare(module, *make_optimizers(self.options, head))
        self._forward, self.optimizers = prepared[0], list(prepared[1:])
        self.ema = {name: p.detach().clone() for name, p in head.named_parameters()}

    def step_generator(self) -> torch.Generator:
        """Returns the random number generator of the next batch on this process."""
        number = (self.options.seed * 7919 + self.step) * 1024 + self.accelerator.process_index
        return torch.Generator().manual_seed(number + 1_000_003 * self.part)

    def next_index(self) -> int:
        """Returns the index of the next sequence of this process.

        Each position of an epoch's order belongs to one process, so processes may draw different
        numbers of sequences per step. The epoch shifts the positions, so that every process gets
        sequences even if there are fewer than processes.
        """
        while True:
            index = next(self.order)
            position = self.order.cursor + self.order.epoch
            if position % self.accelerator.num_processes == self.accelerator.process_index:
                return index

    def draw_rows(
        self, wanted: int, pick: Callable[[Any, int], torch.Tensor]
    ) -> tuple[list[Any], list[torch.Tensor]]:
        """Returns the next sequences of this process and their rows, `wanted` rows in total.

        `pick(sequence, left)` chooses rows of a sequence while `left` are wanted. Sequences
        without rows are skipped.
        """
        sequences: list[Any] = []
        rows: list[torch.Tensor] = []
        while wanted > 0:
            sequence = self.store.text(self.next_index())
            picked = pick(sequence, wanted)
            if len(picked):
                sequences.append(sequence)
                rows.append(picked)
                wanted -= len(picked)
        return self.store.with_states(sequences), rows

    def forward(self, *inputs: Any) -> Any:
        """The objective's forward in autocast."""
        with self.tables.autocast():
            return self._forward(*inputs)

    def distil(
        self,
        recipe: DistillationRecipe,
        hidden: torch.Tensor,
        teacher: torch.Tensor | None,
        labels: torch.Tensor,
        weights: torch.Tensor,
        lm_head: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns the recipe's `head_loss`, by default with the draft rows of the LM head."""
        return head_loss(
            hidden.to(self.tables.lm_head.dtype),
            teacher,
            self.tables.lm_head if lm_head is None else lm_head,
            labels,
            weights,
            recipe.loss,
            recipe.temperature,
            compiled=recipe.compile,
        )

    def step_loss(self) -> StepLoss:
        """Returns the loss of the next batch on this process."""
        batch = self.objective.draw(self)
        return self.objective.loss(self, self.tables.inputs(batch))

    def train_step(self) -> dict[str, float]:
        """Runs one optimiser step; returns its loss (a weighted mean per slot) and rates."""
        began = time.perf_counter()
        count = self.options.gradient_accumulation
        value, supervised, slots = 0.0, 0, 0
        for self.part in range(count):
            # Gradients of several processes are averaged once per step.
            is_last = self.part == count - 1
            with nullcontext() if is_last else self.accelerator.no_sync(self._forward):
                loss = self.step_loss()
                self.accelerator.backward(loss.total / count)
            value += float(loss.reported.detach()) / count
            supervised, slots = supervised + loss.supervised, slots + loss.slots
        norm = self.accelerator.clip_grad_norm_(self.head.parameters(), self.options.grad_clip)
        scale = self.options.lr_scale(self.step)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["base_lr"] * scale
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self._update_ema()
        self.step += 1
        self.slots_trained += supervised * self.accelerator.num_processes
        elapsed = time.perf_counter() - began
        self.seconds += elapsed
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
            "slots_per_second": slots / elapsed,
        }

    def _update_ema(self) -> None:
        # The average of the first steps would be dominated by the initial weights.
        decay = min(self.options.ema_decay, (self.step + 1) / (self.step + 10))
        with torch.no_grad():
            for name, parameter in self.head.named_parameters():
                self.ema[name].lerp_(parameter, 1.0 - decay)

    def averaged_head(self) -> Any:
        """Returns a copy of the head for inference, with averaged parameters unless `ema_decay` is
        0."""
        weights = self.ema if self.options.ema_decay > 0 else dict(self.head.named_parameters())
        with torch.device("meta"):
            head = type(self.head)(self.head.config)
        tensors = {**self.head.state_dict(), **weights}
        copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        head.load_state_dict(copies, assign=True)
        return head.eval().requires_grad_(False)

    def save(self, folder: str | Path) -> None:
        """Writes the state for `resume`; replaces the old one when it is complete."""
        if not self.accelerator.is_main_process:
            return
        state: dict[str, Any] = {
            "head": self.head.state_dict(),
            "ema": self.ema,
            "optimizers": [o.state_dict() for o in self.optimizers],
            "order": self.order.state(),
            "step": self.step,
            "seconds": self.seconds,
            "slots_trained": self.slots_trained,
            "loss_average": self.loss_average,
            "fixed": self.fixed,
            "recipes": self.recipes,
        }
        write_saved(state, Path(folder) / STATE_NAME)

    def saved_bytes(self, tables: Sequence[torch.Tensor] = ()) -> int:
        """Returns the size of the state, once there is one, and of an exported head with `tables`
        of the target."""
        own = sum(parameter.numel() for parameter in self.head.parameters())
        moments = (
            value.nbytes
            for optimizer in self.optimizers
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        )
        # Parameters and their averages in float32; the head and the tables in bfloat16.
        exported = own + sum(table.numel() for table in tables)
        return own * (4 + 4) + sum(moments) + 2 * exported

    def resume(self, folder: str | Path) -> None:
        """Continues a saved run with the current recipe."""
        path = Path(folder) / STATE_NAME
        state = read_state(path, self.device)
        saved = state["fixed"]
        for name, value in self.fixed.items():
            if saved.get(name, value) != value:
                raise ValueError(
                    f"{name} = {value!r}, but the checkpoint has {saved[name]!r}; resume with that "
                    "one"
                )
        for tensors, given in ((self.head.state_dict(), state["head"]), (self.ema, state["ema"])):
            _check_shapes(tensors, given)
        self.head.load_state_dict(state["head"])
        for name, tensor in state["ema"].items():
            self.ema[name].copy_(tensor)
        try:
            for optimizer, moments in zip(self.optimizers, state["optimizers"], strict=True):
                own = [{**group} for group in optimizer.param_groups]
                optimizer.load_state_dict(moments)
                for group, options in zip(optimizer.param_groups, own, strict=True):
                    group.update(options)
        except (KeyError, TypeError, ValueError) as error:
            raise unreadable(path, [f"optimizers ({error})"]) from error
        self.order.restore(state["order"])
        self.step, self.seconds = state["step"], state["seconds"]
        self.slots_trained = state["slots_trained"]
        self.loss_average = state["loss_average"]
        self.recipes = state["recipes"]
        last = {name: value for name, value in self.recipes[-1].items() if name != "from_step"}
        if last != asdict(self.options):
            self.recipes.append({"from_step": self.step, **asdict(self.options)})


def _check_shapes(own: dict[str, torch.Tensor], saved: dict[str, torch.Tensor]) -> None:
    """Raises ValueError unless saved tensors have the names and shapes of a run's own."""
    pair = [{name: tuple(t.shape) for name, t in part.items()} for part in (own, saved)]
    if pair[0] != pair[1]:
        name = min(n for n in pair[0] | pair[1] if pair[0].get(n) != pair[1].get(n))
        raise ValueError(
            f"{name} = {pair[0].get(name)}, but the checkpoint has {pair[1].get(name)}; "
            "resume with the shape options of the first start"
        )


def make_optimizers(recipe: Recipe, module: nn.Module) -> list[torch.optim.Optimizer]:
    """Returns Muon for matrices and AdamW for the rest, or only AdamW. Only matrices have weight
    decay. Every parameter group keeps its rate before the schedule as `base_lr`."""
    # Orthogonal updates do not fit embedding tables, which are looked up, not multiplied.
    tables = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
    matrices = [p for p in module.parameters() if p.ndim == 2 and id(p) not in tables]
    others = [p for p in module.parameters() if p.ndim != 2 or id(p) in tables]
    made: list[torch.optim.Optimizer] = []
    is_muon = recipe.optimizer == "muon"
    if is_muon and matrices:
        made.append(
            torch.optim.Muon(
                matrices,
                lr=recipe.learning_rate,
                momentum=0.95,
                weight_decay=recipe.weight_decay,
                adjust_lr_fn="match_rms_adamw",
            )
        )
    groups = [
        {"params": [] if is_muon else matrices, "weight_decay": recipe.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if groups:
        betas = (0.9, recipe.adam_beta2)
        made.append(torch.optim.AdamW(groups, lr=recipe.adam_learning_rate, betas=betas))
    for optimizer in made:
        for group in optimizer.param_groups:
            group["base_lr"] = group["lr"]
    return made
