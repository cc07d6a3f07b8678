# SPDX-License-Identifier: Apache-2.0
"""EAGLE-3 configs mean what their trainers meant, or are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.unit.methods.absurd import refused
from tests.unit.methods.eagle3_tree import published
from vllm_specplug.methods.block.speculators_format import HeadTarget
from vllm_specplug.methods.eagle3_tree.config import Eagle3Config


def read(raw: dict[str, Any], layers: int = 36) -> Eagle3Config:
    return Eagle3Config.from_dict(raw, num_target_layers=layers)


def test_speculators_name_the_layers_with_a_window() -> None:
    raw = published.SPECULATORS_QWEN3_8B_WINDOW
    assert read(raw).windows == (2048,)
    assert read(published.SPECULATORS_QWEN3_8B_LAYERS).windows == (2048, None, 2048)
    layer = {**raw["transformer_layer_config"], "layer_types": ["full_attention"]}
    layer["use_sliding_window"] = False
    assert read({**raw, "transformer_layer_config": layer}).windows == (None,)


@pytest.mark.parametrize(
    "changes",
    [{"layer_types": ["full_attention"], "sliding_window": 4096}, {},
     {"layer_types": ["full_attention"] * 28 + ["sliding_attention"] * 8, "sliding_window": 4096}],
)  # fmt: skip
def test_a_flag_copied_from_the_target_makes_no_window(changes: dict[str, Any]) -> None:
    flagged = {**published.SPECFORGE_QWEN3_4B, "use_sliding_window": True, **changes}
    assert read(flagged).windows == (None,)


@pytest.mark.parametrize("name", ["mask_token_id", "pard_token", "ptd_token_id"])
def test_mask_tokens_have_several_names(name: str) -> None:
    assert read({**published.SPECFORGE_QWEN3_4B, name: 7}).mask_token_id == 7
    parallel = read(published.SPECULATORS_PEAGLE_QWEN3_8B)
    assert parallel.num_draft_tokens == 8
    # Of other heads, this is only what their trainer suggests.
    assert read(published.SPECULATORS_QWEN3_8B_WINDOW).num_draft_tokens is None
    assert parallel.mask_token_id == 151669 and parallel.norm_before_residual
    # Unless they say otherwise, other heads of speculators norm the residual.
    unsaid = {"norm_before_residual": None}
    assert not read({**published.SPECULATORS_PEAGLE_QWEN3_8B, **unsaid}).norm_before_residual
    assert read({**published.SPECULATORS_GEMMA4_31B, **unsaid}, 60).norm_before_residual


@pytest.mark.parametrize(
    "flag", ["norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"]
)
@pytest.mark.parametrize("place", ["top", "eagle_config"])
def test_flags_are_read_from_both_places(place: str, flag: str) -> None:
    for value in (True, False):
        stated = {flag: value}
        raw = {**published.SPECFORGE_QWEN3_4B, **(stated if place == "top" else {place: stated})}
        assert getattr(read(raw), flag) is value
    # vLLM looks into eagle_config first.
    both = {**published.SPECFORGE_QWEN3_4B, flag: False, "eagle_config": {flag: True}}
    assert getattr(read(both), flag) is True


@pytest.mark.parametrize("place", ["top", "eagle_config"])
@pytest.mark.parametrize(
    ("ids", "layers"), [([2, 18, 33], (1, 17, 32)), ([1, 17, 32], (1, 17, 32)),
                        ([24, 30, 36], (23, 29, 35))],
)  # fmt: skip
def test_both_ways_of_numbering_layers(place: str, ids: list[int], layers: tuple[int]) -> None:
    stated = {"eagle_aux_hidden_state_layer_ids": ids}
    raw = {**published.SPECFORGE_QWEN3_4B, **(stated if place == "top" else {place: stated})}
    assert read(raw).target_layer_ids == layers


@pytest.mark.parametrize(
    ("ids", "layers"),
    [([1, 17, 32], (1, 17, 32)), ([1, 9, 33], (0, 8, 32)), ([2, 18, 33], (1, 17, 32))],
)
def test_speculators_count_the_embedding_in_all_but_converted_heads(
    ids: list[int], layers: tuple[int, ...]
) -> None:
    raw = {**published.SPECULATORS_QWEN3_8B_WINDOW, "eagle_aux_hidden_state_layer_ids": ids}
    assert read(raw).target_layer_ids == layers


@pytest.mark.parametrize("mask", [None, 7])
def test_a_config_written_here_reads_back(mask: int | None) -> None:
    for name in ("EAGLE_LLAMA3_8B", "SPECFORGE_QWEN3_30B_EAGLE31", "MODELOPT_LLAMA31_8B",
                 "SPECULATORS_QWEN3_8B_WINDOW", "SPECULATORS_QWEN3_8B_LAYERS"):  # fmt: skip
        config = read({**getattr(published, name), "mask_token_id": mask}, 32)
        assert read(config.to_dict(), 32) == config
        if mask is None:
            assert read(config.to_speculators(HeadTarget("model", ()), 8), 32) == config


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 257}, ["num_hidden_layers", "257", "256"]),
        ({"num_hidden_layers": 2, "layer_types": ["full_attention"]}, ["layer_types", "2 draft"]),
        (published.SPECFORGE_PEAGLE_QWEN3_8B,
         ["mask_token_id / pard_token / ptd_token_id = None", "model.mask_token_id"]),
        ({**published.SPECULATORS_PEAGLE_QWEN3_8B,
          "speculators_config": {"proposal_methods": [{"speculative_tokens": 0}]}},
         ["speculative_tokens = 0", "an integer from 1"]),
        ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, ["MLA"]),
        (published.TORCHSPEC_GLM4_MOE, ["Glm4MoeForCausalLMEagle3", "experts are not served"]),
        ({"use_moe": True}, ["use_moe", "experts are not served"]),
        ({"pard_token": 151936}, ["pard_token = 151936", "0..151935"]),
        ({"speculators_model_type": "mlp"}, ["speculators_model_type", "'mlp'", "'peagle'"]),
        ({"layer_types": ["sliding_attention"], "use_sliding_window": None},
         ["sliding_window", "None", "an integer from 1"]),
        ({"layer_types": ["sliding_attention"], "sliding_window": 512}, ["use_sliding_window"]),
        ({"sliding_window": 512, "use_sliding_window": None},
         ["sliding_window", "512", '"layer_types"']),
        ({"hidden_act": "gelu"}, ["hidden_act", "silu"]),
        ({"rope_scaling": {"rope_type": "longrope"}}, ["rope_scaling.rope_type", "longrope"]),
        ({"partial_rotary_factor": 0.01}, ["partial_rotary_factor", "even number of 80"]),
        ({"eagle_config": {"use_aux_hidden_state": False}}, ["use_aux_hidden_state"]),
        ({"eagle_config": {"parallel_draft_step": 4}}, ["parallel_draft_step", "draft modules"]),
        ({"eagle_aux_hidden_state_layer_ids": [30, 2, 18]}, ["ascending"]),
        ({"eagle_aux_hidden_state_layer_ids": ["a"]}, ["eagle_aux_hidden_state_layer_ids"]),
        ({"draft_vocab_size": 200000}, ["draft_vocab_size", "151936"]),
        ({"norm_output": "yes"}, ["norm_output", "true or false"]),
        ({"target_layer_ids": [1, 17, 32], "eagle_aux_hidden_state_layer_ids": [3, 18, 33]},
         ["eagle_aux_hidden_state_layer_ids", "target_layer_ids = [1, 17, 32]"]),
    ],
)  # fmt: skip
def test_other_heads_are_refused_by_name(changes: dict[str, Any], words: list[str]) -> None:
    raw = {**published.SPECFORGE_QWEN3_4B, **changes}
    refused(lambda: read(raw), "draft head config", *words)


@pytest.mark.parametrize(
    "scaling",
    [{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
     {"rope_type": "yarn", "factor": 4.0}],
)  # fmt: skip
def test_rotary_settings_that_are_left_out_are_the_trainers(scaling: dict[str, Any]) -> None:
    """Trainers build the layer from the config, whose longest position then is the original."""
    stated = {**scaling, "original_max_position_embeddings": 2048}
    raw = {**published.SPECFORGE_QWEN3_4B, "max_position_embeddings": 2048}
    left_out, said = (read({**raw, "rope_scaling": s}).rotary for s in (scaling, stated))
    assert torch.equal(left_out.frequencies()[0], said.frequencies()[0])
    again = read(read({**raw, "rope_scaling": scaling}).to_dict()).rotary
    assert torch.equal(again.frequencies()[0], said.frequencies()[0])


def test_the_head_size_that_a_model_type_has_by_default() -> None:
    raw = {k: v for k, v in published.SPECFORGE_QWEN3_4B.items() if k != "head_dim"}
    assert read({**raw, "model_type": "qwen3"}).head_dim == 128
    assert read({**raw, "model_type": "llama"}).head_dim == 80


@pytest.mark.parametrize("aux", [[2, 18, 33], [1, 17, 32]])
def test_layers_stated_twice_may_agree_in_either_numbering(aux: list[int]) -> None:
    stated = {"target_layer_ids": [1, 17, 32], "eagle_aux_hidden_state_layer_ids": aux}
    assert read({**published.SPECFORGE_QWEN3_4B, **stated}).target_layer_ids == (1, 17, 32)
