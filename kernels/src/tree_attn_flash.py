# SPDX-License-Identifier: Apache-2.0
"""Tree attention with vLLM's FlashAttention for the context, and a Triton kernel for the tree.

Every row of a tree attends the whole context, so this part needs no mask: it is
`flash_attn_varlen_func` without causality, with its splits per sequence, its packing of query heads
and its code for each architecture. The tail kernel starts with its output and log-sum-exp l as
state of the online softmax,

    o = (exp(l - m) o_context + sum_j exp(s_j - m) v_j) / (exp(l - m) + sum_j exp(s_j - m)),

over the tree's own columns j, at most 257, with m the maximum of l and all s_j. This takes two
launches and a buffer for the context's output.

FlashAttention applies soft caps, and the tail treats sinks as another column. Layers with a window
or slopes use only the Triton kernel, because rows of unequal depth have different positions, which
FlashAttention derives from row numbers. So do layers with a quantised cache, for which
FlashAttention needs quantised queries.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from .cuda_contract import PLAN_CONTEXT
from .features import PLAIN, AttnFeatures, FeatureKind
from .tree_attn_triton import tree_attn_triton

if TYPE_CHECKING:
    from .metadata import TreeAttnMetadata

_DTYPES = (torch.bfloat16, torch.float16)
# FlashAttention's.
MAX_HEAD_DIM = 256


def unsupported_reason(head_dim: int, dtype: torch.dtype, block_size: int) -> str | None:
    """Returns why FlashAttention does not support a cache, or None."""
    if dtype not in _DTYPES:
        return f"dtype {dtype}"
    if head_dim > MAX_HEAD_DIM or head_dim % 8:
        return f"head_dim {head_dim} (multiples of 8 up to {MAX_HEAD_DIM})"
    if block_size % 16:
        return f"pages of {block_size} tokens (multiples of 16)"
    return None


def reads_context(kind: FeatureKind) -> bool:
    """Whether FlashAttention computes the context of such layers."""
    return not (kind.window or kind.alibi or kind.quantised_cache)


@cache
def context_attention(
    head_dim: int, capped: bool = False
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Returns vLLM's FlashAttention in its version for this device, optionally for `capped`
    logits."""
    from vllm.v1.attention.backends.fa_utils import (
        flash_attn_varlen_func,
        get_flash_attn_version,
    )

    version = get_flash_attn_version(head_size=head_dim, requires_softcap=capped)
    if version is None:
        raise RuntimeError(f"vLLM has no FlashAttention for head_dim {head_dim} here")

    def run(**arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return flash_attn_varlen_func(**arguments, fa_version=version)

    return run


@cache
def context_scheduler(head_dim: int, capped: bool = False) -> Callable[..., torch.Tensor] | None:
    """Returns vLLM's `get_scheduler_metadata` if `context_attention` supports its result, or
    None."""
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

    if get_flash_attn_version(head_size=head_dim, requires_softcap=capped) != 3:
        return None
    from vllm.v1.attention.backends.fa_utils import get_scheduler_metadata

    return get_scheduler_metadata


def _schedule(
    query: torch.Tensor, key_cache: torch.Tensor, meta: TreeAttnMetadata, capped: bool, splits: int
) -> torch.Tensor | None:
    """Returns FlashAttention's schedule of the contexts, which the first layer of a step makes for
    all layers of its shape. Without it, every layer launches the kernel that makes it."""
    num_heads, head_dim = query.shape[1:]
    scheduler = context_scheduler(head_dim, capped)
    if scheduler is None:
        return None
    _, page, num_kv_heads, _ = key_cache.shape
    key = (num_heads, num_kv_heads, head_dim, page, query.dtype, capped, splits)
    if key not in meta.schedules:
        meta.schedules[key] = scheduler(
            batch_size=meta.num_trees,
            max_seqlen_q=meta.max_rows,
            max_seqlen_k=max(1, meta.max_context),
            num_heads_q=num_heads,
            num_heads_kv=num_kv_heads,
            headdim=head_dim,
            cache_seqlens=meta.plan[PLAN_CONTEXT],
            qkv_dtype=query.dtype,
            cu_seqlens_q=meta.query_starts,
            page_size=page,
            causal=False,
            has_softcap=capped,
            num_splits=splits,
        )
    return meta.schedules[key]


def tree_attn_flash(
    # [T, Hq, Dh]
    query: torch.Tensor,
    # [num_blocks, block_size, Hkv, Dh], last stride 1
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    # [T, Hq, Dh], written in place
    output: torch.Tensor,
    meta: TreeAttnMetadata,
    scale: float,
    # [M, Hkv, Dh]
    tail_key: torch.Tensor | None = None,
    tail_value: torch.Tensor | None = None,
    *,
    features: AttnFeatures = PLAIN,
    context_splits: int = 0,
) -> None:
    """Tree attention by `cuda_contract`. Trees that are not adjacent (with prompt chunks between
    them, and draft blocks) use only the Triton kernel. `context_splits` overrides FlashAttention's
    choice, for measurements; FA2 supports only 1."""
    prefix = None
    if meta.query_starts is not None and meta.max_rows > 0 and reads_context(features.kind):
        capped = bool(features.soft_cap)
        more: dict[str, Any] = {"softcap": features.soft_cap} if capped else {}
        if context_splits:
            more["num_splits"] = context_splits
        schedule = _schedule(query, key_cache, meta, capped, context_splits)
        if schedule is not None:
            more["scheduler_metadata"] = schedule
        prefix = context_attention(query.shape[2], capped)(
            q=query,
            k=key_cache,
            v=value_cache,
            max_seqlen_q=meta.max_rows,
            cu_seqlens_q=meta.query_starts,
            seqused_k=meta.plan[PLAN_CONTEXT],
            # Also if no tree has a context: otherwise another variant of the tail would need
            # warmup.
            max_seqlen_k=max(1, meta.max_context),
            softmax_scale=scale,
            causal=False,
            block_table=meta.block_table[: meta.num_trees],
            return_softmax_lse=True,
            **more,
        )
    tree_attn_triton(
        query, key_cache, value_cache, output, meta, scale, tail_key, tail_value,
        features=features, prefix=prefix,
    )  # fmt: skip
