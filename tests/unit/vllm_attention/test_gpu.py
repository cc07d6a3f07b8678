# SPDX-License-Identifier: Apache-2.0
"""vLLM's attention backends of GPUs: what hands tree rows over, and which is taken."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from vllm_specplug.kernels.cuda_contract import FULL_GRAPHS_VARIABLE
from vllm_specplug.seams.listing_attention import ATTENTION_BACKENDS
from vllm_specplug.vllm_attention.gpu import TreeFlashAttentionBackend, TreeTritonAttentionBackend
from vllm_specplug.vllm_attention.tree_rows import TreeAttentionMixin
from vllm_specplug.vllm_worker.target.attention_backend import claim_attention_backend


@pytest.mark.parametrize("backend_class", [TreeFlashAttentionBackend, TreeTritonAttentionBackend])
def test_attention_backends_hand_tree_rows_over_and_stay_out_of_full_graphs(
    backend_class, monkeypatch
):
    assert issubclass(backend_class.get_impl_cls(), TreeAttentionMixin)
    monkeypatch.delenv(FULL_GRAPHS_VARIABLE, raising=False)
    builder = backend_class.get_builder_cls()
    assert builder.get_cudagraph_support(None, None).name == "NEVER"
    monkeypatch.setenv(FULL_GRAPHS_VARIABLE, "1")
    assert builder.get_cudagraph_support(None, None).name == "UNIFORM_BATCH"


@pytest.mark.parametrize(
    ("cache_dtype", "dtype", "token_bytes"),
    [
        ("fp8", torch.uint8, 128),
        ("int8_per_token_head", torch.int8, 136),
        ("fp8_per_token_head", torch.uint8, 136),
    ],
)
def test_draft_layers_share_a_group_with_a_quantised_target(cache_dtype, dtype, token_bytes):
    """Their caches keep the model's dtype, so that drafts are not quantised, and the target's
    pages are no larger for it."""
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
    from vllm.v1.kv_cache_interface import FullAttentionSpec, get_kv_quant_mode

    sizes = {"block_size": 16, "num_kv_heads": 2, "head_size": 64}
    spec = FullAttentionSpec(**sizes, dtype=dtype, kv_quant_mode=get_kv_quant_mode(cache_dtype))
    specs = {f"t{i}": TreeTritonAttentionBackend.customize_spec(spec) for i in range(3)}
    specs["draft"] = FullAttentionSpec(**sizes, dtype=torch.bfloat16)
    (group,) = get_kv_cache_groups(VllmConfig(), specs)
    assert sorted(group.layer_names) == sorted(specs)
    held = group.kv_cache_spec.kv_cache_specs
    assert (held["t0"].dtype, held["draft"].dtype) == (dtype, torch.bfloat16)
    assert held["t0"].page_size_bytes == 16 * 2 * token_bytes


def config_of(backend, dtype, cache_dtype):
    return SimpleNamespace(
        attention_config=SimpleNamespace(backend=backend),
        model_config=SimpleNamespace(dtype=dtype, use_mla=False),
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
    )


@pytest.mark.parametrize(
    ("dtype", "cache_dtype", "expected"),
    [
        (torch.bfloat16, "auto", "FLASH_ATTN"),
        (torch.bfloat16, "fp8", "FLASH_ATTN"),
        (torch.bfloat16, "int8_per_token_head", "TRITON_ATTN"),
        (torch.bfloat16, "fp8_per_token_head", "TRITON_ATTN"),
        (torch.float32, "auto", "TRITON_ATTN"),
    ],
)
def test_the_attention_backend_taken_has_the_numbers(dtype, cache_dtype, expected):
    """FlashAttention has no float32 and no scales of each token; vLLM would refuse to start."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    config = config_of(None, dtype, cache_dtype)
    try:
        claim_attention_backend(config)
        backends = {
            name: AttentionBackendEnum[name].get_path().rpartition(".")[2]
            for name in ("FLASH_ATTN", "TRITON_ATTN")
        }
    finally:
        ATTENTION_BACKENDS.undo()
    assert config.attention_config.backend.name == expected
    tree_classes = (TreeFlashAttentionBackend, TreeTritonAttentionBackend)
    chosen = {c.__name__: c for c in tree_classes}[backends[expected]]

    def serves(backend):
        return backend.supports_dtype(dtype) and backend.supports_kv_cache_dtype(cache_dtype)

    if cache_dtype != "fp8":  # which FlashAttention has on some devices
        assert serves(chosen)
        assert serves(TreeFlashAttentionBackend) == (expected == "FLASH_ATTN")


@pytest.mark.parametrize("cache_dtype", ["int8_per_token_head", "fp8_per_token_head"])
def test_flash_attention_is_refused_over_scales_of_each_token(cache_dtype):
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    config = config_of(AttentionBackendEnum.FLASH_ATTN, torch.bfloat16, cache_dtype)
    message = f"FLASH_ATTN cannot .* over kv_cache_dtype='{cache_dtype}'. Use TRITON_ATTN, or leave"
    with pytest.raises(ValueError, match=message):
        claim_attention_backend(config)
