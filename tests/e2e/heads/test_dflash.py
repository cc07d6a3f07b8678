# SPDX-License-Identifier: Apache-2.0
"""DFlash heads under vLLM's own method and as trees of one branch: the same drafts, token for
token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.e2e.eagle3_chains import CHAIN, DEPTH, LONG, PROMPTS, compare_drafts, own_engine
from tests.e2e.pair import make_engine, target
from tests.e2e.tiny import make_block_head
from vllm_specplug.methods.block.checkpoint import save_block_head
from vllm_specplug.train.target import TargetWeights

pytestmark = [pytest.mark.e2e, pytest.mark.own_process]

# No prompt holds it.
MASK_TOKEN = 2


def make_heads(folder: Path) -> tuple[Path, Path]:
    """A head as it is saved here, and with what vLLM's own method wants beside it: the LM head, and
    a mask that is no token in a file of its own. Drafts depend on all slots of a block, so it is as
    long as the chains."""
    weights = TargetWeights(target())
    vocab = int(weights.config["vocab_size"])
    block = make_block_head(vocab, causal=False, block_size=DEPTH + 1)
    save_block_head(folder / "ours", block, dtype=torch.float32)
    file = save_block_head(folder / "whole", block, dtype=torch.float32)
    save_file({**load_file(file), "lm_head.weight": weights.tables().lm_head.float()}, file)
    path = folder / "whole" / "config.json"
    config = json.loads(path.read_text())
    config["dflash_config"]["mask_token_id"] = MASK_TOKEN
    config["max_position_embeddings"] = weights.config["max_position_embeddings"]
    path.write_text(json.dumps(config))
    mask = {"embedding": block.mask_embedding.detach(), "mask_token_id": MASK_TOKEN}
    torch.save(mask, folder / "whole" / "mask_embedding.pt")
    return folder / "ours", folder / "whole"


def test_chains_are_those_of_vllms_own_method(tmp_path: Path) -> None:
    """In a batch and after prefix hits."""
    ours, whole = make_heads(tmp_path)
    engine: dict[str, Any] = {"async_scheduling": False, "enable_prefix_caching": True}
    engines = (
        own_engine("dflash", speculative={"model": str(whole)}, **engine),
        make_engine("ddtree", speculative={**CHAIN, "model": str(ours)}, **engine),
    )
    assert compare_drafts(engines, PROMPTS) > 20
    assert compare_drafts(engines, [LONG]) > 5
    assert compare_drafts(engines, [[*LONG[:96], 62, 3]]) > 5
