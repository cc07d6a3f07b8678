# SPDX-License-Identifier: Apache-2.0
"""The choice among CUDA kernels, and the fallbacks, without a GPU."""

from __future__ import annotations

import logging
import time
from dataclasses import fields, replace

import pytest
import torch

from tests.kernels.device_trees import DeviceTrees
from tests.pretended_graph import PretendedGraph, pretended_graphs
from vllm_specplug.kernels import FeatureKind, cuda_dispatch
from vllm_specplug.kernels.cuda_dispatch import (
    CUDA_KERNELS,
    ChosenKernel,
    KernelFaultError,
    KernelShape,
    choose_cuda_kernel,
    self_test_failure,
    unsupported_by,
)
from vllm_specplug.kernels.cute.config import all_configs
from vllm_specplug.kernels.cute.launch import Arguments, plan_launches
from vllm_specplug.kernels.features import PLAIN
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
        monkeypatch.setattr(cuda_dispatch, "load_kernel", str)

    return set_good


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("mask", ["tree", "causal", "full"])
def test_reference_matches_branches_run_as_chains(dense, mask):
    problem = DeviceTrees([(0, 0), (40, 20), (3, 66)], dense=dense, mask=mask)
    problem.check(kernel=tree_attn_cuda_reference, skipped=1)


def test_heads_of_several_sizes_are_each_served(interpreter):
    """Gemma 4's: 256 beside windows, 512 without."""
    narrow = replace(SHAPE, head_dim=256, kinds=(FeatureKind(window=20),))
    wide = replace(SHAPE, head_dim=512)
    chosen = {}
    for shape in (narrow, wide):
        assert unsupported_by("triton", shape, HOPPER) is None
        assert self_test_failure("triton", shape, CPU) is None
        kernel = ChosenKernel("triton", cuda_dispatch.load_kernel("triton"), "")
        chosen[shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.block_size] = kernel
    served = cuda_dispatch.by_layer_shape(chosen)
    assert served.names == ("triton",)
    for head_dim in (256, 512):
        DeviceTrees([(40, 9), (3, 2)], head_dim=head_dim).check(kernel=served.run)


QUANTISED = FeatureKind(quantised_cache=True, quantised_query=True)
KINDS = (
    FeatureKind(),
    FeatureKind(window=20, sinks=True),
    FeatureKind(soft_cap=2.0, alibi=True),
    QUANTISED,
)


def test_triton_passes_its_self_test_with_features(interpreter):
    assert self_test_failure("triton", replace(SHAPE, kinds=KINDS), CPU) is None


@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.parametrize("name", [f.name for f in fields(FeatureKind)])
def test_a_feature_that_a_kernel_leaves_out_fails_its_self_test(monkeypatch, kind, name):
    """The control: kernels that would ignore what a layer has."""

    def attend(*args, features=PLAIN):
        plain = [numbers.float() for numbers in args[:3]]
        for i, scale in enumerate(
            (features.query_scales, features.key_scales, features.value_scales)
        ):
            ignored = name == "quantised_query" if i == 0 else name == "quantised_cache"
            plain[i] *= 1.0 if scale is None or ignored else scale
        zero = {"window": 0, "soft_cap": 0.0, "sinks": None, "alibi": None}
        left = {"alibi_slopes" if name == "alibi" else name: zero[name]} if name in zero else {}
        none = dict.fromkeys(("query_scales", "key_scales", "value_scales"))
        tree_attn_cuda_reference(*plain, *args[3:], features=replace(features, **none, **left))

    monkeypatch.setattr(cuda_dispatch, "load_kernel", lambda _: attend)
    failure = self_test_failure("triton", replace(SHAPE, kinds=(kind,)), CPU)
    assert (failure is not None) == bool(getattr(kind, name)), failure


@pytest.mark.parametrize(
    ("name", "kinds", "capability", "why"),
    [
        ("cute", KINDS[:2], HOPPER, None),
        ("cute", KINDS[:2], (8, 0), "compute capability 8.0 is not 9.0"),
        ("cute", KINDS[:3], HOPPER, "layers with a soft cap or ALiBi"),
        ("cute", (*KINDS[:2], QUANTISED), HOPPER, "layers with a quantised cache"),
        ("flash", KINDS[:2], HOPPER, None),
        ("flash", KINDS[1:2], HOPPER, "reads no layer with sliding windows, attention sinks"),
        ("flash", (QUANTISED,), HOPPER, "reads no layer with a quantised cache"),
        ("triton", KINDS, HOPPER, None),
        ("triton", KINDS, (8, 9), None),
        ("triton", KINDS, (8, 0), "a cache of e4m3 on compute capability 8.0"),
        ("triton", KINDS[:3], (8, 0), None),
        ("reference", KINDS, HOPPER, "a quantised cache"),
        ("reference", KINDS[:3], HOPPER, None),
    ],
)
def test_kernels_are_chosen_by_what_layers_have(name, kinds, capability, why):
    shape = replace(SHAPE, head_dim=64, dtype=torch.float16, kinds=kinds)
    problem = unsupported_by(name, shape, capability)
    assert problem is None if why is None else why in problem


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_wide_heads_and_pages_of_hybrid_models_are_served(dtype):
    """Pages of these are large and no power of two."""
    shape = KernelShape(head_dim=256, dtype=dtype, block_size=784, num_heads=16, num_kv_heads=2)
    for capability in (HOPPER, (8, 0)):
        served = {n for n in CUDA_KERNELS if unsupported_by(n, shape, capability) is None}
        assert served == {"flash", "triton", "reference"}


