# SPDX-License-Identifier: Apache-2.0
"""JetSpec: a block head that is causal inside the block, and a tree over its marginals."""

from __future__ import annotations

from vllm_specplug.methods.block.drafter import BlockHeadDrafter


class JetSpecDrafter(BlockHeadDrafter):
    """The block head as it stands; its checkpoint says that the block is causal."""
