# SPDX-License-Identifier: Apache-2.0
"""Options of methods are worked out, or refused, before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.e2e.tiny import make_head, make_local_head, make_longspec_head
from tests.unit.engine_config import engine_config
from vllm_specplug.drafting.caches import PartialCacheSpec
from vllm_specplug.methods.dels.unigram import save_unigram
from vllm_specplug.methods.tokenswift.options import TokenSwiftOptions

pytestmark = pytest.mark.usefixtures("installed")

VOCAB = 12
Spec = dict[str, Any]


@pytest.fixture
def specs(tmp_path: Path) -> dict[str, Spec]:
    """By method, with a head on disk."""
    block = str(make_head(tmp_path / "block", VOCAB, causal=False))
    local = str(make_local_head(tmp_path / "local", VOCAB))
    longspec = str(make_longspec_head(tmp_path / "longspec", VOCAB))
    return {
        "dels": {"method": "dels", "model": block, "local_head": local},
        "ddtree": {"method": "ddtree", "model": block},
        "longspec": {"method": "longspec", "model": longspec},
    }


def _state(folder: str, **changes: Any) -> None:
    """Changes the config of a head."""
    config = Path(folder) / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))


def _resolve(target: Path, spec: Spec, **engine: Any) -> Any:
    return engine_config(target, spec, **engine).speculative_config


# Method, changes of its options, what the head says, and the refusal.
REFUSED: list[tuple[str, Spec, Spec, str]] = [
    ("dels", {"local_head": None}, {}, "local_head=None .*needs|local_head=None .*fuses"),
    ("dels", {"local_head": "/nowhere"}, {}, "there is no such file or folder"),
    ("ddtree", {"local_head": "x"}, {}, "method 'ddtree' does not have it, only dels"),
    ("dels", {"alpha": 0.3}, {}, "alpha .*no longer an option: set it in the config.json of the"),
    ("dels", {"unigram": "/x"}, {}, "unigram .*no longer an option: put the counts beside the loc"),
    ("dels", {}, {"alpha": [0.3, 0.3]}, r"alpha = .*3 depths that are corrected, 2\.\.4"),
    ("dels", {}, {"beta": [0.3] * 4}, "beta = .*3 depths that are corrected"),
    ("dels", {}, {"beta": [0.3] * 3, "anchor_input": True}, r"4 depths that are corrected, 1\.\.4"),
    ("dels", {}, {"beta": -1.0}, "beta = -1.0, legal: numbers from 0 to 100"),
    ("longspec", {"window_size": 32}, {}, "no longer an option: set it in the config.json of the"),
    ("longspec", {"local_head": "x"}, {}, "local_head='x' .* 'longspec' does not have it"),
    ("longspec", {"tree_depth": 17, "num_speculative_tokens": 16}, {}, "at least tree_depth=17"),
]


@pytest.mark.parametrize(("method", "changes", "stated", "message"), REFUSED)
def test_what_cannot_be_served_is_refused(
    target: Path, specs: dict[str, Spec], method: str, changes: Spec, stated: Spec, message: str
) -> None:
    spec = specs[method]
    _state(spec.get("local_head", spec["model"]), **stated)
    with pytest.raises(ValueError, match=message):
        _resolve(target, {**spec, **changes})


def test_longspec_needs_its_own_head(target: Path, specs: dict[str, Spec]) -> None:
    with pytest.raises(ValueError, match="this head is one of method 'ddtree'"):
        _resolve(target, {**specs["ddtree"], "method": "longspec"})


def test_the_local_head_says_how_it_is_fused(target: Path, specs: dict[str, Spec]) -> None:
    spec = specs["dels"]
    _state(spec["local_head"], anchor_input=True, alpha=[0.1, 0.2, 0.3, 0.4], beta=0)
    options = _resolve(target, spec).plan.settings
    assert options.alpha == (0.1, 0.2, 0.3, 0.4)
    # Nothing is asked for where it is not read.
    assert options.unigram_path is None and options.beta == (0.0,) * 4


def test_counts_lie_beside_the_name_of_a_linked_head(
    target: Path, specs: dict[str, Spec], tmp_path: Path
) -> None:
    """As in the hub's cache, where files are links to blobs."""
    folder, links = Path(specs["dels"]["local_head"]), tmp_path / "links"
    links.mkdir()
    for file in folder.iterdir():
        blob = file.rename(tmp_path / f"blob-{file.name}")
        (links / file.name).symlink_to(blob)
    options = _resolve(target, {**specs["dels"], "local_head": str(links)}).plan.settings
    assert options.unigram_path == str(tmp_path / "blob-unigram.safetensors")


def test_counts_are_the_targets_and_needed_unless_beta_is_zero(
    target: Path, specs: dict[str, Spec]
) -> None:
    spec = specs["dels"]
    path = Path(spec["local_head"]) / "unigram.safetensors"
    save_unigram(path, torch.ones(VOCAB + 1).long())
    with pytest.raises(ValueError, match=f"{VOCAB + 1} tokens, legal: at most {VOCAB}"):
        _resolve(target, spec)
    # Fewer are padded.
    save_unigram(path, torch.ones(VOCAB - 3).long())
    assert _resolve(target, spec).plan.settings.unigram_path == str(path)
    path.unlink()
    with pytest.raises(ValueError, match="beta is not 0, and there is no unigram.safetensors"):
        _resolve(target, spec)
    _state(spec["local_head"], beta=0.0)
    assert _resolve(target, spec).plan.settings.unigram_path is None


def test_tokenswift_has_room_for_its_drafts() -> None:
    def partial_cache(**own: Any) -> PartialCacheSpec | None:
        shared: Any = SimpleNamespace(num_speculative_tokens=16)
        return TokenSwiftOptions(**own).partial_cache(shared)

    options = ("self_draft_requests", "kv_budget")
    assert partial_cache() is None
    assert partial_cache(draft_source="self") == PartialCacheSpec(4096, 16, 4, options)
    with pytest.raises(ValueError, match=r"kv_budget=18 .*more than 2 \+ num_spec.*=16"):
        partial_cache(kv_budget=18)