def test_a_kernel_that_is_wrong_or_does_not_load_is_named(monkeypatch):
    monkeypatch.setattr(cuda_dispatch, "load_kernel", lambda name: lambda *args: args[3].zero_())
    assert "differs from the reference" in self_test_failure("triton", SHAPE, CPU)

    def broken(name):
        raise RuntimeError("no kernel image is available\nfor this device")

    monkeypatch.setattr(cuda_dispatch, "load_kernel", broken)
    assert self_test_failure("cute", SHAPE, CPU) == "RuntimeError: no kernel image is available"
    # No other kernel could be tried, so that the start ends, and says how it would not.
    monkeypatch.setattr(cuda_dispatch, "_is_lost", lambda device: True)
    with pytest.raises(ValueError, match=r"'cute' faulted.*again with tree_kernel='triton'"):
        choose_cuda_kernel("cute", replace(SHAPE, head_dim=64, dtype=torch.float16), CPU, HOPPER)
    with pytest.raises(KernelFaultError, match="tree_kernel='reference'"):
        self_test_failure("triton", SHAPE, CPU)


@pytest.mark.parametrize("rows", [range(1, 2), range(2, 17), range(65, 258)])
def test_a_variant_that_does_not_load_is_found_at_start(monkeypatch, rows):
    """Kernels have a variant each for roots alone, few and many rows."""

    def attend(*args):
        if args[4].max_rows in rows:
            raise RuntimeError("this variant does not load")
        tree_attn_cuda_reference(*args)

    monkeypatch.setattr(cuda_dispatch, "load_kernel", lambda name: attend)
    assert "does not load" in self_test_failure("cute", SHAPE, CPU)


@pytest.mark.parametrize("kind", [FeatureKind(), FeatureKind(window=600, sinks=True)])
def test_every_variant_of_the_cute_kernel_takes_part_in_the_self_test(monkeypatch, kind):
    planned = set()

    def attend(query, key_cache, value_cache, output, meta, scale, features=PLAIN):
        def workspace(*shape):
            *shape, trees = shape
            return torch.empty(shape), torch.empty(shape[:-1]), torch.empty(trees, 2)

        arguments = Arguments(query, key_cache, value_cache, output, meta, scale, features=features)
        launches = plan_launches(arguments, 132, workspace)
        planned.update(launch.config for launch in launches)
        tree_attn_cuda_reference(
            query, key_cache, value_cache, output, meta, scale, features=features
        )

    monkeypatch.setattr(cuda_dispatch, "load_kernel", lambda name: attend)
    for head_dim, page in ((64, 16), (128, 64)):
        shape = KernelShape(head_dim, torch.bfloat16, page, 8, 2, kinds=(kind,))
        planned.clear()
        assert self_test_failure("cute", shape, CPU) is None
        wanted = {
            config
            for config in all_configs()
            if (config.head_dim, config.dtype) == (head_dim, "bfloat16")
            and getattr(config, "box", page) == page
            and getattr(config, "window", bool(kind.window)) == bool(kind.window)
        }
        assert planned == wanted and len(wanted) == 3


def test_rows_that_a_kernel_leaves_unwritten_fail_the_self_test(monkeypatch):
    monkeypatch.setattr(cuda_dispatch, "load_kernel", lambda name: lambda *args: None)
    assert "nan" in self_test_failure("triton", SHAPE, CPU)


@pytest.fixture
def timed(monkeypatch):
    """Times of kernels."""
    monkeypatch.setattr(cuda_dispatch, "load_kernel", str)
    times = {"cute": 30.0, "flash": 20.0, "triton": 50.0}

    def call_us(run, use, device):
        if times[run] is None:
            raise torch.OutOfMemoryError("no room")
        return times[run]

    monkeypatch.setattr(cuda_dispatch, "call_us", call_us)
    return lambda **changes: times.update(changes)


