# SPDX-License-Identifier: Apache-2.0
"""Baselines of tree attention on a device.

A baseline is a function of a `problems.Problem` that prepares all inputs that a server has, and
returns the call to time. The call's `output` has the tree rows [M, Hq, Dh] if it computes the same.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from problems import Problem


class Unavailable(Exception):
    """The baseline is not installed here."""


class Call:
    """A call to time and the tensor it fills."""

    def __init__(self, run: Callable[[], None], output: torch.Tensor | None) -> None:
        self.run, self.output = run, output

    def __call__(self) -> None:
        self.run()


def _flash_attention():
    try:
        from vllm.vllm_flash_attn import flash_attn_varlen_func, is_fa_version_supported
    except ImportError as error:
        raise Unavailable(f"vLLM's FlashAttention: {error}") from error
    if not is_fa_version_supported(3):
        raise Unavailable("FlashAttention 3 does not run on this device")
    return flash_attn_varlen_func


def _lengths(problem: Problem) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Returns cu_seqlens_q [R + 1], contexts [R], rows [R] and the largest number of rows."""
    rows = torch.from_numpy(problem.rows).to(problem.device, torch.int32)
    cumulated = torch.zeros(len(rows) + 1, dtype=torch.int32, device=problem.device)
    cumulated[1:] = rows.cumsum(0)
    return cumulated, problem.meta.plan[3, : len(rows)].clone(), rows, int(problem.rows.max())


def fa3_chain(problem: Problem) -> Call:
    """FA3, causal, as vLLM verifies a chain."""
    attend = _flash_attention()
    query = problem.query[problem.tree_rows].contiguous()
    cumulated, contexts, rows, most = _lengths(problem)
    output = torch.empty_like(query)
    used = contexts + rows

    def run() -> None:
        attend(
            query, problem.key_cache, problem.value_cache, max_seqlen_q=most,
            cu_seqlens_q=cumulated, max_seqlen_k=problem.meta.max_context + most, seqused_k=used,
            softmax_scale=problem.scale, causal=True, block_table=problem.block_table, out=output,
            fa_version=3,
        )  # fmt: skip

    return Call(run, output)


def unified_attention_bias(problem: Problem) -> Call:
    """vLLM's Triton attention with a bias among the queries. It has one mask for all requests, here
    that of the first tree, because only its time matters."""
    try:
        from vllm.v1.attention.ops.triton_unified_attention import unified_attention
    except ImportError as error:
        raise Unavailable(f"vLLM's unified attention: {error}") from error
    from vllm_specplug.kernels.masks import ancestor_mask

    query = problem.query[problem.tree_rows].contiguous()
    cumulated, contexts, rows, most = _lengths(problem)
    mask = ancestor_mask(problem.meta.parent_rows[: int(rows[0])])
    bias = torch.zeros(mask.shape, dtype=torch.float32, device=problem.device)
    bias.masked_fill_(~mask, float("-inf"))
    output = torch.empty_like(query)
    used = contexts + rows

    def run() -> None:
        unified_attention(
            q=query, k=problem.key_cache, v=problem.value_cache, out=output,
            cu_seqlens_q=cumulated, max_seqlen_q=most, seqused_k=used,
            max_seqlen_k=problem.meta.max_context + most, softmax_scale=problem.scale, causal=True,
            window_size=(-1, -1), block_table=problem.block_table, softcap=0.0, q_descale=None,
            k_descale=None, v_descale=None, qq_bias=bias,
        )  # fmt: skip

    return Call(run, output if len(rows) == 1 else None)


def flashinfer_mask(problem: Problem) -> Call:
    """FlashInfer's paged prefill with a custom mask of nodes x context."""
    try:
        import flashinfer
    except ImportError as error:
        raise Unavailable(f"FlashInfer: {error}") from error
    from vllm_specplug.kernels.masks import ancestor_mask

    spec = problem.spec
    query = problem.query[problem.tree_rows].contiguous()
    cumulated, contexts, rows, _ = _lengths(problem)
    pages = [-(-int(c + n) // spec.page) for c, n in zip(contexts, rows, strict=True)]
    starts = torch.zeros(len(pages) + 1, dtype=torch.int32, device=problem.device)
    starts[1:] = torch.tensor(pages, device=problem.device).cumsum(0)
    indices = torch.cat([problem.block_table[r, :n] for r, n in enumerate(pages)])
    last = ((contexts + rows - 1) % spec.page + 1).int()
    masks = []
    for r, (context, count) in enumerate(zip(contexts.tolist(), rows.tolist(), strict=True)):
        first = int(cumulated[r])
        mask = torch.ones(count, context + count, dtype=torch.bool, device=problem.device)
        mask[:, context:] = ancestor_mask(problem.meta.parent_rows[first : first + count])
        masks.append(mask.flatten())
    workspace = torch.empty(256 * 2**20, dtype=torch.uint8, device=problem.device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
    wrapper.plan(
        cumulated, starts, indices.int(), last, spec.num_heads, spec.num_kv_heads, spec.head_dim,
        spec.page, custom_mask=torch.cat(masks), q_data_type=spec.dtype, sm_scale=problem.scale,
    )  # fmt: skip
    caches = (problem.key_cache.contiguous(), problem.value_cache.contiguous())
    output = torch.empty_like(query)
    return Call(lambda: wrapper.run(query, caches, out=output), output)


BASELINES: dict[str, Callable[[Problem], Call]] = {
    "fa3 chain": fa3_chain,
    "unified_attention qq_bias": unified_attention_bias,
    "flashinfer custom_mask": flashinfer_mask,
}
