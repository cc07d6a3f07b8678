# SPDX-License-Identifier: Apache-2.0
"""The choice among CUDA kernels, and the fallbacks, without a GPU."""

from __future__ import annotations

import logging
import time

import pytest
import torch

from tests.kernels.device_trees import DeviceTrees
from vllm_specplug.kernels import cuda_dispatch
from vllm_specplug.kernels.cuda_dispatch import (
    ChosenKernel,
    KernelShape,
    choose_cuda_kernel,
    describe_cuda,
    self_test_cuda,
    self_test_failure,
    unsupported_by,
)
from vllm_specplug.kernels.cute.config import all_configs
from vllm_specplug.kernels.cute.launch import plan_launches
from vllm_specplug.kernels.reference import tree_attn_cuda_reference

CPU = torch.device("cpu")
SHAPE = KernelShape(head_dim=16, dtype=torch.float32, block_size=16, num_heads=2, num_kv_heads=1)
HOPPER = (9, 0)


@pytest.fixture
def only_reference_fails(monkeypatch):
    """Every kernel but the named ones disagrees."""

    def set_good(*names: str) -> None:
        monkeypatch.setattr(cuda_dispatch, "unsupported_by", lambda *args: None)
        monkeypatch.setattr(
            cuda_dispatch,
            "self_test_failure",
            lambda name, *args: None if name in names else "it differs from the reference",
        )
        monkeypatch.setattr(cuda_dispatch, "load_kernel", lambda name: print)

    return set_good


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("mask", ["tree", "causal", "full"])
def test_reference_matches_branches_run_as_chains(dense, mask):
    problem = DeviceTrees([(0, 0), (40, 20), (3, 66)], dense=dense, mask=mask)
    output = torch.zeros_like(problem.query)
    tree_attn_cuda_reference(
        problem.query,
        problem.key_cache,
        problem.value_cache,
        output,
        problem.metadata(places=1),
        problem.scale,
        **problem.tail,
    )
    for start, rows, expected in zip(problem.starts, problem.rows, problem.expected(), strict=True):
        assert (output[start : start + rows].double() - expected).abs().max() < 1e-5


def test_triton_passes_its_self_test_in_the_interpreter(interpreter):
    assert self_test_failure("triton", SHAPE, CPU) is None


def test_a_kernel_that_is_wrong_or_does_not_load_is_named(monkeypatch):
    monkeypatch.setattr(cuda_dispatch, "load_kernel", lambda name: lambda *args: args[3].zero_())
    assert "differs from the reference" in self_test_failure("triton", SHAPE, CPU)

    def broken(name):
        raise RuntimeError("no kernel image is available\nfor this device")

    monkeypatch.setattr(cuda_dispatch, "load_kernel", broken)
    assert self_test_failure("cute", SHAPE, CPU) == "RuntimeError: no kernel image is available"


@pytest.mark.parametrize("rows", [range(1, 2), range(2, 17), range(65, 258)])
def test_a_variant_that_does_not_load_is_found_at_start(monkeypatch, rows):
    """Kernels have a variant each for roots alone, few and many rows."""

    def attend(*args):
        if args[4].max_rows in rows:
            raise RuntimeError("this variant does not load")
        tree_attn_cuda_reference(*args)

    monkeypatch.setattr(cuda_dispatch, "load_kernel", lambda name: attend)
    assert "does not load" in self_test_failure("cute", SHAPE, CPU)


def test_every_variant_of_the_cute_kernel_takes_part_in_the_self_test(monkeypatch):
    planned = set()

    def attend(query, key_cache, value_cache, output, meta, scale):
        def workspace(*shape):
            return torch.empty(shape), torch.empty(shape[:-1])

        launches = plan_launches(
            query, key_cache, value_cache, output, meta, scale, None, None, 132, workspace
        )
        planned.update(launch.config for launch in launches)
        tree_attn_cuda_reference(query, key_cache, value_cache, output, meta, scale)

    monkeypatch.setattr(cuda_dispatch, "load_kernel", lambda name: attend)
    for head_dim, page in ((64, 16), (128, 64)):
        shape = KernelShape(head_dim, torch.bfloat16, page, num_heads=8, num_kv_heads=2)
        planned.clear()
        assert self_test_failure("cute", shape, CPU) is None
        wanted = {
            config
            for config in all_configs()
            if (config.head_dim, config.dtype) == (head_dim, "bfloat16")
            and getattr(config, "tma", page == 64) == (page == 64)
        }
        assert planned == wanted and len(wanted) == 3