def test_auto_takes_the_fastest_of_those_that_are_right(only_reference_fails, timed):
    only_reference_fails("cute", "flash", "triton")
    chosen = choose_cuda_kernel("auto", SHAPE, CPU, HOPPER)
    assert chosen.name == "flash"
    assert "cute 30 us" in chosen.reason and "triton 50 us" in chosen.reason
    # The fastest is passed over where it is wrong.
    only_reference_fails("cute", "triton")
    timed(flash=1.0)
    assert choose_cuda_kernel("auto", SHAPE, CPU, HOPPER).name == "cute"
    only_reference_fails("triton")
    assert "only one" in choose_cuda_kernel("auto", SHAPE, CPU, HOPPER).reason


def test_drafts_are_served_by_a_kernel_that_was_timed_on_blocks(only_reference_fails, timed):
    """FlashAttention's way takes trees of a whole step alone."""
    only_reference_fails("cute", "flash", "triton")
    timed(flash=1.0)
    chosen = choose_cuda_kernel("auto", SHAPE, CPU, HOPPER, for_drafts=True)
    assert chosen.name == "cute" and "flash" not in chosen.reason
    assert choose_cuda_kernel("flash", SHAPE, CPU, HOPPER, for_drafts=True).name == "triton"


USE = cuda_dispatch.KernelUse(SHAPE, for_drafts=False)


def test_calls_that_will_be_replayed_are_timed_in_a_replay(monkeypatch):
    """Else a kernel of more launches looks slow for the host's part in them."""
    calls = []

    def run(query, keys, values, output, *rest, **more):
        calls.append(len(PretendedGraph.captured))
        output.copy_(query)

    monkeypatch.setattr(PretendedGraph, "captured", [])
    monkeypatch.setattr(cuda_dispatch, "_TIMED_CALLS", (((20, 3),), ((5, 1),) * 2))
    with torch.inference_mode(), pretended_graphs(distributed=False):
        before = PretendedGraph.replays
        assert cuda_dispatch.call_us(run, replace(USE, from_graphs=True), CPU) > 0
    cells = len(cuda_dispatch._TIMED_CALLS)
    warm_ups, timed_calls = cuda_dispatch._WARM_UPS, cuda_dispatch._CALLS_TIMED
    assert calls.count(1) == timed_calls + warm_ups * (cells > 1)
    assert len(calls) == cells * (warm_ups + timed_calls)
    assert PretendedGraph.replays - before == 2 * cells
    # By the host where nothing is replayed.
    calls.clear()
    cuda_dispatch.call_us(run, USE, CPU)
    assert len(calls) == cells * (warm_ups + timed_calls)


def test_the_best_time_counts(monkeypatch):
    monkeypatch.setattr(cuda_dispatch, "load_kernel", str)
    times = iter([90.0, 20.0, 30.0, 21.0, 31.0, 500.0])
    monkeypatch.setattr(cuda_dispatch, "call_us", lambda *args: next(times))
    found = cuda_dispatch.kernel_times(("cute", "triton"), USE, CPU)
    assert found == {"cute": 30.0, "triton": 20.0}


def test_a_kernel_that_cannot_be_timed_is_not_taken_while_another_can(timed, caplog):
    timed(cute=None)
    with caplog.at_level(logging.WARNING):
        assert set(cuda_dispatch.kernel_times(("cute", "triton"), USE, CPU)) == {"triton"}
    assert "cute cannot be timed: no room" in caplog.text
    timed(triton=None)
    assert cuda_dispatch.kernel_times(("cute", "triton"), USE, CPU) == {}


def test_timing_ends_when_its_time_is_up(only_reference_fails, timed, monkeypatch):
    only_reference_fails("cute", "triton")
    monkeypatch.setattr(cuda_dispatch, "TIME_LIMIT_S", -1.0)
    chosen = choose_cuda_kernel("auto", SHAPE, CPU, HOPPER)
    assert (chosen.name, chosen.reason) == ("cute", "the first that is right")


def test_a_slower_kernel_takes_longer(monkeypatch):
    monkeypatch.setattr(cuda_dispatch, "_TIMED_CALLS", (((20, 3),), ((5, 1),) * 2))
    slept = []

    def slow(*args):
        slept.append((len(args[4].plan[0]), args[4].query_starts is None, len(args) == 8))
        time.sleep(0.002)

    assert cuda_dispatch.call_us(slow, USE, CPU) >= 2000
    assert slept == [(1, False, False)] * 23 + [(2, False, False)] * 23
    slept.clear()
    cuda_dispatch.call_us(slow, replace(USE, for_drafts=True), CPU)
    assert slept[0] == (1, True, True), "with dense tails"


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


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="auto, cute, flash, triton, reference"):
        choose_cuda_kernel("cpp", SHAPE, CPU, HOPPER)


@pytest.mark.parametrize(
    ("change", "capability", "why"),
    [
        ({"head_dim": 100}, HOPPER, "head_dim 100"),
        ({"head_dim": 520}, HOPPER, "head_dim 520"),
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
