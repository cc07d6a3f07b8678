# SPDX-License-Identifier: Apache-2.0
"""Heads mean what their trainers meant, or are refused by name."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.unit.methods.absurd import refused
from tests.unit.methods.block import published
from tests.unit.methods.block.published import SPECULATORS_QWEN3_8B, ZLAB_QWEN3_8B, changed
from vllm_specplug.drafting.head_files import HeadFiles
from vllm_specplug.methods.block.config import BlockHeadConfig
from vllm_specplug.methods.block.recognise import is_causal_block_head


def read(raw) -> BlockHeadConfig:
    return BlockHeadConfig.from_dict(raw, num_target_layers=36)


@pytest.mark.parametrize("flag", [False, True, None])
def test_full_attention_of_speculators_heads_is_bidirectional(flag):
    """Stated or not: older versions have no such flag."""
    raw = changed(SPECULATORS_QWEN3_8B, sliding_window_non_causal=flag)
    config = read(raw)
    assert config.causal is False
    # An id of that format counts the embedding.
    assert config.target_layer_ids == (1, 17, 32)
    assert config.draft_vocab_size == 32000 and config.rope_theta == 1e6


@pytest.mark.parametrize("stated", [True, False, None])
def test_sliding_layers_of_speculators_heads_are_causal_unless_stated(stated):
    """The flag came with the layers, and has been false by default since; a stated mask holds for
    all layers."""
    types = ["sliding_attention"] * 16
    layer = {"layer_types": types, "sliding_window": 2048, "use_sliding_window": True}
    raw = changed(SPECULATORS_QWEN3_8B, transformer_layer_config=layer, is_causal=stated)
    del raw["sliding_window_non_causal"]
    config = read(raw)
    assert set(config.windows) == {2048}
    assert set(config.layer_causal) == {True if stated is None else stated}
    if stated is not None:
        layer["layer_types"][1:] = ["full_attention"] * 15
        raw = changed(raw, transformer_layer_config=layer)
        assert set(read(raw).layer_causal) == {stated}
        assert is_causal_block_head(HeadFiles(Path(), raw)) is stated


def test_known_architectures():
    for architectures in (["DFlashDraftModel"], ["Qwen3DFlashDraftModel"], None):
        # A config of neither name nor kind is judged by its tensors.
        assert read(changed(ZLAB_QWEN3_8B, architectures=architectures))
    for other in ("DFlash2DraftModel", "FutureDraftModel", "dflashdraftmodel"):
        raw = changed(ZLAB_QWEN3_8B, architectures=[other])
        refused(lambda raw=raw: read(raw), "architectures", other, "Qwen3DFlashDraftModel")


@pytest.mark.parametrize(
    ("raw", "changes", "words"),
    [
        # Published heads that draft otherwise.
        (published.DEEPSPEC_DSPARK_QWEN3_4B, {}, ["markov_rank = 256", "method dspark_tree"]),
        (published.MODELOPT_DSPARK_QWEN3_8B, {}, ["projector_type = 'dspark'", "dspark_tree"]),
        (published.SPECFORGE_DOMINO_QWEN3_8B, {}, ["projector_type = 'domino'", "dspark_tree"]),
        (published.SPECFORGE_DOMINO_QWEN35_4B, {}, ["DominoDraftModel", "method dspark_tree"]),
        (published.SPECULATORS_JETSPEC, {}, ["speculators_model_type", "'dflash'", "not masks"]),
        (published.SPECULATORS_DSPARK, {}, ["speculators_model_type", "dspark", "'dflash'"]),
        (ZLAB_QWEN3_8B, {"dflash_config": {"shift_label": "no"}}, ["shift_label"]),
        # Heads whose distributions need more than the block's.
        (ZLAB_QWEN3_8B, {"markov_rank": 256}, ["markov_rank"]),
        # Other kinds under DFlash's name.
        (ZLAB_QWEN3_8B, {"dflash_config": {"projector_type": "lilicorr"}}, ["LiLiCorr"]),
        (ZLAB_QWEN3_8B, {"dflash_config": {"lilicorr_num_layers": 2}}, ["lilicorr_num_layers"]),
        (ZLAB_QWEN3_8B, {"xpress_rank": 256}, ["xpress_rank", "XPress"]),
        (ZLAB_QWEN3_8B, {"dflash_config": {"selector_rank": 256}}, ["selector_rank", "DFlash2"]),
        # Rotary embeddings of another kind.
        (ZLAB_QWEN3_8B, {"partial_rotary_factor": 0.008}, ["partial_rotary_factor", "0.008"]),
        (
            SPECULATORS_QWEN3_8B,
            {"transformer_layer_config": {"rope_parameters": {"full_attention": {}}}},
            ["rope_parameters"],
        ),
        (
            SPECULATORS_QWEN3_8B,
            {"transformer_layer_config": {"rope_parameters": {"partial_rotary_factor": "a"}}},
            ["partial_rotary_factor"],
        ),
        (ZLAB_QWEN3_8B, {"rope_scaling": {"rope_type": "dynamic"}}, ["rope_type", "dynamic"]),
        (ZLAB_QWEN3_8B, {"rope_scaling": {"rope_type": "llama3", "factor": 4}}, ["low_freq"]),
        (ZLAB_QWEN3_8B, {"rope_scaling": {"rope_type": "linear", "factor": 0}}, ["factor"]),
        (ZLAB_QWEN3_8B, {"rope_scaling": {"rope_type": "linear", "factor": 1e999}}, ["inf"]),
        (ZLAB_QWEN3_8B, {"rope_theta": 10**400}, ["rope_theta"]),
        (ZLAB_QWEN3_8B, {"is_neox_style": False}, ["is_neox_style = False"]),
        # Windows.
        (ZLAB_QWEN3_8B, {"layer_types": ["chunked_attention"] * 5}, ["layer_types", "chunked"]),
        (ZLAB_QWEN3_8B, {"use_sliding_window": True}, ["use_sliding_window", "sliding"]),
        (ZLAB_QWEN3_8B, {"dflash_config": {"use_swa": True}}, ["sliding_window = None"]),
        (
            ZLAB_QWEN3_8B,
            {"layer_types": ["sliding_attention"] * 5, "use_sliding_window": None},
            ["sliding_window = None", "an integer from 1"],
        ),
        # Fields that say less than they must.
        (ZLAB_QWEN3_8B, {"hidden_size": None}, ["hidden_size = None, legal: an integer from 1"]),
        (ZLAB_QWEN3_8B, {"block_size": 1}, ["block_size = 1", ">= 2"]),
        (ZLAB_QWEN3_8B, {"num_key_value_heads": 3}, ["num_key_value_heads = 3", "32"]),
        (SPECULATORS_QWEN3_8B, {"speculators_model_type": "eagle3"}, ["'eagle3'", "'dflash'"]),
        (ZLAB_QWEN3_8B, {"layer_types": ["full_attention"]}, ["layer_types"]),
        (ZLAB_QWEN3_8B, {"rms_norm_eps": 0}, ["rms_norm_eps"]),
        (ZLAB_QWEN3_8B, {"num_target_layers": 40}, ["num_target_layers", "40", "36"]),
        (ZLAB_QWEN3_8B, {"final_logit_softcapping": 30.0}, ["final_logit_softcapping"]),
        (ZLAB_QWEN3_8B, {"dflash_config": {"causal": "no"}}, ["causal", "true or false"]),
    ],
)  # fmt: skip
def test_other_meanings_are_refused(raw, changes, words):
    refused(lambda: read(changed(raw, **changes)), "draft head config", *words)


@pytest.mark.parametrize(
    ("raw", "changes", "samples"),
    [
        (ZLAB_QWEN3_8B, {"dflash_config": {"shift_label": True}}, True),
        (ZLAB_QWEN3_8B, {"dflash_config": {"sample_from_anchor": True}}, True),
        (SPECULATORS_QWEN3_8B, {"sample_from_anchor": True}, True),
        (published.DEEPSPEC_DFLASH_QWEN3_4B, {}, True),
        (ZLAB_QWEN3_8B, {}, False),
        (SPECULATORS_QWEN3_8B, {}, False),
    ],
)
def test_where_the_first_draft_is_read(raw, changes, samples):
    config = read(changed(raw, **changes))
    assert config.sample_from_anchor is samples
    assert config.num_draft_tokens == config.block_size - (not samples)
    assert read(config.to_dict()).sample_from_anchor is samples


def test_an_absent_head_size_is_that_of_the_model_type():
    for model_type, size in (("qwen3", 128), ("llama", 80)):
        raw = changed(ZLAB_QWEN3_8B, hidden_size=2560, model_type=model_type)
        del raw["head_dim"]
        assert read(raw).head_dim == size


def test_the_mask_taken_is_logged_where_the_checkpoint_does_not_say(caplog):
    with caplog.at_level(logging.INFO):
        read(ZLAB_QWEN3_8B)
    assert "bidirectional" in caplog.text and "causal" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO):
        stated = changed(ZLAB_QWEN3_8B, dflash_config={"causal_head": False})
        read(stated)
    assert not caplog.text
