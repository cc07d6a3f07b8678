# SPDX-License-Identifier: Apache-2.0
"""What the doctor says of kernels on CUDA, without a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from vllm_specplug.kernels import cuda_dispatch, cuda_doctor
from vllm_specplug.kernels.cuda_dispatch import CUDA_KERNELS, KernelFaultError, KernelShape
from vllm_specplug.kernels.cuda_doctor import USUAL_SHAPE, describe_cuda, self_test_cuda

CPU = torch.device("cpu")
SMALL = KernelShape(head_dim=64, dtype=torch.float16, block_size=32, num_heads=9, num_kv_heads=3)


@pytest.fixture
def good(monkeypatch: pytest.MonkeyPatch):
    """Every kernel but the named ones disagrees; the shapes that were asked about."""
    asked: list[KernelShape] = []

    def set_good(*names: str) -> list[KernelShape]:
        def failure(name: str, shape: KernelShape, device: torch.device) -> str | None:
            asked.append(shape)
            return None if name in names else "it differs from the reference"

        monkeypatch.setattr(cuda_dispatch, "unsupported_by", lambda *args: None)
        monkeypatch.setattr(cuda_dispatch, "self_test_failure", failure)
        times = {"cute": 9.0, "triton": 8.0}
        monkeypatch.setattr(cuda_dispatch, "kernel_times", lambda *args: times)
        monkeypatch.setattr(cuda_dispatch, "load_kernel", lambda name: print)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        return asked

    return set_good


def test_a_kernel_that_faults_ends_the_examination(good, monkeypatch) -> None:
    good("cute", "triton")

    def faults(name: str, *rest: object) -> None:
        raise KernelFaultError(f"{name} faulted")

    monkeypatch.setattr(cuda_dispatch, "self_test_failure", faults)
    told = describe_cuda(CPU, SMALL)
    assert told["kernel"] == "none" and told["reason"] == "cute faulted"
    assert list(told["kernels"]) == ["cute"] and not told["supported_isas"]


def test_the_doctor_names_the_kernel_that_would_serve(good) -> None:
    good("cute", "triton", "reference")
    described = describe_cuda(CPU)
    assert (described["kernel"], described["isa"]) == ("triton", "sm_90")
    assert described["supported_isas"] == ["cute", "triton", "reference"]
    assert "cute 9 us, triton 8 us" in described["reason"]
    assert described["kernels"]["cute"] == {"serves": True, "us": 9.0, "why_not": None}
    # Right, but not timed.
    assert described["kernels"]["reference"] == {"serves": True, "us": None, "why_not": None}
    left_out = described["kernels"]["flash"]
    assert left_out["serves"] is False and "differs from the reference" in left_out["why_not"]
    good("reference")
    described = describe_cuda(CPU)
    assert (described["kernel"], described["supported_isas"]) == ("none", ["reference"])
    assert "finds no kernel" in described["reason"]


def test_the_doctor_asks_about_the_shape_that_is_given(good) -> None:
    asked = good("cute", "triton")
    described = describe_cuda(CPU, SMALL)
    # Each kernel once.
    assert asked == [SMALL] * len(CUDA_KERNELS)
    assert described["shape"] == (
        "9 query heads over 3 KV heads of 64, float16, pages of 32 tokens"
    )
    asked.clear()
    assert "32 query heads over 8 KV heads of 128, bfloat16" in describe_cuda(CPU)["shape"]
    assert set(asked) == {USUAL_SHAPE}


def test_the_doctor_says_how_far_the_kernel_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(SMALL, head_dim=16)
    detail = self_test_cuda("reference", CPU, small)
    assert "(reference) agrees with the torch reference (float16" in detail
    monkeypatch.setattr(cuda_doctor, "load_kernel", lambda name: lambda *args: args[3].zero_())
    with pytest.raises(RuntimeError, match="triton differs from the reference"):
        self_test_cuda("triton", CPU, small)


def test_the_doctor_says_why_no_kernel_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    described = describe_cuda(CPU)
    assert described["kernel"] == "none" and "7.5 is below 8.0" in described["reason"]
