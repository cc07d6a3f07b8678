# SPDX-License-Identifier: Apache-2.0
"""Tree attention in two parts on CUDA devices, merged by their log-sum-exp.

The twin of `hybrid_attn`: the context without any mask, the tree's own keys under the ancestor
mask, both by the one Triton kernel, and the merge. A drafter that attends the target's cache and
nothing else runs the prefix part alone.

Letters: T query rows of the step, M tree rows, Hq/Hkv heads, Dh head size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from .lse_merge_triton import merge_states
from .tree_attn_triton import tree_attn_triton

if TYPE_CHECKING:
    from .metadata import TreeAttnMetadata


def prefix_attn_triton(
    # [T, Hq, Dh]
    query: torch.Tensor,
    # [num_blocks, block_size, Hkv, Dh], any strides
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    # [T, Hq, Dh], written in place
    output: torch.Tensor,
    # float32 [T, Hq], written in place
    lse: torch.Tensor | None,
    meta: TreeAttnMetadata,
    scale: float,
    *,
    splits: int | None = None,
) -> None:
    """Every row of a tree attends all of its request's context and nothing else.

    An empty context gives zeros and a log-sum-exp of -inf.
    """
    tree_attn_triton(
        query, key_cache, value_cache, output, meta, scale,
        lse=lse, splits=splits, prefix_only=True,
    )  # fmt: skip


def tree_part_attn_triton(
    # [T, Hq, Dh]
    query: torch.Tensor,
    # [M, Hkv, Dh], in the order of the mask rows
    key: torch.Tensor,
    value: torch.Tensor,
    # [T, Hq, Dh], written in place
    output: torch.Tensor,
    # float32 [T, Hq], written in place
    lse: torch.Tensor | None,
    meta: TreeAttnMetadata,
    scale: float,
) -> None:
    """Rows of each tree attend those rows of their own tree that the mask shows them."""
    plan = meta.plan.clone()
    plan[3] = 0  # context lengths: no page is read
    alone = replace(meta, plan=plan, max_context=0)
    pages = key.unsqueeze(1)
    tree_attn_triton(query, pages, pages, output, alone, scale, key, value, lse=lse, splits=1)
    meta.mask_words = alone.words


def hybrid_attn_triton(
    # [T, Hq, Dh]
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    # [T, Hq, Dh], written in place
    output: torch.Tensor,
    meta: TreeAttnMetadata,
    scale: float,
    # [M, Hkv, Dh]
    tail_key: torch.Tensor,
    tail_value: torch.Tensor,
    *,
    splits: int | None = None,
) -> None:
    """Prefix part, tree part and merge: `tree_attn_triton` of a dense tail in two passes."""
    rows, heads, head_dim = query.shape
    parts = query.new_empty((2, rows, heads, head_dim), dtype=torch.float32)
    # Rows outside the trees are in no part.
    lse = query.new_full((2, rows, heads), float("-inf"), dtype=torch.float32)
    prefix_attn_triton(query, key_cache, value_cache, parts[0], lse[0], meta, scale, splits=splits)
    tree_part_attn_triton(query, tail_key, tail_value, parts[1], lse[1], meta, scale)
    # The parts lie in the order of the query rows: a plan whose mask rows are those.
    plan = meta.plan.clone()
    plan[4] = plan[1]
    merge_states(parts, lse, output, plan=plan, max_rows=meta.max_rows)
