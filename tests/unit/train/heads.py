# SPDX-License-Identifier: Apache-2.0
"""A small training of each kind of head, for tests that hold for all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import nn

from tests.unit.conftest import greedy_sequences
from vllm_specplug.methods.block.train import run as block
from vllm_specplug.methods.block.train.options import (
    BlockRecipe,
    BlockRun,
    WholeBlockRecipe,
    WholeBlockRun,
)
from vllm_specplug.methods.dels.train import run as dels
from vllm_specplug.methods.dels.train.options import LocalRecipe, LocalRun
from vllm_specplug.methods.dspark_tree.train import run as dspark
from vllm_specplug.methods.dspark_tree.train.options import DSparkRecipe, DSparkRun
from vllm_specplug.methods.eagle3_tree.train import run as eagle3
from vllm_specplug.methods.eagle3_tree.train.options import Eagle3Recipe, Eagle3Run
from vllm_specplug.methods.longspec.train import run as longspec
from vllm_specplug.methods.longspec.train.options import LongSpecRecipe, LongSpecRun
from vllm_specplug.methods.tokenswift.train import run as tokenswift
from vllm_specplug.methods.tokenswift.train.options import TokenSwiftRecipe, TokenSwiftRun
from vllm_specplug.train.answers import Answer, write_answers
from vllm_specplug.train.options import Recipe, RunOptions
from vllm_specplug.train.run import train_head
from vllm_specplug.train.trainer import Trainer


@dataclass(frozen=True)
class Job:
    """A run that has not started."""

    start: Callable[[Any, Any], Any]
    run: Any
    recipe: Any
    lines: list[str] = field(default_factory=list)

    def changed(self, **options: Any) -> Job:
        """The same with other options of the run or its recipe; its log starts empty."""
        parts = []
        for part in (self.run, self.recipe):
            own = {name: options.pop(name) for name in list(options) if hasattr(part, name)}
            parts.append(replace(part, **own))
        assert not options, options
        return Job(self.start, *parts)

    def train(
        self, on_step: Callable[[int, dict[str, float]], None] | None = None
    ) -> tuple[list[float], dict[str, Any]]:
        """Losses of the steps and the facts."""
        losses: list[float] = []

        def keep(step: int, numbers: dict[str, float]) -> None:
            losses.append(numbers["loss"])
            if on_step is not None:
                on_step(step, numbers)

        facts = train_head(self.start, self.run, self.recipe, self.lines.append, keep)
        return losses, facts

    def trainer(self, accelerator: Accelerator | None = None) -> Trainer:
        """What the run would train with."""
        made = self.start(self.run, self.recipe)
        return Trainer(made.head, made.tables, made.training.store, made.objective, accelerator)

    @property
    def head(self) -> Path:
        """Where it is exported to."""
        return self.run.out / "head"


class OneOf(Accelerator):
    """An accelerator that is one process of several, as far as the data are concerned."""

    def __init__(self, rank: int, count: int) -> None:
        super().__init__(mixed_precision="no")
        self.rank, self.count = rank, count

    @property
    def num_processes(self) -> int:
        return self.count

    @property
    def process_index(self) -> int:
        return self.rank


def write_greedy_answers(folder: Path, target: nn.Module, count: int, shard_size: int) -> Path:
    """Writes greedy answers of a target as `specplug data generate` does; returns `folder`."""
    answers = []
    for made in greedy_sequences(target, count, 3):
        tokens = made.tokens.tolist()
        prompt, answer = tokens[: made.prompt_len], tokens[made.prompt_len :]
        answers.append(Answer(made.source, tuple(prompt), tuple(answer), 0.0, True))
    write_answers(folder, answers, shard_size)
    return folder


_ANCHORS = {"anchors_per_step": 24, "anchor_stride": 2, "learning_rate": 5e-3}
_BLOCK = {"block_size": 4, "draft_vocab_size": 48}
_LOCAL = {"block_size": 4, "rank": 8, "hidden_size": 12}
_SOME = {
    "optimizer": "muon",
    "anchors_per_step": 24,
    "anchors_per_sample": 8,
    "learning_rate": 0.1,
    "adam_learning_rate": 0.03,
}
_KL = {"loss": "forward_kl", "vocab_per_step": 32, "optimizer": "adamw"}

# Start, run and recipe with their options.
KINDS: dict[str, tuple[Any, type[RunOptions], dict[str, Any], type[Recipe], dict[str, Any]]] = {
    "jetspec": (block.start, BlockRun, {"causal": True, **_BLOCK}, BlockRecipe, _ANCHORS),
    "dflash": (block.start, WholeBlockRun, {"causal": False, **_BLOCK}, WholeBlockRecipe, _ANCHORS),
    "dspark": (
        dspark.start, DSparkRun, {"num_layers": 1, "markov_rank": 8, **_BLOCK},
        DSparkRecipe, _ANCHORS,
    ),
    "eagle3": (
        eagle3.start, Eagle3Run, {"draft_vocab_size": 48}, Eagle3Recipe,
        {"anchors_per_step": 48, "anchors_per_sequence": 16, "steps": 3, "learning_rate": 5e-3},
    ),
    "longspec": (
        longspec.start, LongSpecRun, {"window_size": 16, "draft_vocab_size": 48}, LongSpecRecipe,
        {"optimizer": "adamw", "adam_learning_rate": 1e-2, "tokens_per_step": 100},
    ),
    "tokenswift": (
        tokenswift.start, TokenSwiftRun, {"draft_vocab_size": 48}, TokenSwiftRecipe,
        {"tokens_per_step": 40, "learning_rate": 0.2, "adam_learning_rate": 0.03},
    ),
    "gru": (dels.start, LocalRun, _LOCAL, LocalRecipe, _SOME),
    "gru by KL": (dels.start, LocalRun, _LOCAL, LocalRecipe, {**_SOME, **_KL}),
    "markov": (dels.start, LocalRun, {"kind": "markov", **_LOCAL}, LocalRecipe, _SOME),
}  # fmt: skip


def job(kind: str, data: dict[str, tuple[Path, Path]], target: Path, out: Path, **more: Any) -> Job:
    """A run of 12 steps. `data` has training and held-out features by what makes them."""
    start, run, shape, recipe, options = KINDS[kind]
    features, heldout = data["keys" if kind == "longspec" else "layers"]
    if more.get("init_from"):
        shape = {
            option: value for option, value in shape.items() if option not in run.shape_options
        }
    folders = {"target": target, "features": features, "heldout": heldout, "out": out}
    made = Job(
        start,
        run(**folders, eval_every=1000, save_every=1000, **shape),
        recipe(**{"total_steps": 12, "warmup_steps": 2, "compile": False, **options}),
    )
    return made.changed(**more)
