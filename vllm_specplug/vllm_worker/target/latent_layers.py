# SPDX-License-Identifier: Apache-2.0
"""Checks of targets with multi-head latent attention.

Seams: latent_rotary, compiled_routing.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.layers.fused_moe import MoERunner
from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper

_POSITIONS = (5, 17, 3, 11)
_MAX_DIFFERENCE = 1e-2


def check_latent_rotary(model: torch.nn.Module, method: str) -> None:
    """Refuses a target whose rotary embedding rotates a row's query by its index in the batch, and
    layers whose rotary embedding cannot be found.

    Raises:
        ValueError: naming the first such layer and what to do.
    """
    known: set[int] = set()
    found = {id(m.mla_attn) for m in model.modules()
             if isinstance(m, MultiHeadLatentAttentionWrapper)}  # fmt: skip
    for name, module in model.named_modules():
        if isinstance(module, MLAAttention) and id(module) not in found:
            raise ValueError(
                f"Speculative method {method!r} cannot verify trees in this target: the rotary "
                f"embedding of latent attention layer {name!r} cannot be tested, as it is not in "
                "vLLM's MultiHeadLatentAttentionWrapper. Use another target, or a chain method of "
                "vLLM's own."
            )
    for name, module in model.named_modules():
        if not isinstance(module, MultiHeadLatentAttentionWrapper) or module.rotary_emb is None:
            continue
        rotary = module.rotary_emb
        # Layers with equal embeddings share one object.
        if id(rotary) in known:
            continue
        known.add(id(rotary))
        if not _rotates_by_position(rotary, module):
            raise ValueError(
                f"Speculative method {method!r} cannot verify trees in this target: the rotary "
                f"embedding of layer {name!r} ({type(rotary).__name__}) is run by vLLM's CPU "
                "operator, which rotates the queries of latent attention by their index in the "
                "batch, so that plain answers differ between a batch and a single request. Switch "
                'vLLM\'s operators off: compilation_config={"custom_ops": ["none"]}.'
            )


def check_compiled_routing(model: torch.nn.Module, method: str) -> None:
    """Refuses, for a compiled engine, a target whose experts are not chosen by a softmax without a
    bias. With a sigmoid and a bias, torch's compiler moves the router before the product that it
    reads. It then chooses experts by stale memory, with and without drafts.

    Raises:
        ValueError: naming the first such layer and what to do.
    """
    for name, module in model.named_modules():
        if not isinstance(module, MoERunner):
            continue
        scoring = getattr(module.router, "scoring_func", None)
        bias = getattr(module.router, "e_score_correction_bias", None)
        if scoring != "softmax" or bias is not None:
            raise ValueError(
                f"Speculative method {method!r} cannot verify trees in this target in a compiled "
                f"engine: the experts of layer {name!r} are chosen with scoring_func={scoring!r} "
                f"and {'no' if bias is None else 'a'} bias. Compiled for a CPU, plain answers "
                "differ from run to run with a sigmoid and a bias; only a softmax without a bias "
                "is served. Set enforce_eager=True (--enforce-eager)."
            )


@torch.inference_mode()
def _rotates_by_position(rotary: Any, module: Any) -> bool:
    """Returns whether the layer's queries and keys are rotated in the same way in any batch."""
    count, heads = len(_POSITIONS), module.num_heads
    dtype = rotary.cos_sin_cache.dtype
    generator = torch.Generator().manual_seed(0)
    # Values that every dtype represents, in queries whose rotary part is a view.
    query = torch.randn(count, heads, module.qk_head_dim, generator=generator).to(dtype)
    key = torch.randn(count, 1, module.qk_rope_head_dim, generator=generator).to(dtype)
    positions = torch.tensor(_POSITIONS)

    def rotated(rows: slice) -> torch.Tensor:
        part = query[rows].clone()[..., module.qk_nope_head_dim :]
        return torch.cat(rotary(positions[rows], part, key[rows].clone()), dim=1).float()

    one_by_one = torch.cat([rotated(slice(i, i + 1)) for i in range(count)])
    return bool((rotated(slice(None)) - one_by_one).abs().max() < _MAX_DIFFERENCE)
