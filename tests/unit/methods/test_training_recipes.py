# SPDX-License-Identifier: Apache-2.0
"""Recipes set options of their command, and options on the command line win."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from tests.unit.train.heads import Job
from vllm_specplug.methods.recipes import all_recipes, recipes_of
from vllm_specplug.train.cli import train_app

PAGE = Path(__file__).resolve().parents[3] / "docs" / "training_recipes.md"
CONVERTED = {"epochs": "total_steps", "warmup_share": "warmup_steps"}
runner = CliRunner()


@pytest.mark.parametrize("name", all_recipes())
def test_every_value_is_one_of_an_option(name: str) -> None:
    command = all_recipes()[name]["command"]
    group: Any = get_command(train_app)
    options = {option.name: option for option in group.commands[command].params}
    values = recipes_of(command)[name]
    assert len(values) > 10
    for key, value in values.items():
        option = options[CONVERTED.get(key, key)]
        if key not in CONVERTED:
            assert isinstance(value, (type(option.default), int, float)), key
    assert name in options["recipe"].help


def test_the_page_has_every_recipe() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert [name for name in all_recipes() if f"`{name}`" not in text] == []


def arguments(job: Job, *options: str) -> list[str]:
    folders = ("target", "features", "heldout", "out")
    return [*(f"--{name}={getattr(job.run, name)}" for name in folders), *options]


def test_a_recipe_sets_what_the_command_line_does_not(make_job: Callable[..., Job]) -> None:
    job = make_job("jetspec")
    given = ["--anchors-per-step=16", "--block-size=4", "--total-steps=2", "--no-compile"]
    command = ["jetspec", *arguments(job, "--recipe=jetspec", "--num-layers=1", *given)]
    result = runner.invoke(train_app, command)
    assert result.exit_code == 0, result.output
    record = json.loads((job.head / "provenance.json").read_text())
    recipe, shape = record["recipes"][0], record["shape"]
    published = recipes_of("jetspec")["jetspec"]
    for name in ("optimizer", "schedule", "adam_learning_rate", "position_gamma", "anchor_stride",
                 "anchors_per_sequence", "ema_decay"):  # fmt: skip
        assert recipe[name] == published[name]
    assert (recipe["anchors_per_step"], recipe["total_steps"], recipe["warmup_steps"]) == (16, 2, 0)
    assert (shape["block_size"], shape["num_layers"], shape["draft_vocab_size"]) == (4, 1, 64)
    again = make_job("jetspec", "again")
    command = ["jetspec", *arguments(again, "--recipe=jetspec", f"--init-from={job.head}", *given)]
    result = runner.invoke(train_app, command)
    assert result.exit_code == 0, result.output
    # The layers are that head's, not the recipe's.
    record = json.loads((again.head / "provenance.json").read_text())
    assert record["shape"]["num_layers"] == 1


def test_epochs_are_told_where_the_steps_are_not_given(make_job: Callable[..., Job]) -> None:
    job = make_job("eagle3")
    options = ["--recipe=eagle3", "--max-minutes=1e-9", "--anchors-per-step=8", "--steps=2"]
    result = runner.invoke(train_app, ["eagle3", *arguments(job, *options)])
    assert result.exit_code == 0, result.output
    told = " ".join(result.output.split())
    assert "recipe eagle3 trains for 40 epochs" in told and "--total-steps 2000" in told


def test_an_unknown_recipe_names_those_of_the_command(make_job: Callable[..., Job]) -> None:
    command = ["longspec", *arguments(make_job("longspec"), "--recipe=jetspec")]
    result = runner.invoke(train_app, command)
    assert result.exit_code == 2
    assert "legal: longspec-1, longspec-2" in " ".join(result.output.split())


def test_no_sequence_gives_more_anchors_than_its_limit(make_job: Callable[..., Job]) -> None:
    trainer = make_job("jetspec", anchor_stride=1, anchors_per_sequence=8).trainer()
    batch = trainer.objective.draw(trainer)
    rows = [segment.rows // batch.block_size for segment in batch.segments]
    assert rows == [8, 8, 8]
