# SPDX-License-Identifier: Apache-2.0
"""Products of targets, packed, and of draft heads: packed as they are, or rounded to int8."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers import utils
from vllm.platforms.interface import DeviceCapability

from tests.packed_weights import is_packed
from vllm_specplug.kernels.fp8_linear import Fp8Linear
from vllm_specplug.kernels.packed_linear import packs_target
from vllm_specplug.vllm_worker.target import linear
from vllm_specplug.vllm_worker.target.linear import (
    draft_linear,
    int8_linear,
    packed_linear,
    takes_plain_rows,
    target_products,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.float() - exact).norm() / exact.norm())


needs_vnni = pytest.mark.skipif(
    not torch.cpu._is_vnni_supported(), reason="oneDNN's int8 products overflow without VNNI"
)


@needs_vnni
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_rounded_products_are_close(dtype: torch.dtype, has_bias: bool) -> None:
    torch.manual_seed(0)
    weight, bias = (torch.randn(96, 64) * 0.05).to(dtype), torch.randn(96).to(dtype)
    # A row far larger than the others does not cost these their digits.
    weight[3] *= 30
    weight[5] = 0
    multiply = int8_linear(weight, bias if has_bias else None)
    for rows in (1, 2, 17, 130):
        x = torch.randn(rows, 64).to(dtype)
        # An outlier of a row neither.
        x[0] *= 10
        exact = x.float() @ weight.float().T + (bias.float() if has_bias else 0.0)
        found = multiply(x)
        assert found.dtype == dtype and found.shape == exact.shape
        for row in range(rows):
            others = [place for place in range(96) if place != 3]
            assert _error(found[row, others], exact[row, others]) < 0.03
        if not has_bias:
            assert not found[:, 5].any()


@needs_vnni
def test_scales_live_as_long_as_their_product() -> None:
    weight = torch.randn(64, 64)
    multiply = int8_linear(weight.clone(), None)
    gc.collect()
    # Takes the memory that was freed, if any was.
    crowd = [torch.full((64,), torch.nan) for _ in range(500)]
    x = torch.randn(4, 64)
    assert _error(multiply(x), x @ weight.T) < 0.03, len(crowd)


def test_leading_dimensions_stay() -> None:
    multiply = int8_linear(torch.randn(8, 64), None)
    assert multiply(torch.randn(2, 3, 64)).shape == (2, 3, 8)
    assert multiply(torch.randn(6, 128)[:, ::2]).shape == (6, 8)


@pytest.mark.parametrize(
    ("weights", "dtype", "vnni", "is_int8"),
    [
        ("auto", torch.bfloat16, True, True),
        ("auto", torch.float16, True, True),
        ("auto", torch.bfloat16, False, False),
        # What is compared token by token in float32 keeps its drafts exact too.
        ("auto", torch.float32, True, False),
        ("full", torch.bfloat16, True, False),
        ("int8", torch.float32, True, True),
    ],
)
def test_weights_are_rounded_where_that_is_faster(
    weights: linear.DraftWeightsName,
    dtype: torch.dtype,
    vnni: bool,
    is_int8: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: vnni)
    assert draft_linear(weights, dtype) is (int8_linear if is_int8 else packed_linear)


def test_int8_is_refused_where_its_products_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    with pytest.raises(ValueError, match=r"draft_weights='int8'.*with VNNI.*\"auto\""):
        draft_linear("int8", torch.bfloat16)


def on_gpu(monkeypatch: pytest.MonkeyPatch, major: int, minor: int, is_built: bool = True) -> None:
    platform = SimpleNamespace(
        is_cpu=lambda: False, get_device_capability=lambda: DeviceCapability(major, minor)
    )
    monkeypatch.setattr(linear, "current_platform", platform)
    built_for = 90 if is_built else 0
    monkeypatch.setattr(
        linear.ops, "cutlass_scaled_mm_supports_fp8", lambda found: 0 < built_for <= found
    )


def test_fp8_takes_a_gpu_that_multiplies_it_and_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu(monkeypatch, 9, 0)
    product = draft_linear("fp8", torch.bfloat16)(torch.zeros(32, 16).bfloat16(), None)
    assert isinstance(product, Fp8Linear)
    # A matrix of another size stays as it is.
    odd = draft_linear("fp8", torch.bfloat16)(torch.ones(3, 16).bfloat16(), None)
    assert odd(torch.ones(2, 16).bfloat16()).tolist() == [[16.0] * 3] * 2
    assert draft_linear("full", torch.bfloat16) is packed_linear
    assert draft_linear("auto", torch.float16) is packed_linear
    with pytest.raises(ValueError, match=r"draft_weights='fp8'.*bfloat16.*\"auto\""):
        draft_linear("fp8", torch.float16)
    # Where nothing was measured, only a user's wish counts.
    on_gpu(monkeypatch, 10, 0)
    assert draft_linear("auto", torch.bfloat16) is packed_linear
    assert draft_linear("fp8", torch.bfloat16) is not packed_linear
    on_gpu(monkeypatch, 9, 0, is_built=False)
    assert draft_linear("auto", torch.bfloat16) is packed_linear
    with pytest.raises(ValueError, match=r"draft_weights='fp8'.*built for it"):
        draft_linear("fp8", torch.bfloat16)
    on_gpu(monkeypatch, 8, 0)
    assert draft_linear("auto", torch.bfloat16) is packed_linear
    with pytest.raises(ValueError, match=r"draft_weights='fp8'.*capability 9.0"):
        draft_linear("fp8", torch.bfloat16)


@pytest.mark.parametrize(("rows", "is_rounded"), [(2**16, True), (2**16 - 16, False)])
def test_large_matrices_are_in_fp8_by_default(
    rows: int, is_rounded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_gpu(monkeypatch, 9, 0)
    product = draft_linear("auto", torch.bfloat16)(torch.zeros(rows, 128).bfloat16(), None)
    assert isinstance(product, Fp8Linear) == is_rounded


needs_avx2 = pytest.mark.skipif(not packs_target("packed"), reason="this CPU has no AVX2")


def _loaded(weight: torch.Tensor, layer: torch.nn.Module) -> Any:
    """A layer as vLLM leaves it when its weights are loaded."""
    torch.nn.Module.__init__(layer)
    layer.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
    utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    return layer


class _Gate(torch.nn.Module):
    """As layers do that read a weight's dtype."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert next(self.parameters()).dtype == torch.bfloat16
        return self.cpu_linear(x.to(self.weight.dtype), self.weight, None)


