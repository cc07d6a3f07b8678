# SPDX-License-Identifier: Apache-2.0
"""DDTree: a DFlash head, bidirectional inside the block, and the exact best-first tree over it.

Best-first expansion over a block's marginals is DDTree's rule, and JetSpec trees are built the
same way; a `tree_width` of 1 gives DFlash's own chain.
"""

from __future__ import annotations

from vllm_specplug.methods.block.drafter import BlockHeadDrafter


class DDTreeDrafter(BlockHeadDrafter):
    """The block head as it stands; a checkpoint that says nothing is bidirectional."""
