# SPDX-License-Identifier: Apache-2.0
"""Kinds of block heads are told apart; docs/checkpoints.md has those of published configs."""

from __future__ import annotations

from pathlib import Path

from tests.unit.methods.block import published
from tests.unit.methods.block.published import ZLAB_QWEN3_8B, changed
from tests.unit.methods.block.published_heads import PublishedHead
from vllm_specplug.drafting.head_files import HeadFiles
from vllm_specplug.registry import head_owners, recognise_head


def _owners(config: object, *tensors: str) -> list[str]:
    assert isinstance(config, dict)
    return [m.name for m in head_owners(HeadFiles(Path(), config, dict.fromkeys(tensors)))]


def test_a_stated_mask_tells_jetspec_from_dflash() -> None:
    assert _owners(changed(ZLAB_QWEN3_8B, dflash_config={"causal_head": True})) == ["jetspec"]
    assert _owners(changed(ZLAB_QWEN3_8B, jetspec_config={})) == ["jetspec"]
    # Malformed values are for the method's reader to refuse.
    for changes in ({"dflash_config": {"causal": "no"}}, {"jetspec_config": "x"}):
        assert _owners(changed(ZLAB_QWEN3_8B, **changes)) == ["ddtree"]


def test_tensors_decide_where_the_config_names_nothing(tmp_path: Path) -> None:
    raw = changed(published.tiny(ZLAB_QWEN3_8B), architectures=None)
    head = PublishedHead(tmp_path, raw)
    assert recognise_head(head.folder).name == "ddtree"
    assert _owners(raw, *head.tensors, "markov_head.markov_w1.weight") == ["dspark_tree"]
    for own in ("markov_head.joint_proj.weight", "prefix_gru.weight_ih_l0"):
        assert _owners(raw, *head.tensors, own) == ["dspark_tree"]
    selector = "candidate_selector.predecessor_codebook"
    assert _owners(raw, *head.tensors, selector) == ["dflash2_tree"]
    assert _owners(raw) == [] and _owners({}) == []
    assert _owners({"architectures": "DFlashDraftModel"}) == []
    assert _owners({"speculators_model_type": "domino"}) == ["dspark_tree"]
