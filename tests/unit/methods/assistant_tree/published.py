# SPDX-License-Identifier: Apache-2.0
"""Configs of published assistants, as public code repeats them, and the shapes of their tensors."""

from __future__ import annotations

from typing import Any

import torch

_TEXT: dict[str, Any] = {
    "attention_bias": False, "attention_dropout": 0.0, "dtype": "bfloat16",
    "enable_moe_block": False, "final_logit_softcapping": None, "global_head_dim": 512,
    "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"], "model_type": "gemma4_text",
    "num_hidden_layers": 4, "num_kv_shared_layers": 4, "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "full_attention": {
            "partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional",
        },
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "tie_word_embeddings": True, "use_bidirectional_attention": None, "use_double_wide_mlp": False,
    "vocab_size": 262144, "vocab_size_per_layer_input": 0,
}  # fmt: skip


def _config(target_size: int, grouped: bool, **text: Any) -> dict[str, Any]:
    return {
        "architectures": ["Gemma4AssistantForCausalLM"], "model_type": "gemma4_assistant",
        "backbone_hidden_size": target_size, "centroid_intermediate_top_k": 32,
        "dtype": "bfloat16", "num_centroids": 2048, "tie_word_embeddings": True,
        "use_ordered_embeddings": grouped, "text_config": {**_TEXT, **text},
    }  # fmt: skip


def _small(target_size: int, kv_heads: int) -> dict[str, Any]:
    return _config(
        target_size, True, attention_k_eq_v=False, hidden_size=256,
        intermediate_size=2048, max_position_embeddings=131072, num_attention_heads=4,
        num_global_key_value_heads=None, num_key_value_heads=kv_heads, sliding_window=512,
    )  # fmt: skip


def _large(target_size: int, heads: int, kv_heads: int, global_kv_heads: int) -> dict[str, Any]:
    return _config(
        target_size, False, attention_k_eq_v=True, hidden_size=1024, intermediate_size=8192,
        max_position_embeddings=262144, num_attention_heads=heads, num_key_value_heads=kv_heads,
        num_global_key_value_heads=global_kv_heads, sliding_window=1024,
    )  # fmt: skip


GEMMA4_E2B = _small(1536, 1)
GEMMA4_E4B = _small(2560, 2)
GEMMA4_12B = _large(3840, 16, 8, 1) | {
    "architectures": ["Gemma4UnifiedAssistantForCausalLM"],
    "model_type": "gemma4_unified_assistant",
}
GEMMA4_26B_A4B = _large(2816, 16, 8, 2)
GEMMA4_31B = _large(5376, 32, 16, 4)
ALL = {name: value for name, value in vars().copy().items() if name.startswith("GEMMA4_")}


def small(raw: dict[str, Any]) -> dict[str, Any]:
    """A config in small, with as many heads."""
    text = {
        **raw["text_config"], "hidden_size": 16, "intermediate_size": 24, "head_dim": 8,
        "global_head_dim": 16, "vocab_size": 64,
    }  # fmt: skip
    more = {"num_centroids": 16, "centroid_intermediate_top_k": 4}
    return {**raw, **more, "backbone_hidden_size": 12, "text_config": text}


def target_of(raw: dict[str, Any]) -> dict[str, Any]:
    """Sizes of a target for an assistant."""
    text = raw["text_config"]
    sizes = {name: text[name] for name in ("vocab_size", "sliding_window")}
    return {**sizes, "hidden_size": raw["backbone_hidden_size"]}


def shapes_of(raw: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of an assistant's weights by their published names."""
    text, outer = raw["text_config"], raw["backbone_hidden_size"]
    hidden, width, vocab = (
        text[name] for name in ("hidden_size", "intermediate_size", "vocab_size")
    )
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,),
        "pre_projection.weight": (hidden, 2 * outer), "post_projection.weight": (outer, hidden),
    }  # fmt: skip
    for i, kind in enumerate(text["layer_types"]):
        dim = text["head_dim" if kind == "sliding_attention" else "global_head_dim"]
        heads = text["num_attention_heads"] * dim
        own = {
            "self_attn.q_proj.weight": (heads, hidden), "self_attn.q_norm.weight": (dim,),
            "self_attn.o_proj.weight": (hidden, heads), "layer_scalar": (1,),
            "mlp.gate_proj.weight": (width, hidden), "mlp.up_proj.weight": (width, hidden),
            "mlp.down_proj.weight": (hidden, width),
            **{
                f"{name}_layernorm.weight": (hidden,)
                for name in (
                    "input", "post_attention", "pre_feedforward", "post_feedforward",
                )
            },
        }  # fmt: skip
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in own.items()}
    if raw["use_ordered_embeddings"]:
        shapes["masked_embedding.centroids.weight"] = (raw["num_centroids"], hidden)
    return shapes


def tensors_of(raw: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Random tensors of an assistant."""
    tensors = {name: torch.randn(shape) for name, shape in shapes_of(raw).items()}
    if raw["use_ordered_embeddings"]:
        vocab = raw["text_config"]["vocab_size"]
        tensors["masked_embedding.token_ordering"] = torch.randperm(vocab)
    return tensors
