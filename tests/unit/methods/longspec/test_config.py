# SPDX-License-Identifier: Apache-2.0
"""Options of method longspec are worked out, or refused, before anything starts."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.tiny import make_head, make_longspec_head
from tests.unit.engine_config import engine_config

pytestmark = pytest.mark.usefixtures("installed")

VOCAB = 12


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_longspec_head(tmp_path_factory.mktemp("head"), VOCAB)


def _resolve(target: Path, head: Path, engine: dict[str, Any] | None = None, **spec: Any) -> Any:
    spec = {"method": "longspec", "model": str(head), **spec}
    return engine_config(target, spec, **(engine or {})).speculative_config


def test_defaults(target: Path, head: Path) -> None:
    spec = _resolve(target, head)
    assert (spec.plugin_method, spec.method) == ("longspec", "custom_class")
    assert (spec.num_speculative_tokens, spec.draft_depth) == (16, 5)
    assert (spec.plan.settings, spec.aux_layers) == (None, ())
    assert pickle.loads(pickle.dumps(spec)) == spec


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"window_size": 32}, "no longer an option: set it in the config.json of the head"),
        ({"local_head": "x"}, "local_head='x' is not usable: method 'longspec' does not have it"),
        ({"tree_depth": 17, "num_speculative_tokens": 16}, "at least tree_depth=17"),
    ],
)
def test_impossible_options_are_refused(
    target: Path, head: Path, spec: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        _resolve(target, head, **spec)


def test_heads_of_other_kinds_and_targets_are_refused(
    target: Path, head: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="this head is one of method 'jetspec'"):
        _resolve(target, make_head(tmp_path / "block", VOCAB))
    other = make_longspec_head(tmp_path / "other", VOCAB)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rope_theta": 123.0}))
    with pytest.raises(ValueError, match="rope_theta = 123.0, legal: 10000.0"):
        _resolve(target, other)
