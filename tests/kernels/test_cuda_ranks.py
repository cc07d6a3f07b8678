# SPDX-License-Identifier: Apache-2.0
"""Ranks that share a layer choose one kernel, whatever each one's clock says."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from vllm_specplug.kernels import cuda_dispatch
from vllm_specplug.kernels.cuda_dispatch import KernelShape, choose_cuda_kernel

SHAPE = KernelShape(head_dim=64, dtype=torch.float16, block_size=16, num_heads=2, num_kv_heads=1)
CPU, HOPPER = torch.device("cpu"), (9, 0)
# Microseconds of each kernel on each of two ranks; None where it is wrong.
Times = dict[str, tuple[float | None, float | None]]


class Exchange:
    """The largest of each value over `size` threads, which all have to come."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=20)
        self.values: dict[int, list[float]] = {}

    def __call__(self, values: list[float]) -> list[float]:
        self.values[threading.get_ident()] = values
        self.barrier.wait()
        found = [max(each) for each in zip(*self.values.values(), strict=True)]
        self.barrier.wait()
        return found


def choices(
    times: Times, monkeypatch: pytest.MonkeyPatch, *, agree: bool, requested: str = "auto"
) -> list[str]:
    """What two ranks choose, or say when nothing serves."""
    rank = threading.local()

    def failure(name: str, *_: object) -> str | None:
        return "it is wrong" if times.get(name, (None, None))[rank.index] is None else None

    monkeypatch.setattr(cuda_dispatch, "unsupported_by", lambda *args: None)
    monkeypatch.setattr(cuda_dispatch, "self_test_failure", failure)
    monkeypatch.setattr(cuda_dispatch, "load_kernel", str)
    monkeypatch.setattr(cuda_dispatch, "call_us", lambda name, *args: times[name][rank.index])
    exchange = Exchange(2) if agree else list

    def choose(index: int) -> str:
        rank.index = index
        try:
            return choose_cuda_kernel(requested, SHAPE, CPU, HOPPER, False, exchange).name
        except ValueError as error:
            return str(error)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(choose, range(2)))


def test_clocks_that_differ_choose_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    times: Times = {"cute": (10.0, 14.0), "flash": (11.0, 12.0), "triton": (20.0, 11.0)}
    assert choices(times, monkeypatch, agree=False) == ["cute", "triton"]
    # The one whose slowest rank, for which the other one waits, is fastest.
    assert choices(times, monkeypatch, agree=True) == ["flash", "flash"]


@pytest.mark.parametrize("requested", ["auto", "cute"])
def test_a_kernel_that_is_wrong_on_one_rank_serves_on_none(
    monkeypatch: pytest.MonkeyPatch, requested: str
) -> None:
    times: Times = {"cute": (1.0, None), "triton": (20.0, 20.0)}
    assert choices(times, monkeypatch, agree=False, requested=requested) == ["cute", "triton"]
    assert choices(times, monkeypatch, agree=True, requested=requested) == ["triton"] * 2


def test_without_a_common_kernel_all_ranks_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    times: Times = {"cute": (1.0, None), "triton": (None, 20.0)}
    first, second = choices(times, monkeypatch, agree=True)
    assert "cute: another rank" in first and "triton: it is wrong" in first
    assert "cute: it is wrong" in second and "triton: another rank" in second


def test_a_rank_without_time_for_a_kernel_leaves_it_out_on_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times: Times = {"flash": (5.0, 5.0), "triton": (20.0, 20.0)}
    clock = cuda_dispatch.kernel_times

    def cut_short(*args: object) -> dict[str, float]:
        found = clock(*args)
        if threading.current_thread().name.endswith("_1"):
            del found["flash"]
        return found

    monkeypatch.setattr(cuda_dispatch, "kernel_times", cut_short)
    assert choices(times, monkeypatch, agree=True) == ["triton", "triton"]
