# SPDX-License-Identifier: Apache-2.0
"""Published heads for targets with Gated DeltaNet layers are read as their trainers meant them."""

from __future__ import annotations

from tests.unit.methods import heads_for_hybrids as heads
from vllm_specplug.methods.block.config import BlockHeadConfig
from vllm_specplug.methods.dspark_tree.config import DSparkConfig
from vllm_specplug.methods.eagle3_tree.config import Eagle3Config


def test_dflash() -> None:
    config = BlockHeadConfig.from_dict(heads.DFLASH_QWEN35_27B, num_target_layers=64)
    assert config.target_layer_ids == (3, 15, 31, 47, 59)
    assert (config.block_size, config.causal, config.mask_token_id) == (16, False, None)
    assert (config.head_dim, config.rope_theta, config.partial_rotary_factor) == (256, 1e7, 1.0)


def test_dspark() -> None:
    config = DSparkConfig.from_dict(heads.DSPARK_QWEN35_4B, num_target_layers=32)
    assert config.block.target_layer_ids == (1, 8, 15, 22, 29)
    assert (config.markov_rank, config.confidence_size) == (256, 2560 + 256)
    assert config.block.sample_from_anchor and config.block.mask_token_id == 248070
    long = DSparkConfig.from_dict(heads.DSPARK_QWEN38_27B, num_target_layers=64)
    assert (long.block.block_size, long.block.rope_theta) == (7, 1e7)
    assert long.block.rope_scaling is not None
    assert (long.block.rope_scaling["rope_type"], long.block.rope_scaling["factor"]) == ("yarn", 32)


def test_eagle3() -> None:
    config = Eagle3Config.from_dict(heads.EAGLE3_QWEN35_4B, num_target_layers=32)
    assert config.target_layer_ids == (1, 15, 28)
    assert (config.head_dim, config.draft_vocab_size, config.rope_theta) == (256, 32000, 1e7)


def test_a_head_with_positions_on_three_axes_is_read_as_text_has_them() -> None:
    config = BlockHeadConfig.from_dict(heads.DFLASH_QWEN35_4B_VL, num_target_layers=32)
    assert (config.rope_scaling, config.partial_rotary_factor, config.rope_theta) == (
        None, 0.25, 1e7,
    )  # fmt: skip
    assert config.rotary.rotated == 64
