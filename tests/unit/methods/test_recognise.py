# SPDX-License-Identifier: Apache-2.0
"""Kinds of heads are told apart; docs/checkpoints.md has those of published configs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.methods.block import published
from tests.unit.methods.block.published import ZLAB_QWEN3_8B, changed
from tests.unit.methods.block.published_heads import head_shapes
from vllm_specplug.drafting.head_files import HeadFiles
from vllm_specplug.registry import head_owners

UNNAMED = changed(published.tiny(ZLAB_QWEN3_8B), architectures=None)
BLOCK = tuple(head_shapes(UNNAMED))


def _of(**changes: Any) -> dict[str, Any]:
    return changed(ZLAB_QWEN3_8B, **changes)


@pytest.mark.parametrize(
    ("config", "tensors", "owners"),
    [
        (_of(dflash_config={"causal_head": True}), (), ["jetspec"]),
        (_of(jetspec_config={}), (), ["jetspec"]),
        # Malformed values are for the method's reader to refuse.
        (_of(dflash_config={"causal": "no"}), (), ["ddtree"]),
        (_of(jetspec_config="x"), (), ["ddtree"]),
        # Tensors decide where the config names nothing.
        (UNNAMED, BLOCK, ["ddtree"]),
        (UNNAMED, (*BLOCK, "markov_head.markov_w1.weight"), ["dspark_tree"]),
        (UNNAMED, (*BLOCK, "markov_head.joint_proj.weight"), ["dspark_tree"]),
        (UNNAMED, (*BLOCK, "prefix_gru.weight_ih_l0"), ["dspark_tree"]),
        (UNNAMED, (*BLOCK, "candidate_selector.predecessor_codebook"), ["dflash2_tree"]),
        (UNNAMED, (), []),
        ({}, (), []),
        ({"architectures": "DFlashDraftModel"}, (), []),
        ({"architectures": 3}, (), []),
        ({"speculators_model_type": "domino"}, (), ["dspark_tree"]),
        ({"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1},
         ("layers.0.input_layernorm.weight", "lm_head.weight"), []),
        # Refused later, with the reason.
        ({"speculators_model_type": "peagle"}, (), ["eagle3_tree"]),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, (), ["eagle3_tree"]),
        ({"architectures": ["PEagleDraftModel"]}, (), ["eagle3_tree"]),
    ],
)  # fmt: skip
def test_owners_of_a_head(
    config: dict[str, Any], tensors: tuple[str, ...], owners: list[str]
) -> None:
    files = HeadFiles(Path(), config, dict.fromkeys(tensors))
    assert [method.name for method in head_owners(files)] == owners
