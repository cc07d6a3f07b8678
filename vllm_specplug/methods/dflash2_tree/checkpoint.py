# SPDX-License-Identifier: Apache-2.0
"""Reads DFlash2 heads (safetensors only), with the block head's strict checks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm_specplug.methods.block.checkpoint import BlockHeadExtras, load_block_head
from vllm_specplug.methods.block.head import BlockHead
from vllm_specplug.methods.dflash2_tree.config import (
    PREDECESSORS,
    PROJECTION,
    SUCCESSORS,
    DFlash2Config,
)
from vllm_specplug.methods.dspark_tree.checkpoint import markov_head
from vllm_specplug.methods.local.head import LocalHead


def load_dflash2_head(
    directory: str | Path, target_config: Any
) -> tuple[BlockHead, BlockHeadExtras, LocalHead]:
    """Reads a head and checks it against its target.

    Arguments and errors are those of `load_block_head`.

    Returns:
        The block head, its extras, and the selector as a Markov head that reads slots.
    """
    head, extras = load_block_head(directory, target_config, DFlash2Config)
    codebooks, draft_ids = extras.extra, extras.target_ids
    successors = codebooks[SUCCESSORS]
    if draft_ids is not None:
        successors = successors[draft_ids]
    selector = markov_head(
        "markov", codebooks[PREDECESSORS], successors, {"slot_proj.weight": codebooks[PROJECTION]}
    )
    return head, extras, selector
