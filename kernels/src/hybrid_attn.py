# SPDX-License-Identifier: Apache-2.0
"""Tree attention in two parts, merged by their log-sum-exp.

The prefix part (a request's paged context, no mask) and the tree part (the tree's own keys under
the ancestor mask) are attentions over disjoint keys; with the log-sum-exp of each, their merge is
the attention over both. A drafter that attends only the target's cache uses the prefix part alone.

Letters: T query rows, M tree rows, Hq/Hkv heads, Dh head size.
"""

from __future__ import annotations

import torch

from . import reference
from .cpu_layout import KINDS, CpuKvLayout
from .extension import has_cpu_extension
from .metadata import TreeAttnMetadata

_COMPILED_DTYPES = (torch.float32, torch.bfloat16)
_BLOCK = 32


def prefix_attn(
    # [T, Hq, Dh]
    query: torch.Tensor,
    # [num_blocks, Hkv, block_size, Dh] views as made by CpuKvLayout.views
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    # [T, Hq, Dh], written in place
    output: torch.Tensor,
    # float32 [T, Hq], written in place
    lse: torch.Tensor | None,
    meta: TreeAttnMetadata,
    scale: float,
    layout: CpuKvLayout,
) -> None:
    """Every row of tree r attends all of slots [0, context_lens[r]) of its request.

    An empty context gives zeros and a log-sum-exp of -inf. Mask words are not read.

    Raises:
        RuntimeError: if shapes disagree or the metadata points outside a tensor.
    """
    if has_cpu_extension() and query.dtype in _COMPILED_DTYPES:
        torch.ops.specplug.tree_attn.default(
            query, key_cache, value_cache, output, meta.plan, meta.mask_words, meta.block_table,
            scale, layout.kind_id, layout.block_size, layout.tables, None, None, True, lse,
        )  # fmt: skip
        return
    reference.prefix_attn_reference(query, key_cache, value_cache, output, lse, meta, scale, layout)


def tree_part_attn(
    # [T, Hq, Dh]
    query: torch.Tensor,
    # [M, Hkv, Dh]
    key: torch.Tensor,
    value: torch.Tensor,
    # [T, Hq, Dh], written in place
    output: torch.Tensor,
    # float32 [T, Hq], written in place
    lse: torch.Tensor,
    meta: TreeAttnMetadata,
    scale: float,
) -> None:
    """Rows of each tree attend the rows of their own tree whose mask bit is set.

    `meta.context_lens` is not read. Keys and values are dense, in the order of the mask rows.
    """
    if has_cpu_extension() and query.dtype in _COMPILED_DTYPES:
        plan = meta.plan.clone()
        plan[3] = 0  # context lengths: nothing is read from the cache, which may be empty
        cache = key.new_empty(0, key.shape[1], _BLOCK, key.shape[2])
        torch.ops.specplug.tree_attn.default(
            query, cache, cache, output, plan, meta.mask_words, meta.block_table, scale,
            KINDS["vec"], _BLOCK, None, key, value, False, lse,
        )  # fmt: skip
        return
    reference.tree_part_attn_reference(query, key, value, output, lse, meta, scale)


def merge_attn(
    # [T, Hq, Dh], updated in place
    output: torch.Tensor,
    # float32 [T, Hq], updated in place
    lse: torch.Tensor,
    # [T, Hq, Dh]
    other: torch.Tensor,
    # float32 [T, Hq]
    other_lse: torch.Tensor,
) -> None:
    """Merges attention over other keys into `output` and `lse`.

    With a = exp(lse) and b = exp(other_lse) the result is (a output + b other) / (a + b). A side
    of -inf contributes nothing, whatever its values hold; both -inf leaves `output` as it is.
    """
    if has_cpu_extension() and output.dtype in _COMPILED_DTYPES:
        torch.ops.specplug.merge_attn.default(output, lse, other, other_lse)
        return
    reference.merge_attn_reference(output, lse, other, other_lse)
