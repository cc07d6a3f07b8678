# SPDX-License-Identifier: Apache-2.0
"""The interface of CUDA tree attention kernels: the tensors of a call, and the guarantees.

Letters: R trees, M tree rows (roots and nodes of all trees), T query rows of the step, B requests
in the block table, Hq/Hkv heads, G = Hq / Hkv, Dh head size, W 64-bit words per mask row.

    tree_attn_<kernel>(
        query,          # [T, Hq, Dh]
        key_cache,      # [num_blocks, block_size, Hkv, Dh]
        value_cache,    # [num_blocks, block_size, Hkv, Dh]
        output,         # [T, Hq, Dh], written in place
        meta,           # metadata.TreeAttnMetadata with parent_rows
        scale,          # float, multiplies query times key
        tail_key=None,    # [M, Hkv, Dh]
        tail_value=None,  # [M, Hkv, Dh]
        *,
        features=PLAIN,   # features.AttnFeatures of the layer; none of an 8-bit cache for CuTe's
    ) -> None

Row i of tree r (query row `row_start[r] + i`) attends cache slots [0, context_lens[r]) of request
`req_indices[r]` and the rows j of its own tree that its mask selects. K/V of row j are in the
cache at slot context_lens[r] + j, or, if both tails are given, in row mask_start[r] + j of the
tails; then no cache slot past the context is used. Query head h reads KV head h // G.

With a window or ALiBi a row's position is context_lens[r] plus its depth. Rows of a full mask are
then as deep as a chain's, which only Triton's kernel and the reference support. With `key_scales`
the caches (not the tails) hold 8-bit numbers (e4m3 or int8), with `query_scales` the query does as
well (e4m3); products are then of the output's dtype, in which all are exact. Scales of each slot
multiply scores before a soft cap, and weights after the softmax.

Strides are arbitrary multiples of 16 bytes (of 4 where each slot has scales, which lie between its
numbers in one cache of keys and values, see `numbers_and_scales`), except that the last one is 1
(element) everywhere and that plan, parent_rows and block_table are contiguous. vLLM's
FlashAttention cache of 0.32 is logically [num_blocks, Hkv, block_size, 2 * Dh], K before V in the
last dimension; `kv_cache.transpose(1, 2).split(Dh, -1)` gives the two views, whatever the order in
memory.

Guarantees of a kernel:
  - no host synchronisation and no allocation that a CUDA graph would not replay: shapes of the
    step come from `plan`, host integers are upper bounds that hold for every replay;
  - a tree of row_count 0 is skipped (its other entries may be anything), so a graph captured for
    R trees serves fewer;
  - rows of `output` that belong to no tree are not written, rows of prefill stay with the caller;
  - a slot that no row attends may hold anything, NaN too, but the pages named for slots
    [0, context_lens + row_count) must exist, except that entries of `block_table` past the last
    slot used, and those of pages entirely before the root's window, are never followed;
  - float32 accumulation; the result differs from exact attention by rounding only, for any
    number of splits;
  - parent_rows is not trusted to be a tree: an entry that does not precede its row ends the walk
    (the result is then unspecified, but the kernel returns).
"""

from __future__ import annotations

import torch

from .cpu_layout import FP8_CACHES

# Rows of `TreeAttnMetadata.plan`.
PLAN_REQ, PLAN_ROW_START, PLAN_ROW_COUNT, PLAN_CONTEXT, PLAN_MASK_START = range(5)
PLAN_ROWS = 5

# vLLM's names of the 8-bit caches that kernels read.
E4M3_CACHES = frozenset(n for n, dtype in FP8_CACHES.items() if dtype == torch.float8_e4m3fn)

# The same for caches with scales per token, and the dtypes of their numbers.
TOKEN_SCALE_CACHES = {
    "int8_per_token_head": torch.int8,
    "fp8_per_token_head": torch.float8_e4m3fn,
}
# Bytes of the float32 scale after the numbers of a token's key and of its value in each head.
TOKEN_SCALE_BYTES = 4

# Rows of the largest tree that kernels must support: the root and 256 nodes.
MAX_TREE_ROWS = 257

# Candidates that the top-k kernel finds per row. Each costs a pass over the first chunk of a part.
MOST_CANDIDATES = 32

# Environment variable: 1 captures decoding batches and drafts in full graphs.
FULL_GRAPHS_VARIABLE = "SPECPLUG_FULL_CUDA_GRAPHS"


def numbers_and_scales(
    # [num_blocks, block_size, Hkv, Dh + TOKEN_SCALE_BYTES], of one byte each
    half: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns views of the keys or values of a cache of `TOKEN_SCALE_CACHES`: numbers [..., Dh],
    and the float32 scale of each slot and head [num_blocks, block_size, Hkv]."""
    scales = half[..., -TOKEN_SCALE_BYTES:].view(torch.float32).squeeze(3)
    return half[..., :-TOKEN_SCALE_BYTES], scales
