# SPDX-License-Identifier: Apache-2.0
"""Published configs are recognised for what they are, and others are told apart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.methods.block import published
from tests.unit.methods.block.published import ZLAB_QWEN3_8B, changed
from tests.unit.methods.block.published_heads import PublishedHead, Shared
from vllm_specplug.drafting.head_files import HeadFiles
from vllm_specplug.drafting.method import TargetInfo
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
    "MODELOPT_DSPARK_QWEN3_8B": "dspark_tree",
    "ANGELSLIM_DFLASH_QWEN3_4B": "ddtree",
    "SPECFORGE_DOMINO_QWEN3_8B": "dspark_tree",
    "SPECFORGE_DOMINO_QWEN35_4B": "dspark_tree",
    # Claimed, so that the refusal says what is not computed.
    "SPECULATORS_JETSPEC": "jetspec",
    "ZLAB_DFLASH2_QWEN38_27B": "dflash2_tree",
    "INCO_DFLASH2_GLM53_FLASH": "dflash2_tree",
    "MUSE_DFLASH2_GLIMMER_30B": "dflash2_tree",
    "LIGHTSEEK_DFLASH2_KIMI_K3": "dflash2_tree",
    "SPECULATORS_DFLASH2": "dflash2_tree",
    "MODELOPT_LILICORR_QWEN3_8B": "ddtree",
    "VLLM_XPRESS_QWEN3_8B": "ddtree",
    "SPECFORGE_DSPINE_QWEN3_8B": "jetspec",
    "ANGELSLIM_DFLARE_QWEN3_4B": "ddtree",
}


def _owners(config: object, *tensors: str) -> list[str]:
    assert isinstance(config, dict)
    return [m.name for m in head_owners(HeadFiles(Path(), config, dict.fromkeys(tensors)))]


@pytest.mark.parametrize("name", KINDS)
def test_published_configs(name: str) -> None:
    assert _owners(getattr(published, name)) == [KINDS[name]]


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


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("LIGHTSEEK_DFLASH2_KIMI_K3", r"attention_mode = 'mla', legal: absent or 'gqa'"),
        ("MODELOPT_LILICORR_QWEN3_8B", r"'LiLiCorrDraftModel'.*transformer over the candidates"),
        ("VLLM_XPRESS_QWEN3_8B", r"'Qwen3XPressModel'.*refiner mixes all tokens before a slot"),
        ("SPECFORGE_DSPINE_QWEN3_8B", r"'DSpineDraftModel'.*messages"),
        ("ANGELSLIM_DFLARE_QWEN3_4B", r"'QwenDFlareDraftModel'.*matrices of its own"),
    ],
)
def test_heads_that_are_told_apart_are_refused_with_the_reason(
    name: str, reason: str, tmp_path: Path
) -> None:
    """As a server started with `"method": "tree"` refuses them."""
    (tmp_path / "config.json").write_text(json.dumps(getattr(published, name)))
    method = recognise_head(tmp_path)
    target = TargetInfo(published.TINY_TARGET, 64, None)
    with pytest.raises(ValueError, match=reason):
        method.parse_options({}).resolve(method.name, Shared(tmp_path, 16, 8), target)


def test_unknown_architectures_are_named(tmp_path: Path) -> None:
    raw = changed(ZLAB_QWEN3_8B, architectures=["FutureDraftModel"])
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match="no method knows.*FutureDraftModel"):
        recognise_head(tmp_path)
