# SPDX-License-Identifier: Apache-2.0
"""Drafters whose head is far too sure or computes NaN propose valid trees or none."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.hard_heads import KINDS, change_head
from tests.e2e.tiny import make_head, make_local_head
from tests.unit.methods.block.tiny_drafters import VOCAB, draft_requests
from tests.unit.methods.dels.dels_drafters import load_drafter
from vllm_specplug.methods.block.drafter import BlockHeadDrafter
from vllm_specplug.methods.dels.drafter import DelsDrafter


@pytest.mark.parametrize("drafter_class", [BlockHeadDrafter, DelsDrafter])
@pytest.mark.parametrize("kind", KINDS)
def test_trees_are_valid_or_empty(drafter_class: type, kind: str, tmp_path: Path) -> None:
    make_head(tmp_path / "head", VOCAB, causal=False)
    make_local_head(tmp_path / "local", VOCAB)
    drafter = load_drafter(drafter_class, tmp_path, (0.0, 0.4, 0.5, 0.6))
    change_head(drafter, kind)
    trees = drafter.propose(draft_requests())
    assert all(tree.fault(VOCAB) is None for tree in trees)
    assert kind != "confident" or all(tree.num_nodes for tree in trees)
