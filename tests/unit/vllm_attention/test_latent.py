# SPDX-License-Identifier: Apache-2.0
"""Layers with multi-head latent attention: which are served."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.layers.fused_moe import MoERunner
from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper
from vllm.v1.attention.backends.mla.amx_mla import AMXMLABackend
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl

from vllm_specplug.vllm_attention.latent import TreeCPUMLABackend, TreeCPUMLAImpl
from vllm_specplug.vllm_attention.layer_support import check_target_layers
from vllm_specplug.vllm_worker.target.latent_layers import (
    check_compiled_routing,
    check_latent_rotary,
)

HEADS, NOPE, ROTARY = 3, 8, 4


def bare(cls: type[torch.nn.Module], **attributes: Any) -> Any:
    """A module of vLLM's with these attributes, and nothing built."""
    module = cls.__new__(cls)
    torch.nn.Module.__init__(module)
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def layer(**changed: Any) -> Any:
    attributes = {
        "num_heads": HEADS, "num_kv_heads": 1, "head_size": 576, "indexer": None,
        "sliding_window": None, "use_sparse": False, "non_causal_multi_token_decode": False,
        "attn_backend": TreeCPUMLABackend, "impl": object.__new__(TreeCPUMLAImpl),
    }  # fmt: skip
    return bare(MLAAttention, **{**attributes, **changed})


def test_vllms_cpu_layers_are_served() -> None:
    check_target_layers({"a": layer(), "b": layer()}, "ngram_tree")


@pytest.mark.parametrize(
    ("changed", "feature"),
    [
        ({"impl": object.__new__(CPUMLAImpl)}, "attention backend TreeCPUMLABackend with CPUMLAI"),
        ({"attn_backend": CPUMLABackend}, "by CPUMLABackend.*--attention-backend CPU_MLA"),
        ({"attn_backend": AMXMLABackend}, "by AMXMLABackend.*TRITON_MLA, FLASHMLA.* on CUDA"),
        ({"attn_backend": type("Mine", (TreeCPUMLABackend,), {})}, "attention backend Mine"),
        ({"sliding_window": 64}, "a sliding window"),
        ({"indexer": object()}, "sparse attention, by an index"),
        ({"use_sparse": True}, "sparse attention"),
        ({"non_causal_multi_token_decode": True}, "both directions"),
        ({"num_heads": 5}, r"another latent cache than .a"),
    ],
)
def test_each_feature_is_refused_by_layer_and_name(changed: dict[str, Any], feature: str) -> None:
    with pytest.raises(ValueError, match=f"'ngram_tree' .*layer 'b' has .*{feature}"):
        check_target_layers({"a": layer(), "b": layer(**changed)}, "ngram_tree")


def by_position(positions: torch.Tensor, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(part * positions[:, None, None] for part in parts)


def by_place(positions: torch.Tensor, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
    query, key = by_position(positions, *parts)
    return query * torch.arange(1, len(positions) + 1)[:, None, None], key


@pytest.mark.parametrize("turn", [by_position, by_place])
def test_what_turns_queries_by_their_place_is_refused(turn: Any) -> None:
    class Rotary(torch.nn.Module):
        cos_sin_cache = torch.zeros(1)

        def forward(self, *args: Any) -> Any:
            return turn(*args)

    def wrapper(rotary: Any) -> Any:
        return bare(
            MultiHeadLatentAttentionWrapper, rotary_emb=rotary, mla_attn=layer(), num_heads=HEADS,
            qk_head_dim=NOPE + ROTARY, qk_nope_head_dim=NOPE, qk_rope_head_dim=ROTARY,
        )  # fmt: skip

    # Layers may have none.
    model = torch.nn.ModuleList([wrapper(None), wrapper(Rotary())])
    if turn is by_position:
        check_latent_rotary(model, "ngram_tree")
        return
    with pytest.raises(ValueError, match=r"layer '1' \(Rotary\).*custom_ops.*none"):
        check_latent_rotary(model, "ngram_tree")


def test_layers_outside_of_vllms_wrapper_are_refused() -> None:
    model = torch.nn.ModuleList([bare(torch.nn.Module, attention=layer())])
    with pytest.raises(ValueError, match="layer '0.attention' cannot be tested"):
        check_latent_rotary(model, "ngram_tree")


def test_experts_by_other_scores_than_a_softmax_are_refused_when_compiled() -> None:
    def experts(scoring: str | None, bias: torch.Tensor | None = None) -> Any:
        router = SimpleNamespace(scoring_func=scoring, e_score_correction_bias=bias)
        return bare(MoERunner, router=router)

    known = experts("softmax")
    check_compiled_routing(torch.nn.ModuleList([known]), "ngram_tree")
    others = {
        "'sigmoid' and no bias": experts("sigmoid"),
        "'softmax' and a bias": experts("softmax", torch.zeros(2)),
        "None and no bias": bare(MoERunner, router=object()),
    }
    for named, other in others.items():
        model = torch.nn.ModuleList([known, other])
        with pytest.raises(ValueError, match=f"layer '1' .*={named}.*enforce_eager=True"):
            check_compiled_routing(model, "ngram_tree")