def test_rows_that_a_kernel_leaves_unwritten_fail_the_self_test(monkeypatch):
    monkeypatch.setattr(cuda_dispatch, "load_kernel", lambda name: lambda *args: None)
    assert "nan" in self_test_failure("triton", SHAPE, CPU)


@pytest.fixture
def timed(monkeypatch, tmp_path):
    """Times of kernels in a cache of their own; each taken is noted."""
    monkeypatch.setenv("SPECPLUG_CACHE", str(tmp_path))
    times = {"cute": 30.0, "flash": 20.0, "triton": 50.0}
    taken = []

    def set_times(**changes):
        times.update(changes)
        return taken

    def call_us(run, shape, device):
        taken.append(run)
        if times[run] is None:
            raise torch.OutOfMemoryError("no room")
        return times[run]

    monkeypatch.setattr(cuda_dispatch, "call_us", call_us)
    return set_times


def test_auto_takes_the_fastest_of_those_that_are_right(only_reference_fails, timed, monkeypatch):
    only_reference_fails("cute", "flash", "triton")
    monkeypatch.setattr(cuda_dispatch, "load_kernel", str)
    chosen = choose_cuda_kernel("auto", SHAPE, CPU, HOPPER)
    assert chosen.name == "flash"
    assert "cute 30 us" in chosen.reason and "triton 50 us" in chosen.reason
    # The fastest is passed over where it is wrong.
    only_reference_fails("cute", "triton")
    monkeypatch.setattr(cuda_dispatch, "load_kernel", str)
    timed(flash=1.0)
    assert choose_cuda_kernel("auto", SHAPE, CPU, HOPPER).name == "cute"
    only_reference_fails("triton")
    assert "only one" in choose_cuda_kernel("auto", SHAPE, CPU, HOPPER).reason


def test_times_are_kept_for_the_same_kernels_shape_and_device(timed, monkeypatch):
    monkeypatch.setattr(cuda_dispatch, "load_kernel", str)
    names = ("cute", "triton")
    taken = timed()
    first = cuda_dispatch.kernel_times(names, SHAPE, CPU)
    assert cuda_dispatch.kernel_times(names, SHAPE, CPU) == first and taken == ["cute", "triton"]
    wider = KernelShape(**{**SHAPE.__dict__, "head_dim": 32})
    cuda_dispatch.kernel_times(names, wider, CPU)
    cuda_dispatch.kernel_times(("cute", "flash", "triton"), SHAPE, CPU)
    assert len(taken) == 7
    (kept, *_) = cuda_dispatch._times_path(SHAPE, CPU).parent.iterdir()
    for text in ("{", "[3]", '{"cute": "fast"}'):
        cuda_dispatch._times_path(SHAPE, CPU).write_text(text)
        assert cuda_dispatch.kernel_times(names, SHAPE, CPU) == first
    assert len(taken) == 13 and kept.suffix == ".json"


def test_a_kernel_that_cannot_be_timed_is_not_taken_while_another_can(timed, monkeypatch, caplog):
    monkeypatch.setattr(cuda_dispatch, "load_kernel", str)
    timed(cute=None)
    with caplog.at_level(logging.WARNING):
        assert set(cuda_dispatch.kernel_times(("cute", "triton"), SHAPE, CPU)) == {"triton"}
    assert "cute cannot be timed: no room" in caplog.text
    timed(triton=None)
    assert cuda_dispatch.kernel_times(("cute", "triton"), SHAPE, CPU) == {}


def test_timing_ends_when_its_time_is_up(timed, monkeypatch):
    monkeypatch.setattr(cuda_dispatch, "load_kernel", str)
    monkeypatch.setattr(cuda_dispatch, "TIME_LIMIT_S", -1.0)
    assert cuda_dispatch.kernel_times(("cute", "triton"), SHAPE, CPU) == {}
    assert not list(cuda_dispatch._times_path(SHAPE, CPU).parent.parent.rglob("*.json"))


