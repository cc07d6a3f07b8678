# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin that notes which kernels, in which variant, each test case would launch.

Launches are noted and left out, so that a case takes milliseconds instead of seconds. Results are
then wrong and most cases fail: what is noted until then is a lower bound of what they launch.
`scripts.proof_table` runs it: `pytest -p scripts.proof_recorder`, notes to $SPECPLUG_PROOFS, as
JSON; with --collect-only cases are listed without launches.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

VARIABLE = "SPECPLUG_PROOFS"
OURS = "vllm_specplug.kernels."
# A case that breaks something: what it says, or what it is called.
_RAISES = (
    "raises(AssertionError", "raises((AssertionError", "RaisesExc(AssertionError",
    "raises(CaptureError",
)  # fmt: skip
_NAMES = ("notice", "_is_found", "reach_other_branches")
# Modules without launches of kernels, or whose launches are no proof of their results: listed only.
LISTED = (
    "test_cuda_dispatch", "test_cute_compile", "test_cute_index", "test_cute_launch",
    "test_cute_resources", "test_cute_schedule", "test_fa4_mask", "test_pretended_device",
    "test_proof_table", "test_ptx_machine", "test_sass", "test_start_up_matrix", "test_triton_aot",
    "test_v2_draft_graphs", "test_v2_graphs", "test_warmed_variants",
)  # fmt: skip

Notes = dict[str, dict[str, Any]]


class _LeftOut(AssertionError):
    """What a case would compare with what was not computed."""


def notes_of(items: Iterable[Any]) -> Notes:
    """Of pytest's items, before any launch."""
    notes: Notes = {}
    for item in items:
        source = inspect.getsource(item.function)
        breaks = any(name in item.name for name in _NAMES)
        notes[item.nodeid.partition("@")[0]] = {
            "module": item.path.stem,
            "full": item.get_closest_marker("full") is not None,
            "control": breaks or any(words in source for words in _RAISES),
            "damage": "damage" in source,
            "launches": [],
        }
    return notes


class Recorder:
    """Notes by node id: module, function, tier, controls and launches."""

    def __init__(self) -> None:
        self.notes: Notes = {}
        self.case: dict[str, Any] | None = None

    def launched(self, kernel: str, how: str, variant: list[str]) -> None:
        if self.case is not None and [kernel, how, variant] not in self.case["launches"]:
            self.case["launches"].append([kernel, how, variant])

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> None:
        from hypothesis import Phase, settings

        # An example that fails is not made smaller.
        settings.register_profile("noted", max_examples=1, phases=[Phase.generate], deadline=None)
        settings.load_profile("noted")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        self.notes = notes_of(items)
        items[:] = [item for item in items if item.path.stem not in LISTED]
        if not config.option.collectonly:
            leave_out(self)

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self.case = self.notes[item.nodeid.partition("@")[0]]

    def pytest_runtest_teardown(self) -> None:
        self.case = None

    def pytest_sessionfinish(self) -> None:
        Path(os.environ[VARIABLE]).write_text(json.dumps(self.notes))


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Recorder(), "proof-recorder")


def leave_out(recorder: Recorder) -> None:
    """From here on launches of the package's kernels are noted instead of run."""
    from triton.runtime.interpreter import InterpretedFunction

    from tests.kernels import device_trees, triton_machine

    run = InterpretedFunction.run

    def interpreted(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if not self.fn.__module__.startswith(OURS):
            return run(self, *args, grid=grid, warmup=warmup, **kwargs)
        recorder.launched(kernel_name(self), "interpreted", triton_variant(self, args, kwargs))

    def stepped(self: Any, kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        how = f"sm_{self.arch}"
        recorder.launched(kernel_name(kernel), how, triton_variant(kernel, args, kwargs))
        self.kernels[kernel.fn.__name__] += 1

    InterpretedFunction.run = interpreted
    triton_machine.Stepped.run = stepped
    _check_nothing(device_trees.DeviceTrees)
    with contextlib.suppress(ImportError):
        from tests.kernels import cute_machine

        def run_launches(self: Any, launches: list[Any], timing: Any = None) -> list[Any]:
            merged = len(launches) > 1
            for launch in launches:
                kernel, variant = cute_variant(launch, merged)
                recorder.launched(kernel, "sm_90", variant)
            return []

        cute_machine.HostDevice.run = run_launches
        _check_nothing(cute_machine.MachineTrees)


def _check_nothing(trees: Any) -> None:
    """`check` launches and compares nothing, so that a case comes to its next one."""
    check = trees.check

    def launch(self: Any, **options: Any) -> Counter[str]:
        with contextlib.suppress(AssertionError):
            check(self, **options)
        return Counter()

    def expected(self: Any) -> Any:
        raise _LeftOut

    trees.check, trees.expected = launch, expected


def kernel_name(kernel: Any) -> str:
    return kernel.fn.__name__.strip("_").removesuffix("_kernel")


def triton_variant(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """What is told apart of a launch of the attention: features, head size and dtype."""
    parameters = inspect.signature(kernel.fn).parameters
    known = {name: value for name, value in kwargs.items() if name in parameters}
    told = inspect.signature(kernel.fn).bind(*args, **known).arguments
    if kernel_name(kernel) != "tree_attn":
        return []
    has = {
        "window": told["WINDOW"],
        "soft cap": told["SOFT_CAP"],
        "sinks": told["sinks"] is not None,
        "slopes": told["alibi_slopes"] is not None,
        "8-bit cache": told["key_scale"] is not None and not told["SCALE_TOKEN"],
        "8-bit query": told["query_scale"] is not None,
        "scales of each token": told["SCALE_TOKEN"],
        "dense tail": told["DENSE_TAIL"],
        "full mask": told["FULL_TAIL"],
        "behind FlashAttention": told["HAS_PREFIX"],
        "parts": told["SPLIT"],
    }
    # Of the products, to which narrower queries and caches are widened.
    dtype = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[str(told["COMPUTE"])]
    return [*(name for name, there in has.items() if there), dtype, f"Dh {told['HEAD_DIM']}"]


def cute_variant(launch: Any, merged: bool) -> tuple[str, list[str]]:
    """Kernel and what is told apart of it."""
    from vllm_specplug.kernels.cute.launch_params import FORWARD_PARAMETERS

    config = launch.config
    shape = [config.dtype, f"Dh {config.head_dim}"]
    if not hasattr(config, "box"):
        return "cute merge", shape
    names = [name for name, _ in FORWARD_PARAMETERS]
    told = dict(zip(names, launch.arguments[-len(names) :], strict=True))
    scheme = f"{config.tile_m} rows" + ", specialised" * config.specialised
    has = {
        "window": config.window,
        "soft cap": config.soft_cap,
        "sinks": told["sinks"],
        "slopes": config.alibi,
        "dense tail": told["dense"],
        "full mask": told["full"],
        "parts": merged,
    }
    features = [name for name, there in has.items() if there]
    return "cute", [*features, scheme, f"boxes of {config.box}", *shape]
