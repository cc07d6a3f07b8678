# SPDX-License-Identifier: Apache-2.0
"""Published configs are recognised for what they are, and others are told apart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.methods.block import published
from tests.unit.methods.block.published import ZLAB_QWEN3_8B, changed
from tests.unit.methods.block.published_heads import PublishedHead
from vllm_specplug.drafting.head_files import HeadFiles
from vllm_specplug.registry import head_owners, recognise_head

KINDS = {
    "ZLAB_QWEN3_8B": "ddtree",
    "ZLAB_MIXED": "ddtree",
    "DEEPSPEC_DFLASH_QWEN3_4B": "ddtree",
    "DEEPSPEC_DSPARK_QWEN3_4B": "dspark_tree",
    "SPECFORGE_DSPARK_QWEN3_4B": "dspark_tree",
    "SPECFORGE_DSPARK_QWEN3_8B": "dspark_tree",
    "SPECFORGE_DSPARK_CAUSAL": "dspark_tree",
    "SPECFORGE_DSPARK_QWEN36_27B": "dspark_tree",
    "SPECFORGE_DFLASH_KIMI": "ddtree",
    "SPECULATORS_QWEN3_8B": "ddtree",
    "SPECULATORS_DSPARK": "dspark_tree",
    # Claimed, so that the refusal says what is not computed.
    "SPECFORGE_DOMINO_QWEN3_8B": "ddtree",
    "SPECULATORS_JETSPEC": "jetspec",
    # Other kinds altogether.
    "SPECFORGE_DFLASH2_QWEN36_27B": None,
    "SPECFORGE_DSPINE_QWEN3_8B": None,
}


def _owners(config: object, *tensors: str) -> list[str]:
    assert isinstance(config, dict)
    return [m.name for m in head_owners(HeadFiles(Path(), config, dict.fromkeys(tensors)))]


@pytest.mark.parametrize("name", KINDS)
def test_published_configs(name: str) -> None:
    kind = KINDS[name]
    assert _owners(getattr(published, name)) == ([] if kind is None else [kind])


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
    assert _owners(raw) == [] and _owners({}) == []
    assert _owners({"architectures": "DFlashDraftModel"}) == []


def test_refusals_of_other_kinds_name_the_architecture(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(published.SPECFORGE_DFLASH2_QWEN36_27B))
    with pytest.raises(ValueError, match="no method knows.*DFlash2DraftModel"):
        recognise_head(tmp_path)
