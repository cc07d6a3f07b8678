# SPDX-License-Identifier: Apache-2.0
"""Entry points of the kernels and the choice between their implementations.

Letters: T query rows of the step, M tree rows, Hq/Hkv heads, Dh head size, L layers,
P copied slots.
"""

from __future__ import annotations

from typing import Any

import torch

from . import reference
from .cpu_layout import CpuKvLayout
from .extension import cpu_extension_error, has_cpu_extension, supported_isas
from .features import PLAIN, AttnFeatures
from .metadata import TreeAttnMetadata
from .tree_tensors import Trees, empty_trees

_COMPILED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def tree_attn(
    # [T, Hq, Dh]
    query: torch.Tensor,
    # [num_blocks, Hkv, block_size, Dh] views as made by CpuKvLayout.views
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    # [T, Hq, Dh], written in place
    output: torch.Tensor,
    meta: TreeAttnMetadata,
    scale: float,
    layout: CpuKvLayout,
    # [M, Hkv, Dh]
    tail_key: torch.Tensor | None = None,
    tail_value: torch.Tensor | None = None,
    *,
    features: AttnFeatures = PLAIN,
) -> None:
    """Attention of tree rows over their request's paged context and their own tree.

    Row i of a tree attends slots [0, context_len) of its request and the rows j of its own tree
    whose mask bit is set. K/V of row j are in the cache at slot context_len + j, or, if
    `tail_key` and `tail_value` are given, in row mask_start + j of the tails; then nothing past the
    context is read from the cache. Rows of `output` that belong to no tree are not written.

    A cache of 8 bits holds keys and values divided by `features.key_scale` and
    `features.value_scale`; it has no dense tail.

    For `features`, the position of a row is the number of rows before it that it attends. With a
    window, pages entirely before it are not read, and their entries of the block table are not
    followed; rows after a row, in a block that is attended in both directions, are never outside.

    Raises:
        RuntimeError: if shapes disagree or the metadata points outside a tensor.
    """
    if has_cpu_extension() and query.dtype in _COMPILED_DTYPES:
        torch.ops.specplug.tree_attn.default(
            query,
            key_cache,
            value_cache,
            output,
            meta.plan,
            meta.mask_words,
            meta.block_table,
            scale * features.key_scale,
            layout.kind_id,
            layout.block_size,
            layout.tables,
            tail_key,
            tail_value,
            features.window,
            features.soft_cap,
            features.alibi_slopes,
            None if features.sinks is None else features.sinks.float(),
            features.value_scale,
        )
        return
    reference.tree_attn_reference(
        query, key_cache, value_cache, output, meta, scale, layout, tail_key, tail_value,
        features=features,
    )  # fmt: skip


# Slots and dims that the compiled kernels process at a time.
_GROUP = 32
# Instruction sets whose kernels read a bfloat16 cache in vLLM's "vec" layout directly.
_READ_IN_PLACE = ("avx2", "avx512", "avx512_bf16")


class TreeLayer:
    """`tree_attn` in a layer with constant features, without the set-up that is equal in all steps.

    Needs the compiled kernels and a query of the cache's dtype.

    Args:
        kv_cache: [num_blocks, Hkv, block_size, 2 * Dh], kept alive.
    """

    def __init__(
        self, kv_cache: torch.Tensor, layout: CpuKvLayout, scale: float, features: AttnFeatures
    ) -> None:
        assert features.key_scale == features.value_scale == 1.0, "scales of a cache may change"
        self.kv_cache = kv_cache
        self._views = layout.views(kv_cache)
        self._constants = scale, layout.kind_id, layout.block_size, layout.tables
        self._features = features
        self._shapes_scores = not features.is_plain
        head_size = kv_cache.shape[3] // 2
        self.reads_in_place = (
            torch.ops.specplug.cpu_variant(True) in _READ_IN_PLACE
            and layout.kind == "vec"
            and kv_cache.dtype == torch.bfloat16
            and layout.block_size % _GROUP == head_size % _GROUP == 0
            and not features.window
        )
        """Whether the kernel reads the cache directly with prefetching, and sums in the order of
        positions. Otherwise a single row costs at least as much as in vLLM's kernel."""

    @staticmethod
    def serves(query: torch.Tensor, kv_cache: torch.Tensor) -> bool:
        """Whether the compiled kernels support them."""
        is_compiled = query.dtype in _COMPILED_DTYPES and query.dtype == kv_cache.dtype
        return is_compiled and has_cpu_extension()

    def attend(
        self,
        # [T, Hq, Dh]
        query: torch.Tensor,
        # [T, Hq, Dh], written in place
        output: torch.Tensor,
        meta: TreeAttnMetadata,
        # int32 [B, max_blocks], which replaces that of `meta`
        block_table: torch.Tensor,
    ) -> None:
        """Computes the attention of the tree rows; see `tree_attn`."""
        more: tuple[Any, ...] = ()
        if self._shapes_scores:
            f = self._features
            # A weight may be loaded again with another dtype.
            sinks = None if f.sinks is None else f.sinks.float()
            more = f.window, f.soft_cap, f.alibi_slopes, sinks
        torch.ops.specplug.tree_attn.default(
            query, *self._views, output, meta.plan, meta.mask_words, block_table,
            *self._constants, None, None, *more,
        )  # fmt: skip


