# SPDX-License-Identifier: Apache-2.0
"""Bytes of a quantised cache on CUDA and its layer's scales, from vLLM's layer to the kernel, in
Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("vllm")

from tests.kernels.bound_backend import bound, error
from tests.kernels.device_trees import FP8, FP16, FP32, DeviceTrees
from vllm_specplug.kernels import AttnFeatures, FeatureKind
from vllm_specplug.vllm_attention.gpu import TreeFlashAttentionImpl, TreeTritonAttentionImpl

pytestmark = pytest.mark.usefixtures("interpreter")

CPU = torch.device("cpu")
SPECS = [(0, 3), (37, 6)]


class Layer:
    """vLLM's attention layer over the cache of some trees."""

    def __init__(self, made: DeviceTrees, impl: type, cache_dtype: str = "fp8") -> None:
        features = made.features
        self.kv_cache = made.cache.view(torch.uint8)
        self.num_heads = made.query.shape[1]
        self.dtype, self.kv_cache_dtype = made.dtype, cache_dtype
        self._k_scale, self._v_scale = features.key_scales, features.value_scales
        asks = features.query_scales is not None
        self._q_scale = features.query_scales if asks else torch.tensor(1.0)
        self.query_quant = object() if asks else None
        self.impl = object.__new__(impl)
        vars(self.impl).update(scale=made.scale, kv_cache_dtype=cache_dtype)


@pytest.mark.parametrize("impl", [TreeFlashAttentionImpl, TreeTritonAttentionImpl])
@pytest.mark.parametrize("dtype", [FP32, FP16])
@pytest.mark.parametrize("query", [None, 0.05])
def test_tree_rows_read_bytes_with_the_scales_of_their_layer(
    impl: type, dtype: torch.dtype, query: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    features = AttnFeatures(
        key_scales=torch.tensor(0.37),
        value_scales=torch.tensor(1.3),
        query_scales=None if query is None else torch.tensor(query),
    )
    made = DeviceTrees(SPECS, kv_heads=2, dtype=dtype, features=features)
    layer = Layer(made, impl)
    backend = bound({"a": layer}, monkeypatch)
    assert [s.features.kind for s in backend.samples] == [
        FeatureKind(quantised_cache=True, quantised_query=bool(query))
    ]
    assert backend.dtype == dtype
    limit = 1e-5 if dtype == FP32 else 4e-3
    assert error(made, layer, backend) <= limit
    for name in ("_k_scale", "_v_scale", *(("_q_scale",) if query else ())):
        held = getattr(layer, name)
        # In place, as vLLM writes them.
        value = held.item()
        held.fill_(1.0)
        assert error(made, layer, backend) > 10 * limit, name
        held.fill_(value)
    assert error(made, layer, backend) <= limit


def test_layers_of_one_group_may_keep_the_models_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `kv_cache_dtype_skip_layers` leaves them; accepted paths move in both."""
    features = AttnFeatures(key_scales=torch.tensor(0.37), value_scales=torch.tensor(1.3))
    small = DeviceTrees(SPECS, kv_heads=2, features=features)
    plain = DeviceTrees(SPECS, kv_heads=2)
    layers = {"a": Layer(small, TreeFlashAttentionImpl), "b": Layer(small, TreeFlashAttentionImpl)}
    # Layers whose cache is not quantised have scales as well.
    layers["b"].kv_cache, layers["b"].impl.kv_cache_dtype = plain.cache, "auto"
    backend = bound(layers, monkeypatch)
    assert [(i, parts.keys[0].dtype) for i, parts in backend.groups] == [(0, FP8), (0, FP32)]
    assert error(small, layers["a"], backend) <= 1e-5
    assert error(plain, layers["b"], backend) <= 1e-5
