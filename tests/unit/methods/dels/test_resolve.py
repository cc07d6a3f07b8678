# SPDX-License-Identifier: Apache-2.0
"""Options of method dels are worked out, or refused, before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.tiny import make_head, make_local_head
from tests.unit.engine_config import engine_config
from vllm_specplug.methods.dels.unigram import save_unigram

pytestmark = pytest.mark.usefixtures("installed")

VOCAB = 12


@pytest.fixture
def spec(tmp_path: Path) -> dict[str, Any]:
    head = make_head(tmp_path / "head", VOCAB, causal=False)
    local = make_local_head(tmp_path / "local", VOCAB)
    return {"method": "dels", "model": str(head), "local_head": str(local)}


def _state(spec: dict[str, Any], **changes: Any) -> None:
    """Changes the config of the local head."""
    config = Path(spec["local_head"]) / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))


def _resolve(target: Path, spec: dict[str, Any]) -> Any:
    return engine_config(target, spec).speculative_config


def test_defaults_are_the_papers(target: Path, spec: dict[str, Any]) -> None:
    resolved = _resolve(target, spec)
    options = resolved.plan.settings
    assert resolved.plugin_method == "dels" and resolved.draft_depth == 4
    assert options.alpha == options.beta == (0.0, 0.3, 0.3, 0.3)
    assert not options.anchor_input and options.num_candidates == 128
    assert options.unigram_path == str(Path(spec["local_head"]).resolve() / "unigram.safetensors")
    assert options.path.endswith("model.safetensors")


def test_the_local_head_says_how_it_is_fused(target: Path, spec: dict[str, Any]) -> None:
    _state(spec, anchor_input=True, alpha=[0.1, 0.2, 0.3, 0.4], beta=0)
    options = _resolve(target, spec).plan.settings
    assert options.anchor_input and options.alpha == (0.1, 0.2, 0.3, 0.4)
    # nothing is asked for where it is not read
    assert options.unigram_path is None and options.beta == (0.0,) * 4


def test_counts_lie_beside_the_name_of_a_linked_head(
    target: Path, spec: dict[str, Any], tmp_path: Path
) -> None:
    """As in the hub's cache, where files are links to blobs."""
    folder, links = Path(spec["local_head"]), tmp_path / "links"
    links.mkdir()
    for file in folder.iterdir():
        blob = file.rename(tmp_path / f"blob-{file.name}")
        (links / file.name).symlink_to(blob)
    options = _resolve(target, {**spec, "local_head": str(links)}).plan.settings
    assert options.unigram_path == str(tmp_path / "blob-unigram.safetensors")


def test_ddtree_needs_a_head_and_nothing_else(target: Path, spec: dict[str, Any]) -> None:
    resolved = _resolve(target, {"method": "ddtree", "model": spec["model"]})
    assert resolved.plugin_method == "ddtree" and resolved.plan.settings is None
    assert resolved.ngram_topk == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"local_head": None}, "local_head=None .*needs|local_head=None .*fuses"),
        ({"local_head": "/nowhere"}, "there is no such file or folder"),
        ({"method": "ddtree"}, "local_head=.*method 'ddtree' does not have it, only dels"),
        ({"method": "jetspec"}, "local_head=.*method 'jetspec' does not have it, only dels"),
        (
            {"alpha": 0.3},
            "alpha .*no longer an option: set it in the config.json of the local head",
        ),
        ({"unigram": "/counts"}, "unigram .*no longer an option: put the counts beside the local"),
    ],
)
def test_bad_options_are_refused(
    target: Path, spec: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        _resolve(target, {**spec, **changes})


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"alpha": [0.3, 0.3]}, r"alpha = .*3 depths that are corrected, 2\.\.4"),
        ({"beta": [0.3] * 4}, "beta = .*3 depths that are corrected"),
        ({"beta": [0.3] * 3, "anchor_input": True}, r"4 depths that are corrected, 1\.\.4"),
        ({"beta": -1.0}, "beta = -1.0, legal: numbers from 0 to 100"),
    ],
)
def test_bad_weights_of_a_local_head_are_refused(
    target: Path, spec: dict[str, Any], stated: dict[str, Any], message: str
) -> None:
    _state(spec, **stated)
    with pytest.raises(ValueError, match=message):
        _resolve(target, spec)


def test_a_prior_is_needed_unless_beta_is_zero(target: Path, spec: dict[str, Any]) -> None:
    (Path(spec["local_head"]) / "unigram.safetensors").unlink()
    with pytest.raises(ValueError, match="beta is not 0, and there is no unigram.safetensors"):
        _resolve(target, spec)
    _state(spec, beta=0.0)
    assert _resolve(target, spec).plan.settings.unigram_path is None


def test_counts_of_a_larger_vocabulary_are_refused(target: Path, spec: dict[str, Any]) -> None:
    path = Path(spec["local_head"]) / "unigram.safetensors"
    save_unigram(path, torch.ones(VOCAB + 1).long())
    with pytest.raises(ValueError, match=f"{VOCAB + 1} tokens, legal: at most {VOCAB}"):
        _resolve(target, spec)
    # fewer are padded
    save_unigram(path, torch.ones(VOCAB - 3).long())
    assert _resolve(target, spec).plan.settings.unigram_path == str(path)
