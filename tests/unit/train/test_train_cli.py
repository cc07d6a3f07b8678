# SPDX-License-Identifier: Apache-2.0
"""The commands: features and training from a folder of answers, and messages of bad input."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from vllm_specplug.train import answers
from vllm_specplug.train.answers import generate_missing, plan_requests, write_plan
from vllm_specplug.train.cli import data_app, parse_counts, train_app
from vllm_specplug.train.features import FeatureStore, spread_layers

runner = CliRunner()


@pytest.fixture
def data(tmp_path, target_model):
    import torch

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


def test_features_then_training_from_the_command_line(data, tmp_path, target_folder):
    features, held, out = (str(tmp_path / name) for name in ("features", "held", "run"))
    command = [
        "features",
        "--target",
        str(target_folder),
        "--data",
        str(data),
        "--out",
        features,
        "--heldout",
        held,
        "--layers",
        "0,2",
        "--heldout-answers",
        "3",
    ]
    result = runner.invoke(data_app, command)
    assert result.exit_code == 0, result.output
    again = runner.invoke(data_app, command)  # nothing left to do
    assert again.exit_code == 0, again.output
    result = runner.invoke(
        train_app,
        [
            "jetspec",
            "--target",
            str(target_folder),
            "--features",
            features,
            "--heldout",
            held,
            "--out",
            out,
            "--block-size",
            "4",
            "--draft-vocab-size",
            "32",
            "--total-steps",
            "2",
            "--no-compile",
            "--anchors-per-step",
            "8",
            "--warmup-steps",
            "0",
        ],
    )
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "run" / "head" / "provenance.json").read_text())
    assert record["data"]["sequences"] == 7  # three of ten are held out
    assert record["heldout"]["sequences"] == 3
    assert record["progress"]["step"] == 2
    head = str(tmp_path / "run" / "head")
    command = ["evaluate", "--target", str(target_folder), "--head", head, "--features", held]
    result = runner.invoke(train_app, [*command, "--budgets", "4,8"])
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines()]
    assert lines[0] == ["data", "chain", "best_first/4", "best_first/8"]
    assert [line[0] for line in lines[1:3]] == ["all", "x"]
    assert all(1.0 <= float(number) <= 4.0 for number in lines[1][1:])

    dflash = [
        *["dflash", "--target", str(target_folder), "--features", features, "--heldout", held],
        *["--out", str(tmp_path / "dflash"), "--init-from", head, "--total-steps", "1"],
        *["--no-compile", "--anchors-per-step", "8"],
    ]
    result = runner.invoke(train_app, dflash)
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "dflash" / "head" / "provenance.json").read_text())
    assert record["shape"]["causal"] is False and record["shape"]["block_size"] == 4
    assert record["init_from"]["progress"]["step"] == 2
    recipe = record["recipes"][0]
    assert (recipe["loss"], recipe["position_gamma"]) == ("sft", 2.0)
    head = str(tmp_path / "dflash" / "head")
    local = [
        *["dels", "--target", str(target_folder), "--data", str(data), "--heldout", held],
        *["--out", str(tmp_path / "local"), "--backbone", head, "--total-steps", "2"],
        *["--hidden-size", "8", "--rank", "4", "--min-supervised", "4", "--no-compile"],
        *["--anchors-per-step", "8"],
    ]
    result = runner.invoke(train_app, local)
    assert result.exit_code == 0, result.output
    command = ["evaluate", "--target", str(target_folder), "--head", head, "--features", held]
    fused = ["--local-head", str(tmp_path / "local" / "head"), "--beta", "0", "--by-depth"]
    result = runner.invoke(train_app, [*command, *fused, "--budgets", "4"])
    assert result.exit_code == 0, result.output
    lines = [line.split("  ") for line in result.stdout.splitlines()]
    assert [cell.strip() for cell in lines[0] if cell][3:] == ["dels chain", "dels tree/4"]
    assert any(line[0] == ">= 3" for line in lines)
    for wrong, words in (
        (["--alpha", "0.3,0.1,0.2"], "alpha has 3 values, legal: 1, or 2"),
        (["--alpha", "x"], "alpha = 'x', legal: a number"),
        (["--budgets", "4.5"], "budgets = '4.5', legal: a whole number"),
        (["--candidates", "3"], "candidates = 3, legal: 0, or at least tree_width"),
        (["--alpha", "nan"], "alpha = nan, legal: a number >= 0"),
        (["--beta=-0.1"], "beta = -0.1, legal: a number >= 0"),
    ):
        result = runner.invoke(train_app, [*command, *fused, *wrong])
        assert (result.exit_code, words in result.output) == (2, True), result.output
    result = runner.invoke(train_app, dflash)
    assert result.exit_code == 2 and "--resume" in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--layers", "0,9"], "legal: 0..2"),
        (["--data", "/nowhere"], "specplug data generate"),
    ],
)
def test_bad_feature_requests_exit_2_with_the_remedy(
    data, tmp_path, target_folder, arguments, words
):
    base = {
        "--target": str(target_folder),
        "--data": str(data),
        "--out": str(tmp_path / "f"),
        "--heldout": str(tmp_path / "h"),
        "--heldout-answers": "2",
    }
    base.update(zip(arguments[::2], arguments[1::2], strict=True))
    result = runner.invoke(
        data_app, ["features", *(part for pair in base.items() for part in pair)]
    )
    assert result.exit_code == 2
    assert words in result.output


@pytest.mark.parametrize(
    ("command", "count", "code", "words"),
    [
        ("features", "3", 0, ""),
        ("features", "7", 0, "--heldout-answers 7 holds 7 of 10 answers out and leaves 3 to train"),
        ("features", "64", 2, "--heldout-answers 64 holds 10 of 10 answers out and leaves none to"),
        ("longspec-features", "7", 0, "--heldout-answers 7 holds 7 of 10 answers out and leaves"),
        ("longspec-features", "64", 2, "--heldout-answers 64 holds 10 of 10 answers out"),
    ],
)
def test_held_out_answers_that_are_most_of_the_data_are_told(
    data, tmp_path, target_folder, command, count, code, words
):
    arguments = [command, "--target", str(target_folder), "--data", str(data)]
    arguments += ["--out", str(tmp_path / "f"), "--heldout", str(tmp_path / "h")]
    result = runner.invoke(data_app, [*arguments, "--heldout-answers", count])
    assert result.exit_code == code, result.output
    assert words in " ".join(result.stderr.split())
    assert bool(words) == ("--heldout-answers" in result.stderr)


def test_both_kinds_of_features_keep_the_same_looping_answers(tmp_path, target_folder):
    with answers.AnswerWriter(tmp_path / "data") as writer:
        for number in range(20):
            prompt, loop = (3 + number,), (5, 6, 7, 8) * 30
            writer.add(answers.Answer("x", prompt, loop, 0.0, True))
    kept = []
    for command in ("features", "longspec-features"):
        out, held = str(tmp_path / command), str(tmp_path / f"{command}-held")
        places = ["--target", str(target_folder), "--data", str(tmp_path / "data"), "--out", out]
        result = runner.invoke(
            data_app, [command, *places, "--heldout", held, "--heldout-answers", "1"]
        )
        assert result.exit_code == 0, result.output
        assert "a share of 0.7 of those stays" in " ".join(result.stderr.split())
        kept.append([row.tokens.tolist() for row in FeatureStore(out)])
    assert kept[0] == kept[1] and 8 < len(kept[0]) < 19


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--max-tokens", "300"], "--max-tokens 300, legal: up to 255"),
        (
            ["--max-tokens", "200", "--max-prompt-tokens", "100"],
            "--max-prompt-tokens 100, legal: 0..56 for this target beside --max-tokens 200",
        ),
    ],
)
def test_lengths_beyond_the_targets_context_name_the_option(
    tmp_path, target_with_tokenizer, arguments, words
):
    places = ["--target", str(target_with_tokenizer), "--out", str(tmp_path / "d")]
    result = runner.invoke(data_app, ["generate", *places, "--make", "topic=2", *arguments])
    assert result.exit_code == 2, result.output
    assert words in " ".join(result.stderr.split())


def test_a_fixed_length_takes_answers_that_loop_and_holds_none_out(
    data, tmp_path, target_with_tokenizer, monkeypatch
):
    # Nothing is left of answers that all loop.
    monkeypatch.setattr(answers.Split, "parts", lambda split: [])
    places = ["--target", str(target_with_tokenizer), "--data", str(data), "--out"]
    command = ["longspec-features", *places, str(tmp_path / "f"), "--length", "16"]
    result = runner.invoke(data_app, command)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "f" / "shard-16-00000" / "meta.json").is_file()


def test_a_target_that_is_not_there_is_told_by_a_sentence(data, tmp_path):
    nowhere = str(tmp_path / "nowhere")
    places = ["--out", str(tmp_path / "f"), "--heldout", str(tmp_path / "h")]
    for arguments in (
        ["generate", "--target", nowhere, "--out", str(tmp_path / "d"), "--make", "topic=2"],
        ["features", "--target", nowhere, "--data", str(data), *places, "--heldout-answers", "2"],
        ["longspec-features", "--target", nowhere, "--data", str(data), "--out", places[1]],
    ):
        result = runner.invoke(data_app, arguments)
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


def test_make_counts_are_parsed_strictly():
    assert parse_counts(["code=20", "self=3"]) == {"code": 20, "self": 3}
    for bad in ("code", "code=", "code=-1", "code=x"):
        with pytest.raises(ValueError, match="KIND=NUMBER"):
            parse_counts([bad])


def test_default_layers_spread_to_the_last():
    assert spread_layers(30) == (2, 11, 20, 29)
    assert spread_layers(2) == (1,)