def copy_kv(
    # L tensors, each [num_blocks, Hkv, block_size, 2 * Dh]
    src_caches: list[torch.Tensor],
    # L tensors of the same layout, any number of blocks; may be the sources
    dst_caches: list[torch.Tensor],
    # int64 [L or 1, Hkv or 1, P]
    src_slots: torch.Tensor,
    # int64 [P]
    dst_slots: torch.Tensor,
    layout: CpuKvLayout,
) -> None:
    """Copies K and V of slot src_slots[l, h, i] to slot dst_slots[i] of layer l and head h, in
    order of i.

    A slot number is block * block_size + offset. Inside one cache, copies for one request must come
    with ascending dst and dst <= src: then none overwrites a source that is still to be read.

    Raises:
        RuntimeError: if shapes disagree or a slot is outside its cache.
    """
    if has_cpu_extension():
        torch.ops.specplug.copy_kv.default(
            src_caches, dst_caches, src_slots.contiguous(), dst_slots, layout.tables
        )
        return
    reference.copy_kv_reference(src_caches, dst_caches, src_slots, dst_slots, layout)


def build_best_first(
    # [B, D, K]
    top_ids: torch.Tensor,
    # [B, D, K]
    top_log_probs: torch.Tensor,
    # [B] int32
    budgets: torch.Tensor,
    # [B] int32
    depths: torch.Tensor,
    max_width: int,
) -> Trees:
    """Returns exact best-first trees of a batch, equal to those of the tree package's builder.

    Args:
        top_ids: int64 candidates of each depth, best first.
        top_log_probs: float32, their log-probabilities; a depth ends at the first that is not
            finite.
        budgets: most nodes of each tree.
        depths: deepest level of each tree, capped by D.
        max_width: most children of one node.

    Returns:
        token_ids int64 [B, N], parent_indices int32 [B, N], depths int32 [B, N],
        scores float32 [B, N] and num_nodes int32 [B], with N the largest budget; entries past
        num_nodes are undefined.

    Raises:
        RuntimeError: without the compiled kernels; the tree package builds trees in Python.
    """
    reason = cpu_extension_error()
    if reason is not None:
        raise RuntimeError(f"build_best_first needs the compiled kernels: {reason}")
    most = max(0, int(budgets.max())) if budgets.numel() else 0
    trees = empty_trees(top_ids.shape[0], most)
    torch.ops.specplug.build_best_first.default(
        top_ids.contiguous(),
        top_log_probs.contiguous(),
        budgets,
        depths,
        max_width,
        *trees,
    )
    return trees


def can_build_best_first(device: torch.device) -> bool:
    """Whether `build_best_first` supports candidates on `device`."""
    return device.type == "cpu" and has_cpu_extension()


def describe(dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """Returns which tree attention serves a model of `dtype` on the CPU, and why.

    Returns:
        kernel ("cpp" or "reference"), isa (the variant's name or None), supported_isas, reason.
    """
    reason = cpu_extension_error()
    if reason is None and dtype not in _COMPILED_DTYPES:
        reason = f"there is no compiled kernel for {dtype}"
    if reason is not None:
        return {"kernel": "reference", "isa": None, "supported_isas": [], "reason": reason}
    isa = torch.ops.specplug.cpu_variant(dtype == torch.bfloat16)
    return {
        "kernel": "cpp",
        "isa": isa,
        "supported_isas": list(supported_isas()),
        "reason": f"the fastest variant this CPU runs for {dtype}",
    }