def test_a_slower_kernel_takes_longer(monkeypatch):
    monkeypatch.setattr(cuda_dispatch, "_TIMED_CALLS", (((20, 3),), ((5, 1),) * 2))
    slept = []

    def slow(*args):
        slept.append(len(args[4].plan[0]))
        time.sleep(0.002)

    assert cuda_dispatch.call_us(slow, SHAPE, CPU) >= 2000
    assert slept == [1] * 23 + [2] * 23


@pytest.mark.parametrize(
    ("requested", "good", "expected"),
    [
        ("cute", ("cute", "triton"), "cute"),
        ("cute", ("triton",), "triton"),
        ("cute", ("flash", "triton"), "flash"),
        ("flash", ("cute", "triton"), "triton"),
        ("triton", ("cute", "triton"), "triton"),
        ("reference", ("cute", "triton", "reference"), "reference"),
    ],
)
def test_the_next_kernel_serves_with_one_warning(
    only_reference_fails, caplog, requested, good, expected
):
    only_reference_fails(*good)
    with caplog.at_level(logging.WARNING):
        assert choose_cuda_kernel(requested, SHAPE, CPU, HOPPER).name == expected
    fell = expected != requested and requested != "auto"
    assert len(caplog.records) == int(fell)


@pytest.mark.parametrize("requested", ["auto", "cute", "triton"])
def test_the_reference_never_serves_unless_asked_for(only_reference_fails, requested):
    """It waits for the host in every layer, and reads a quantised cache as numbers."""
    only_reference_fails("reference")
    with pytest.raises(ValueError, match="tree_kernel='.*triton: it differs.*'reference'"):
        choose_cuda_kernel(requested, SHAPE, CPU, HOPPER)


def test_the_doctor_names_the_kernel_that_would_serve(only_reference_fails, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: HOPPER)
    only_reference_fails("cute", "flash", "triton", "reference")
    monkeypatch.setattr(cuda_dispatch, "kernel_times", lambda *args: {"cute": 9.0, "triton": 8.0})
    described = describe_cuda(CPU)
    assert (described["kernel"], described["isa"]) == ("triton", "sm_90")
    assert described["supported_isas"] == ["cute", "flash", "triton", "reference"]
    assert "cute 9 us, triton 8 us" in described["reason"]
    only_reference_fails("reference")
    described = describe_cuda(CPU)
    assert (described["kernel"], described["supported_isas"]) == ("none", ["reference"])
    assert "finds no kernel" in described["reason"]


def test_the_doctor_says_how_far_the_kernel_is_off(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(RuntimeError, match="finds no kernel.*7.5 is below 8.0"):
        self_test_cuda(CPU)
    monkeypatch.setattr(
        cuda_dispatch,
        "choose_cuda_kernel",
        lambda *args: ChosenKernel("triton", lambda *args: args[3].zero_(), ""),
    )
    with pytest.raises(RuntimeError, match="triton differs from the reference"):
        self_test_cuda(CPU)


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="auto, cute, flash, triton, reference"):
        choose_cuda_kernel("cpp", SHAPE, CPU, HOPPER)


@pytest.mark.parametrize(
    ("change", "capability", "why"),
    [
        ({"head_dim": 100}, HOPPER, "head_dim 100"),
        ({"head_dim": 512}, HOPPER, "head_dim 512"),
        ({"dtype": torch.float64}, HOPPER, "float64"),
        ({"num_heads": 3, "num_kv_heads": 2}, HOPPER, "3 query heads"),
        ({}, (7, 5), "7.5 is below"),
    ],
)
def test_what_triton_does_not_take(change, capability, why):
    shape = KernelShape(**{**SHAPE.__dict__, **change})
    assert why in unsupported_by("triton", shape, capability)
    assert unsupported_by("reference", shape, capability) is None


def test_the_reference_serves_an_old_device_without_a_self_test():
    assert choose_cuda_kernel("reference", SHAPE, CPU, (7, 5)).name == "reference"
