# SPDX-License-Identifier: Apache-2.0
"""Several processes share the work, and their result is that of one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.train.heads import Job, OneOf, write_greedy_answers
from vllm_specplug.train.features import FeatureStore

pytestmark = [pytest.mark.slow, pytest.mark.full]


# A program that runs `specplug` with a target that takes few tokens at once.
_FEW_TOKENS = """
from vllm_specplug.train import online
online.TOKENS_PER_BATCH = 40
from vllm_specplug.cli import main
main()
"""


def launch(*arguments: str, program: Path | None = None) -> str:
    """Runs `specplug` in two processes on CPUs, as `accelerate launch` does on devices."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
        *(("-m", "vllm_specplug.cli") if program is None else (str(program),)),
        *arguments,
    ]
    done = subprocess.run(
        command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=400,
        env={**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def answers(target_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_greedy_answers(tmp_path_factory.mktemp("answers"), target_model, 15, shard_size=4)


def test_two_processes_write_the_features_of_one(
    answers: Path, target_folder: Path, tmp_path: Path
) -> None:
    from typer.testing import CliRunner

    from vllm_specplug.train.cli import data_app

    def arguments(name: str) -> list[str]:
        out = ["--out", str(tmp_path / name), "--heldout", str(tmp_path / f"{name}-held")]
        given = ["--target", str(target_folder), "--data", str(answers), "--heldout-answers", "3"]
        return ["features", *given, *out]

    launch("data", *arguments("two"))
    result = CliRunner().invoke(data_app, arguments("one"))
    assert result.exit_code == 0, result.output
    for part in ("", "-held"):
        one, two = (FeatureStore(tmp_path / f"{name}{part}") for name in ("one", "two"))
        assert [s.folder.name for s in one.shards] == [s.folder.name for s in two.shards]
        assert len(one.shards) == (1 if part else 4)
        for mine, theirs in zip(one.shards, two.shards, strict=True):
            assert mine.meta == theirs.meta
            for name in ("tokens", "aux", "hidden"):
                assert np.array_equal(getattr(mine, name), getattr(theirs, name))


def test_two_processes_train_beside_the_target_with_the_batches_of_both(
    answers: Path, target_folder: Path, make_job: Callable[..., Job], tmp_path: Path
) -> None:
    """The first gradient is the mean of those of the two halves, as the optimiser kept it."""
    job = make_job("jetspec", "one").changed(
        features=None, heldout=None, answers=answers, heldout_answers=3, total_steps=1,
        optimizer="adamw", grad_clip=1e9, anchors_per_step=16,
    )  # fmt: skip
    options = {
        "--target": job.run.target, "--answers": answers, "--out": tmp_path / "two",
        "--heldout-answers": 3, "--block-size": job.run.block_size,
        "--draft-vocab-size": job.run.draft_vocab_size, "--total-steps": 1,
        "--optimizer": "adamw", "--grad-clip": 1e9, "--anchors-per-step": 16,
        "--anchor-stride": job.recipe.anchor_stride,
    }  # fmt: skip
    typed = [str(part) for pair in options.items() for part in pair]
    launch("train", "jetspec", *typed, "--no-compile")
    state = torch.load(tmp_path / "two" / "state.pt")
    assert state["step"] == 1
    halves, losses = [], []
    for rank in range(2):
        trainer = job.trainer(OneOf(rank, 2))
        loss = trainer.step_loss()
        loss.total.backward()
        losses.append(float(loss.reported.detach()))
        (optimizer,) = trainer.optimizers
        halves.append([p.grad for group in optimizer.param_groups for p in group["params"]])
    assert losses[0] != losses[1]
    kept = state["optimizers"][0]["state"]
    assert len(kept) == len(halves[0])
    for index, gradients in enumerate(zip(*halves, strict=True)):
        mean = (gradients[0] + gradients[1]) / 2
        scale = float(mean.abs().max())
        # AdamW's first moment after one step.
        torch.testing.assert_close(kept[index]["exp_avg"], 0.1 * mean, rtol=0, atol=1e-3 * scale)


@pytest.mark.parametrize("kind", ["jetspec", "longspec"])
def test_processes_that_share_the_target_train_as_those_with_a_copy_each(
    kind: str, answers: Path, target_folder: Path, tmp_path: Path
) -> None:
    """Of few tokens per forward, so that they run the target unequally often."""
    program, states = tmp_path / "few_tokens.py", []
    program.write_text(_FEW_TOKENS)
    for name in ("copies", "shared"):
        options = {
            "--target": target_folder, "--answers": answers, "--out": tmp_path / name,
            "--heldout-answers": 3, "--draft-vocab-size": 48, "--total-steps": 4,
            "--eval-every": 2, "--save-every": 2, "--optimizer": "adamw", "--log-every": 1,
        }  # fmt: skip
        options |= {"--tokens-per-step": 60} if kind == "longspec" else {"--anchors-per-step": 24}
        typed = [str(part) for pair in options.items() for part in pair]
        shared = ["--shard-target"] if name == "shared" else []
        told = launch("train", kind, *typed, "--no-compile", *shared, program=program)
        assert "step 4: " in told
        states.append(torch.load(tmp_path / name / "state.pt"))
    for tensor, other in zip(*(state["head"].values() for state in states), strict=True):
        assert torch.equal(tensor, other)
