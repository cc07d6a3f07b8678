# SPDX-License-Identifier: Apache-2.0
"""The commands: features and training from a folder of answers, and messages of bad input."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from types import SimpleNamespace

import pytest
import torch
import typer
from typer.testing import CliRunner

from tests.unit.train.chat_targets import chat_target
from vllm_specplug.progress import progress
from vllm_specplug.train import cli_common
from vllm_specplug.train import target as target_module
from vllm_specplug.train.answers import generate_missing, plan_requests, write_plan
from vllm_specplug.train.cli import data_app, train_app

runner = CliRunner()


@pytest.fixture
def data(tmp_path, target_model):
    def generate(requests):
        outputs = []
        for request in requests:
            ids = torch.tensor([request.prompt_ids])
            out = target_model.generate(ids, max_new_tokens=20, do_sample=False, pad_token_id=2)
            outputs.append((out[0, ids.shape[1] :].tolist(), False))
        return outputs

    prompts = [("x", [3 + i, 5, 7, 9 + i]) for i in range(10)]
    folder = tmp_path / "data"
    write_plan(folder, plan_requests(prompts, sampled_share=0.0, temperatures=[1.0], seed=0), {})
    assert len(list(generate_missing(folder, generate, shard_size=4))) == 3
    return folder


def run(app, command, *flags, **options):
    """Runs a command with options; its result."""
    typed = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    return runner.invoke(app, [command, *typed, *flags])


def test_features_then_training_from_the_command_line(data, tmp_path, target_folder, target_model):
    folders = {"out": tmp_path / "features", "heldout": tmp_path / "held"}
    for _ in range(2):  # the second time, nothing is left to do
        result = run(data_app, "features", target=target_folder, data=data, **folders,
                     layers="0,2", heldout_answers=3)  # fmt: skip
        assert result.exit_code == 0, result.output

    with torch.no_grad():
        target_model.get_input_embeddings().weight[3] *= 2
    target_model.save_pretrained(tmp_path / "tuned")
    with torch.no_grad():
        target_model.get_input_embeddings().weight[3] /= 2
    for changed, words in (({"layers": "0,1"}, "is there with target_layer_ids [0, 2], not [0, 1]"),
                           ({"target": tmp_path / "tuned"}, "is there with target_crc "),
                           ({"heldout_answers": 2}, "is there with other answers")):  # fmt: skip
        given = {"target": target_folder, "layers": "0,2", "heldout_answers": 3, **changed}
        result = run(data_app, "features", data=data, **folders, **given)
        assert result.exit_code == 2 and words in " ".join(result.stderr.split()), result.output

    def train(kind, **options):
        out = tmp_path / kind
        result = run(train_app, kind, "--no-compile", target=target_folder, out=out,
                     heldout=tmp_path / "held", anchors_per_step=8, **options)  # fmt: skip
        assert result.exit_code == 0, result.output
        return json.loads((out / "head" / "provenance.json").read_text())

    record = train("dflash", features=folders["out"], block_size=4, total_steps=1)
    assert record["data"]["sequences"] == 7  # three of ten are held out
    assert record["heldout"]["sequences"] == 3
    record = train("dels", features=folders["out"], backbone=tmp_path / "dflash" / "head",
                   total_steps=2, hidden_size=8, rank=4)  # fmt: skip
    assert record["backbone"]["progress"]["step"] == 1


@pytest.mark.parametrize(
    ("command", "options", "words"),
    [
        ("features", {"layers": "0,9"}, "legal: 0..2"),
        ("features", {"layers": "1,1"}, "--layers 1,1, legal: 0..2, each at most once"),
        ("features", {"data": "/nowhere"}, "specplug data generate"),
        ("generate", {"max_tokens": 300}, "--max-tokens 300, legal: up to 255"),
        ("generate", {"max_tokens": 200, "max_prompt_tokens": 100},
         "--max-prompt-tokens 100, legal: 0..56 for this target beside --max-tokens 200"),
        ("generate", {"temperatures": "0.7,hot"}, "--temperatures '0.7,hot', legal: numbers > 0"),
        ("generate", {"temperatures": "0"}, "--temperatures '0', legal: numbers > 0"),
        ("longspec-features", {"heldout_answers": 64}, "64 holds 10 of 10 answers out"),
        ("features", {"heldout_answers": 64},
         "--heldout-answers 64 holds 10 of 10 answers out and leaves none to"),
    ],
)  # fmt: skip
def test_bad_requests_exit_2_with_the_remedy_before_the_target_is_loaded(
    data, tmp_path, target_folder, command, options, words, monkeypatch
):
    monkeypatch.setattr(target_module, "load_target", lambda *_: pytest.fail("it was loaded"))
    given = {"target": target_folder, "data": data, "heldout": tmp_path / "h", "heldout_answers": 2}
    if command == "generate":
        given = {"target": chat_target(tmp_path / "chat", target_folder, "plain"),
                 "make": 2}  # fmt: skip
    result = run(data_app, command, out=tmp_path / "f", **{**given, **options})
    assert result.exit_code == 2, result.output
    assert words in " ".join(result.output.split())


@pytest.mark.parametrize(("count", "told"), [(3, ""), (7, "7 of 10 answers out and leaves 3 to")])
def test_held_out_answers_that_are_most_of_the_data_are_told(
    data, tmp_path, target_folder, count, told
):
    result = run(data_app, "features", target=target_folder, data=data, out=tmp_path / "f",
                 heldout=tmp_path / "h", heldout_answers=count)  # fmt: skip
    assert result.exit_code == 0, result.output
    assert told in " ".join(result.stderr.split())
    assert bool(told) == ("--heldout-answers" in result.stderr)


def test_a_disk_that_is_too_small_is_named_before_the_target_runs(
    data, tmp_path, target_folder, monkeypatch
):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10_000))
    result = run(data_app, "features", target=target_folder, data=data, out=tmp_path / "f",
                 heldout=tmp_path / "h", heldout_answers=3, layers="0,2")  # fmt: skip
    assert result.exit_code == 2
    # 10 sequences of 24 tokens, 3 states of 32 numbers each.
    told = "new features take 0.00 GB, the disk of .* has 0.00 GB free; use another disk"
    assert re.search(told, result.stderr) and not (tmp_path / "f" / "shard-00000").exists()


def test_a_resumed_command_counts_only_missing_shards(data, tmp_path, target_folder, monkeypatch):
    bars = []
    monkeypatch.setattr(cli_common, "progress", lambda: bars.append(progress()) or bars[-1])
    features = tmp_path / "f"
    given = {"target": target_folder, "data": data, "out": features, "heldout": tmp_path / "h",
             "heldout_answers": 3}  # fmt: skip
    assert run(data_app, "features", **given).exit_code == 0
    shard = features / "shard-00001"
    size = sum((shard / name).stat().st_size for name in ("aux.bf16", "hidden.bf16"))
    shutil.rmtree(shard)
    for free, exit_code in ((size - 1, 2), (size, 0)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: SimpleNamespace(free=free))
        assert run(data_app, "features", **given).exit_code == exit_code
    (whole,), (task,) = bars[0].tasks, bars[-1].tasks
    assert whole.completed == whole.total > 200
    # Finished shards count, and have no part in the rate.
    assert task.completed == task.total == whole.total and task.speed is None
    # An interrupted shard gives its space to the new one.
    shard.rename(features / "shard-00001.partial")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    assert run(data_app, "features", **given).exit_code == 0


def test_a_disk_that_fills_up_is_told_by_a_sentence(data, tmp_path, target_folder, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    result = run(data_app, "features", target=target_folder, data=data, out=tmp_path / "f",
                 heldout=tmp_path / "h", heldout_answers=3)  # fmt: skip
    assert result.exit_code == 1
    assert "No space left on device; check the command's paths and their disks" in result.stderr


def test_a_target_that_is_not_there_is_told_by_a_sentence(data, tmp_path):
    nowhere, stored = str(tmp_path / "nowhere"), {"data": data, "heldout": tmp_path / "h"}
    for command, options in (
        ("generate", {"make": 2}),
        ("features", {**stored, "heldout_answers": 2}),
        ("longspec-features", {"data": data}),
    ):
        result = run(data_app, command, target=nowhere, out=tmp_path / "f", **options)
        assert result.exit_code == 2, result.output
        assert repr(nowhere) in result.stderr and result.stderr.count("\n") == 1


def test_finished_data_starts_no_engine(data, monkeypatch):
    from vllm_specplug.train import generate

    def start(*args, **kwargs):
        raise AssertionError("an engine was started")

    monkeypatch.setattr(generate, "VllmGenerator", start)
    command = ["generate", "--target", "/nowhere", "--out", str(data), "--shard-size", "4"]
    result = runner.invoke(data_app, command)
    assert result.exit_code == 0, result.output
    assert result.stdout == f"all 10 answers of the plan are in {data}\n"


@pytest.mark.parametrize(
    ("kind", "option"),
    [("jetspec", "--ema-decay=1.5"), ("dspark", "--markov-rank=0"), ("dels", "--total-steps=0"),
     ("longspec", "--tokens-per-step=1"), ("dels", "--position-gamma=-1")],
)  # fmt: skip
def test_numbers_outside_their_range_are_named(kind, option, tmp_path):
    result = run(train_app, kind, option, target="t", out=tmp_path)
    assert result.exit_code == 2
    assert f"Invalid value for '{option.split('=')[0]}'" in result.output


@pytest.mark.parametrize(
    ("kind", "option", "remedy"),
    [
        ("dels", "--parameterization=direct_vocab", "leave it out"),
        ("dels", "--lm-head-mode=low_rank", "leave it out"),
        ("dels", "--input-size=8", "leave it out"),
        ("dels", "--rank-activation=identity", "leave it out"),
        ("dels", "--anchor-input", "in the head's config.json"),
        ("dels", "--data=answers", "name features with --features, or answers"),
        ("dels", "--min-supervised=8", "leave it out"),
        ("dflash", "--speculators", "--mask-token-id ID writes"),
        ("dspark", "--speculators", "--mask-token-id ID writes"),
    ],
)
def test_removed_options_are_refused_with_what_replaces_them(kind, option, remedy, tmp_path):
    result = run(train_app, kind, option, target="t", out=tmp_path)
    assert result.exit_code == 2
    words = " ".join(result.output.replace("│", " ").split())
    assert f"{option.split('=')[0]} was removed;" in words and remedy in words


def test_every_option_is_explained():
    apps = [typer.main.get_command(app) for app in (data_app, train_app)]
    named = [(name, option.name) for app in apps for name, command in app.commands.items()
             for option in command.params if not option.help]  # fmt: skip
    assert not named
