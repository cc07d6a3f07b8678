# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet layers of a CPU as they are on CUDA, for engines in Triton's interpreter. On a GPU
the rule over prompts alone is another one.

To be imported after `cuda_device`. vLLM's core of devices runs over its layout of states. Its
kernels of single rows and of gates are interpreted; the convolutions are those that vLLM has for
CPUs, and the rule over prompts, which takes no float32, is done here token by token. All of it is
the same with and without trees.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl

from tests.e2e.cuda.cuda_device import ON_GPU
from vllm_specplug.engine import engine_args


@triton.jit
def _exp(x: Any) -> Any:
    return tl.exp(x)


def use_device_core() -> None:
    """For all engines that this process builds from here on."""
    import vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn as stock

    stock.fla_chunk_gated_delta_rule = _chunk
    if ON_GPU:
        return
    from vllm.third_party.flash_linear_attention.ops import fused_recurrent

    engine_args.STATE_DTYPES.append("float32")
    layer: Any = stock.QwenGatedDeltaNetAttention
    layer.forward_cpu = layer.forward_cuda
    kernels: ModuleType = fused_recurrent
    # Triton's own has no interpreter outside of kernels, and this is an alias of it.
    kernels.exp = _exp  # type: ignore[attr-defined]


def _chunk(
    *, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
    initial_state: torch.Tensor, output_final_state: bool, cu_seqlens: torch.Tensor,
    use_qk_l2norm_in_kernel: bool, core_attn_out: torch.Tensor | None, **chunks: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Of one packed batch; states are [N, Hv, V, K]."""
    assert output_final_state and not use_qk_l2norm_in_kernel and core_attn_out is None
    assert len(chunks["chunk_indices"]) and len(chunks["chunk_offsets"])
    group = v.shape[2] // k.shape[2]
    queries, keys = (x[0].repeat_interleave(group, 1) for x in (q, k))
    output, states = torch.empty_like(v), initial_state.clone()
    starts = cu_seqlens.tolist()
    for i, state in enumerate(states):
        for t in range(starts[i], starts[i + 1]):
            state *= g[0, t].exp()[:, None, None]
            read = torch.einsum("hk,hvk->hv", keys[t], state)
            added = beta[0, t, :, None] * (v[0, t] - read)
            state += added[:, :, None] * keys[t, :, None]
            output[0, t] = torch.einsum("hk,hvk->hv", queries[t], state) * q.shape[-1] ** -0.5
    return output, states
