# SPDX-License-Identifier: Apache-2.0
"""Random targets of attention and Gated DeltaNet layers, and vLLM's CPU kernels in float32.

vLLM's own take bfloat16 alone, where a tree and a chain differ by rounding as much as two batches
do. Here the operators that have no float32 do in torch what they do, token by token; everything
around them, states and convolutions included, is vLLM's.
"""

from __future__ import annotations

import inspect
import tempfile
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.e2e.tiny import make_tokenizer
from tests.e2e.vision import END, IMAGE, PATCH, START, VIDEO, VOCAB

NORM_EPS = 1e-5
# Of Qwen3.5's text models, whose config has it with and without a vision tower.
ROPE_ON_AXES = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0,
                "mrope_section": [4, 6, 6], "mrope_interleaved": True}  # fmt: skip


def make_hybrid_target(
    folder: Path,
    family: str,
    vocab_size: int,
    *,
    size: int = 32,
    wrapper: dict[str, Any] | None = None,
    **config: Any,
) -> Path:
    """A float32 target whose states matter: they fade slowly, and what they hold is large.

    Args:
        family: of transformers, such as "Qwen3Next" or "Qwen3_5Text".
        size: of keys and values of a state.
        wrapper: fields of the config around the text model's, of a multimodal family.
    """
    import transformers

    torch.manual_seed(0)
    text = {
        "vocab_size": vocab_size, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
        "max_position_embeddings": 256, "linear_num_value_heads": 4,
        "linear_num_key_heads": 2, "linear_key_head_dim": size, "linear_value_head_dim": size,
        "linear_conv_kernel_dim": 4, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
        "tie_word_embeddings": False, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, **config,
    }  # fmt: skip
    make_config = getattr(transformers, f"{family}Config")
    if wrapper is None:
        model = transformers.AutoModelForCausalLM.from_config(make_config(**text)).float()
    else:
        make_model = getattr(transformers, f"{family}ForConditionalGeneration")
        model = make_model(make_config(text_config=text, **wrapper)).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(-4.0, -2.0)
            elif name.endswith("dt_bias"):
                parameter.uniform_(-1.0, 1.0)
            elif "conv1d" in name:
                parameter.normal_(std=0.6)
            elif name.endswith("out_proj.weight"):
                parameter.mul_(20.0)
            elif parameter.dim() >= 2:
                parameter.mul_(4.0)
    model.save_pretrained(folder)
    return folder


@cache
def wrapped_hybrid(family: str, size: int = 32) -> str:
    """`make_hybrid_target` of a multimodal family, with a vision tower."""
    folder = Path(tempfile.mkdtemp(prefix="specplug-hybrid-")) / family
    tower = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2,
             "out_hidden_size": 64, "patch_size": PATCH,
             "num_position_embeddings": 64}  # fmt: skip
    wrapper = {"vision_config": tower, "image_token_id": IMAGE, "video_token_id": VIDEO,
               "vision_start_token_id": START, "vision_end_token_id": END,
               "tie_word_embeddings": False}  # fmt: skip
    make_hybrid_target(
        folder, family, VOCAB, size=size, wrapper=wrapper, rope_parameters=ROPE_ON_AXES
    )
    assert make_tokenizer(folder) <= VOCAB
    return str(folder)


@cache
def use_float32_states() -> None:
    """For all engines that this process builds from here on."""
    import vllm.model_executor.layers.mamba.ops.cpu.gdn_attention as stock

    from vllm_specplug.engine import engine_args

    engine_args.STATE_DTYPES.append("float32")

    # Weights of convolutions are packed for the C++ one in bfloat16 alone.
    for function, stated, instead in (
        (stock.cpu_gdn_attention_core, "mixed_qkv.dtype == torch.bfloat16", "True"),
        (stock._cpu_gdn_attention_nonspec, "torch.cpu._is_avx512_bf16_supported()", "False"),
    ):
        source = inspect.getsource(function)
        assert stated in source
        exec("from __future__ import annotations\n" + source.replace(stated, instead), vars(stock))
    own = {
        "fused_gdn_gating_cpu": _gates,
        "fused_sigmoid_gating_delta_rule_update_cpu": _update,
        "chunk_gated_delta_rule_cpu": _chunk,
    }
    stock.ops = SimpleNamespace(**{**vars(stock.ops), **own})


def _gates(
    A_log: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    g = -A_log.exp() * torch.nn.functional.softplus(a + dt_bias)
    return g[None], b.sigmoid()[None]


def _update(
    *, A_log: torch.Tensor, dt_bias: torch.Tensor, q: torch.Tensor, k: torch.Tensor,
    v: torch.Tensor, a: torch.Tensor, b: torch.Tensor, initial_state_source: torch.Tensor,
    initial_state_indices: torch.Tensor, cu_seqlens: torch.Tensor, use_qk_l2norm_in_kernel: bool,
) -> torch.Tensor:  # fmt: skip
    g, beta = _gates(A_log, a, b, dt_bias)
    output, _ = _chunk(
        query=q, key=k, value=v, g=g, beta=beta, initial_state=initial_state_source,
        output_final_state=True, cu_seqlens=cu_seqlens, head_first=False,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        initial_state_indices=initial_state_indices,
    )  # fmt: skip
    return output[0][:, None]


def _chunk(
    *, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: torch.Tensor,
    beta: torch.Tensor, initial_state: torch.Tensor, output_final_state: bool,
    cu_seqlens: torch.Tensor, head_first: bool, use_qk_l2norm_in_kernel: bool,
    initial_state_indices: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    assert use_qk_l2norm_in_kernel and output_final_state and not head_first
    group = value.shape[2] // key.shape[2]
    q, k = (
        (x[0] / (x[0].square().sum(-1, keepdim=True) + NORM_EPS).sqrt()).repeat_interleave(group, 1)
        for x in (query, key)
    )
    output, starts = torch.empty_like(value), cu_seqlens.tolist()
    for i, slot in enumerate(initial_state_indices.tolist()):
        state = initial_state[slot].clone()
        for t in range(starts[i], starts[i + 1]):
            state = state * g[0, t].exp()[:, None, None]
            read = torch.einsum("hk,hkv->hv", k[t], state)
            state = state + k[t, :, :, None] * (beta[0, t, :, None] * (value[0, t] - read))[:, None]
            output[0, t] = torch.einsum("hk,hkv->hv", q[t], state) * q.shape[-1] ** -0.5
        initial_state[slot] = state
    return output, initial_state
