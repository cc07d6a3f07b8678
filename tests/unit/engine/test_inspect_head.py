# SPDX-License-Identifier: Apache-2.0
"""`specplug inspect`: what a head is, and what serving would say of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from typer.testing import CliRunner

from tests.e2e.fp8_modules import in_fp8
from tests.e2e.mtp_modules import layer_tensors
from tests.e2e.tiny import (
    make_dflash2_head,
    make_dspark_head,
    make_head,
    make_target,
    make_tokenswift_heads,
)
from tests.unit.methods.mtp_tree.published import GLM_45_AIR_FP8, small
from vllm_specplug import cli
from vllm_specplug.engine.inspect_head import inspect_head

VOCAB = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("heads")
    make_target(folder / "target", VOCAB)
    make_target(folder / "other", VOCAB + 8)
    make_head(folder / "jetspec", VOCAB)
    make_head(folder / "ddtree", VOCAB, causal=False)
    make_dspark_head(folder / "dspark_tree", VOCAB)
    make_dflash2_head(folder / "dflash2_tree", VOCAB)
    make_tokenswift_heads(folder / "tokenswift", VOCAB)
    return folder


def _target(folder: Path, name: str = "target") -> str:
    if not (folder / name / "tokenizer.json").exists():
        from tests.e2e.tiny import make_tokenizer

        make_tokenizer(folder / name)
    return str(folder / name)


@pytest.mark.parametrize("name", ["jetspec", "ddtree", "dflash2_tree", "dspark_tree", "tokenswift"])
def test_kinds_and_needs_are_told_without_a_target(folder: Path, name: str) -> None:
    report = inspect_head(str(folder / name))
    assert list(report["kind"]) == [name]
    assert report["speculative_config"] == {"method": name, "model": str(folder / name)}
    assert report["served"] is None and "--target" in report["reason"]
    assert "hidden_states" in report["needs"]
    assert report["files"]["parameters"] > 0 and report["files"]["dtypes"] == ["F32"]


@pytest.mark.parametrize(("name", "depth"), [("dspark_tree", 5), ("dflash2_tree", 4)])
def test_what_an_engine_makes_of_it(folder: Path, name: str, depth: int) -> None:
    report = inspect_head(str(folder / name), _target(folder))
    assert (report["served"], report["reason"]) == (True, None)
    assert (report["depth"], report["target_layers"]) == (depth, [0, 1])


def test_a_target_with_a_module_in_fp8(tmp_path: Path) -> None:
    raw, file = small(GLM_45_AIR_FP8), tmp_path / "model.safetensors"
    (tmp_path / "config.json").write_text(json.dumps(raw))
    tensors, _ = in_fp8(layer_tensors(raw), raw["quantization_config"])
    save_file(tensors, file)
    report = inspect_head(str(tmp_path), _target(tmp_path, ""))
    assert list(report["kind"]) == ["mtp_tree"] and report["served"], report["reason"]
    assert report["files"]["dtypes"] == ["F32", "F8_E4M3"]
    del tensors["model.layers.4.self_attn.o_proj.weight_scale"]
    save_file(tensors, file)
    report = inspect_head(str(tmp_path), str(tmp_path))
    assert not report["served"] and "scales of the fp8 tensor" in report["reason"]


def test_refusals_are_those_of_serving(folder: Path) -> None:
    report = inspect_head(str(folder / "jetspec"), _target(folder, "other"))
    assert report["served"] is False
    arguments = ["inspect", str(folder / "jetspec"), "--target", _target(folder, "other"), "--json"]
    run = CliRunner().invoke(cli.app, arguments)
    assert (run.exit_code, json.loads(run.stdout)) == (1, report)
    assert report["reason"].startswith("draft head config: vocab_size = 12, legal: 20")
    named = inspect_head(str(folder / "dspark_tree"), _target(folder), method="jetspec")
    assert named["served"] is False and "method dspark_tree" in named["reason"]
    assert list(named["kind"]) == ["dspark_tree"]
    missing = inspect_head(str(folder / "jetspec"), str(folder / "nowhere"))
    assert missing["served"] is False
    start = f"target={str(folder / 'nowhere')!r} is not usable: there is no such folder. Give "
    assert missing["reason"].startswith(start)


@pytest.mark.parametrize(
    ("name", "method", "fits"),
    [
        ("jetspec", "jetspec", True),
        ("jetspec", "ddtree", True),
        ("jetspec", "dels", True),
        ("dspark_tree", "jetspec", False),
        ("dflash2_tree", "ddtree", False),
        ("tokenswift", "jetspec", False),
        ("jetspec", "tokenswift", False),
        ("jetspec", "dflash2_tree", False),
        ("jetspec", "mtp_tree", False),
        ("jetspec", "ngram_tree", False),
    ],
)
def test_a_method_for_heads_of_another_kind(
    folder: Path, name: str, method: str, fits: bool
) -> None:
    """Without a target, and for methods that would not look at the head with one."""
    for target in (None, _target(folder)) if method == "ngram_tree" else (None,):
        report = inspect_head(str(folder / name), target, method)
        assert report["served"] is (None if fits else False)
        reason = f"method {method!r} does not draft with this head, which is one of method {name!r}"
        assert report["reason"].startswith(reason) is not fits
    run = CliRunner().invoke(cli.app, ["inspect", str(folder / name), "--method", method])
    assert run.exit_code == (0 if fits else 1)


def test_an_unknown_kind_is_not_served(folder: Path) -> None:
    report = inspect_head(_target(folder))
    assert (report["kind"], report["served"]) == ({}, False)
    assert "no method knows this kind of head" in report["reason"]


def test_the_target_that_a_head_names(tmp_path: Path) -> None:
    config: dict[str, Any] = {"speculators_config": {"verifier": {"name_or_path": "Qwen/Qwen3-8B"}}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert inspect_head(str(tmp_path))["made_for"] == "Qwen/Qwen3-8B"
    (tmp_path / "config.json").write_text(json.dumps({"speculators_config": {"verifier": 3}}))
    assert "made_for" not in inspect_head(str(tmp_path))


def test_needs_are_those_of_the_head_where_the_target_is_known(folder: Path) -> None:
    """One layer of the head has a window."""
    alone = inspect_head(str(folder / "dspark_tree"))
    assert "context_window" not in alone["needs"]
    assert "may need more" in alone["reason"]
    served = inspect_head(str(folder / "dspark_tree"), _target(folder))
    assert "context_window" in served["needs"]
