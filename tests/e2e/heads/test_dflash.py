# SPDX-License-Identifier: Apache-2.0
"""DFlash heads under vLLM's own method and as trees of one branch: the same drafts, token for
token."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.eagle3_chains import CHAIN, DEPTH, compare_in_batches_and_after_hits, own_engine
from tests.e2e.pair import make_engine, target
from tests.e2e.tiny import make_block_head
from vllm_specplug.methods.block.checkpoint import save_block_head
from vllm_specplug.methods.block.head import BlockHead
from vllm_specplug.methods.block.speculators_format import HeadTarget
from vllm_specplug.train.target import TargetWeights

pytestmark = [pytest.mark.e2e, pytest.mark.own_process]

# No prompt holds it.
MASK_TOKEN = 2


def make_head(folder: Path) -> Path:
    """A head in the format of speculators. Drafts depend on all slots of a block, so it is as long
    as the chains."""
    weights = TargetWeights(target())
    block = make_block_head(int(weights.config["vocab_size"]), causal=False, block_size=DEPTH + 1)
    config = replace(
        block.config,
        mask_token_id=MASK_TOKEN,
        max_position_embeddings=weights.config["max_position_embeddings"],
    )
    head = BlockHead(config)
    head.load_state_dict(block.state_dict())
    made_for = HeadTarget.of(weights.folder, config, None, "")
    save_block_head(folder, head, target=made_for, dtype=torch.float32)
    return folder


def test_chains_are_those_of_vllms_own_method(tmp_path: Path) -> None:
    """In a batch and after prefix hits."""
    head = make_head(tmp_path / "head")
    inspect = json.loads((head / "config.json").read_text())
    assert inspect["speculators_model_type"] == "dflash"
    engine: dict[str, Any] = {"async_scheduling": False, "enable_prefix_caching": True}
    engines = (
        own_engine("dflash", speculative={"model": str(head)}, **engine),
        make_engine("ddtree", speculative={**CHAIN, "model": str(head)}, **engine),
    )
    compare_in_batches_and_after_hits(engines)