@needs_avx2
def test_what_stands_in_for_a_weight_is_as_vllms() -> None:
    weight, x = (torch.randn(64, 32) / 8).bfloat16(), torch.randn(5, 32)
    with target_products("packed"):
        gate = _loaded(weight, _Gate())
    of_vllm = _loaded(weight, torch.nn.Module()).weight
    assert is_packed(gate) and type(gate.weight) is type(of_vllm)
    for name in ("shape", "dtype", "device", "requires_grad"):
        assert getattr(gate.weight, name) == getattr(of_vllm, name), name
    assert _error(gate(x), x @ weight.float().T) < 1e-2


def test_packed_products_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "packs_target", lambda products: False)
    with pytest.raises(ValueError, match=r"target_products='packed'.*AVX2.*\"auto\""):
        target_products("packed")
    with target_products("auto"):
        pass


@pytest.mark.parametrize(
    ("products", "dtype", "quantization", "int4", "takes"),
    [
        ("packed", torch.bfloat16, None, False, True),
        ("vllm", torch.bfloat16, None, True, False),
        # What is exact to plain vLLM stays so.
        ("packed", torch.float32, None, True, False),
        ("packed", torch.bfloat16, "awq", False, False),
        ("packed", torch.bfloat16, "awq", True, True),
    ],
)
def test_plain_rows_are_attended_where_products_are_packed(
    monkeypatch: pytest.MonkeyPatch,
    products: Any,
    dtype: torch.dtype,
    quantization: str | None,
    int4: bool,
    takes: bool,
) -> None:
    monkeypatch.setattr(linear, "packs_target", lambda products: products == "packed")
    monkeypatch.setattr(linear, "has_packed_products", lambda: True)
    monkeypatch.setattr(linear, "has_packed_int4_products", lambda: int4)
    model: Any = SimpleNamespace(dtype=dtype, quantization=quantization)
    assert takes_plain_rows(products, model) == takes
