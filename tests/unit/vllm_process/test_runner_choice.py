# SPDX-License-Identifier: Apache-2.0
"""Trees take the model runner that vLLM takes without them, or V1 with a reason, or stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.engine_config import engine_config
from vllm_specplug.drafting.method import Capability
from vllm_specplug.registry import get_method, method_names
from vllm_specplug.vllm_process.spec_config import CAPABILITIES, CAPABILITIES

pytestmark = pytest.mark.usefixtures("installed")

TREES = {"method": "ngram_tree"}
NEEDS = frozenset({Capability.WINDOW})


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    from vllm_specplug.vllm_process import runner_choice

    found: list[str] = []
    monkeypatch.setattr(runner_choice.logger, "warning", lambda text, *a: found.append(text % a))
    return found


@pytest.fixture(autouse=True)
def _unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)


def with_triton(monkeypatch: pytest.MonkeyPatch, has: bool = True) -> None:
    """As vLLM finds out whether Triton serves the device, on a CPU that of triton-cpu."""
    monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", has)


def start(target: Path, spec: dict[str, Any] | None = TREES, **engine: Any) -> Any:
    return engine_config(target, spec, **engine)


def runner_of(config: Any) -> str:
    """Of a tree engine: the worker's and the config's, which must agree."""
    name = "V2" if config.speculative_config.uses_v2 else "V1"
    assert config.use_v2_model_runner == (name == "V2")
    assert f"vllm_{name.lower()}" in config.parallel_config.worker_cls
    return name


@pytest.mark.parametrize(
    ("asked", "has_triton", "expected"),
    [
        (None, False, "V1"),
        (None, True, "V2"),
        ("0", False, "V1"),
        ("0", True, "V1"),
        ("1", True, "V2"),
    ],
)
def test_trees_take_the_runner_of_plain_vllm(
    target: Path,
    monkeypatch: pytest.MonkeyPatch,
    warnings: list[str],
    asked: str | None,
    has_triton: bool,
    expected: str,
) -> None:
    with_triton(monkeypatch, has_triton)
    if asked is not None:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", asked)
    assert runner_of(start(target)) == expected
    assert start(target, None).use_v2_model_runner == (expected == "V2")
    assert warnings == []


def test_v2_that_is_asked_for_needs_no_triton(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_triton(monkeypatch, False)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    assert runner_of(start(target)) == "V2"
    with pytest.raises(ValueError, match="Triton"):
        start(target, None)


def lacking(monkeypatch: pytest.MonkeyPatch, what: str) -> dict[str, Any]:
    """Options of trees that V2 cannot serve while V1 can."""
    from vllm_specplug.vllm_process import spec_config

    if what == "device":
        monkeypatch.setattr(spec_config, "WORKERS", {})
    elif what == "capability":
        monkeypatch.setattr(spec_config, "CAPABILITIES", {"cpu": frozenset()})
        monkeypatch.setattr(spec_config.get_method("ngram_tree").__class__, "needs", _needs())
    else:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        return {**TREES, "tree_kernel": "triton"}
    return TREES


def _needs() -> Any:
    from vllm_specplug.drafting.method import Capability

    return property(lambda self: frozenset({Capability.HIDDEN_STATES}))


LIMITS = {
    "device": "V2 does not serve trees on cpu",
    "capability": "V2 on cpu does not give the method hidden_states",
    "kernel": "V2 has no interpreted kernels",
}


@pytest.mark.parametrize("what", LIMITS)
def test_what_v2_cannot_serve_takes_v1_and_says_why(
    target: Path, monkeypatch: pytest.MonkeyPatch, warnings: list[str], what: str
) -> None:
    with_triton(monkeypatch)
    spec = lacking(monkeypatch, what)
    assert runner_of(start(target, spec)) == "V1"
    assert len(warnings) == 1 and LIMITS[what] in warnings[0]
    assert "VLLM_USE_V2_MODEL_RUNNER=0" in warnings[0]


@pytest.mark.parametrize("what", LIMITS)
def test_v1_that_cannot_do_what_is_asked_for_stops_the_start(
    target: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    with_triton(monkeypatch)
    spec = lacking(monkeypatch, what)
    with pytest.raises(ValueError, match="'ngram_tree' .*async_scheduling=True.* V1 model runner"):
        start(target, spec, async_scheduling=True)


@pytest.mark.parametrize("what", LIMITS)
def test_v2_that_is_asked_for_and_cannot_serve_stops_the_start(
    target: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    spec = lacking(monkeypatch, what)
    with pytest.raises(
        ValueError, match=f"'ngram_tree' .*{LIMITS[what]}.*VLLM_USE_V2_MODEL_RUNNER"
    ):
        start(target, spec)


@pytest.mark.parametrize("asked", [None, "1"])
def test_what_vllms_own_v2_lacks_takes_v1_as_in_plain_vllm(
    target: Path, monkeypatch: pytest.MonkeyPatch, warnings: list[str], asked: str | None
) -> None:
    from vllm.config import VllmConfig

    name = "_get_v2_model_runner_unsupported_features"
    stock = getattr(VllmConfig, name)
    monkeypatch.setattr(VllmConfig, name, lambda self: [*stock(self), "this feature"])
    with_triton(monkeypatch)
    if asked is not None:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", asked)
        with pytest.raises(ValueError, match="does not yet support: this feature"):
            start(target)
        return
    config = start(target)
    assert runner_of(config) == "V1" and not start(target, None).use_v2_model_runner
    # vLLM says so itself.
    assert warnings == []
    config.__post_init__()  # as an engine process does
    assert runner_of(config) == "V1"
    with pytest.raises(ValueError, match="'ngram_tree' .*async_scheduling=True.* V1 model runner"):
        start(target, async_scheduling=True)


@pytest.mark.parametrize("ahead", [None, True, False])
def test_v2_schedules_ahead_on_a_cpu_where_that_is_asked_for(
    target: Path, monkeypatch: pytest.MonkeyPatch, ahead: bool | None
) -> None:
    with_triton(monkeypatch)
    config = start(target, async_scheduling=ahead)
    assert runner_of(config) == "V2"
    assert config.scheduler_config.async_scheduling == bool(ahead)


def test_devices_of_a_method_are_those_of_the_runner_it_would_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm_specplug.vllm_process import spec_config

    nothing: dict[str, Any] = {"cpu": frozenset()}
    monkeypatch.setattr(spec_config, "CAPABILITIES", nothing)
    with_triton(monkeypatch)
    assert spec_config.device_capabilities() == spec_config.CAPABILITIES
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    assert spec_config.device_capabilities() == nothing
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    assert spec_config.device_capabilities() == spec_config.CAPABILITIES


# -- on CUDA -------------------------------------------------------------------------------


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Configs as on CUDA: beyond their options, they look at nothing of the device."""
    monkeypatch.setattr("vllm_specplug.vllm_process.spec_config.current_device", lambda: "cuda")
    with_triton(monkeypatch)


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize("full_graphs", ["0", "1"])
@pytest.mark.parametrize(("asked", "expected"), [(None, "V2"), ("1", "V2"), ("0", "V1")])
def test_cuda_takes_the_runner_that_vllm_takes(
    target: Path,
    monkeypatch: pytest.MonkeyPatch,
    warnings: list[str],
    asked: str | None,
    full_graphs: str,
    expected: str,
) -> None:
    if asked is not None:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", asked)
    # Both have graphs of whole forwards.
    monkeypatch.setenv("SPECPLUG_FULL_CUDA_GRAPHS", full_graphs)
    config = start(target)
    assert runner_of(config) == expected
    name = {"V1": "vllm_v1.worker_gpu.TreeGPUWorker", "V2": "vllm_v2.worker_gpu.TreeGPUWorker"}
    assert config.parallel_config.worker_cls == f"vllm_specplug.{name[expected]}"
    assert not warnings


def test_trees_fill_the_row_tiles_of_the_device(target: Path, request: Any) -> None:
    """16 rows with the root on CUDA; a depth or a number that is asked for stays."""
    asked = {"method": "ngram_tree"}
    assert start(target, spec=asked).speculative_config.num_speculative_tokens == 16
    request.getfixturevalue("on_cuda")
    assert start(target, spec=asked).speculative_config.num_speculative_tokens == 15
    for given, expected in (({"tree_depth": 20}, 20), ({"num_speculative_tokens": 16}, 16)):
        config = start(target, spec=asked | given)
        assert config.speculative_config.num_speculative_tokens == expected


@pytest.mark.usefixtures("on_cuda")
def test_8_bit_caches_take_v2_on_cuda(target: Path, warnings: list[str]) -> None:
    config = start(target, kv_cache_dtype="fp8")
    assert runner_of(config) == "V2"
    config.__post_init__()  # as an engine process does
    assert runner_of(config) == "V2" and not warnings


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize("kinds", [("is_multimodal_model",), ("uses_mrope",), ("is_hybrid",),
                                   ("is_multimodal_model", "uses_mrope", "is_hybrid")])  # fmt: skip
@pytest.mark.parametrize(("asked", "expected"), [(None, "V2"), ("1", "V2"), ("0", "V1")])
def test_targets_of_every_kind_take_the_runner_of_plain_vllm_on_cuda(
    target: Path,
    monkeypatch: pytest.MonkeyPatch,
    warnings: list[str],
    kinds: tuple[str, ...],
    asked: str | None,
    expected: str,
) -> None:
    if asked is not None:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", asked)
    spec = start(target).speculative_config
    for name in kinds:
        monkeypatch.setattr(type(spec.target_model_config), name, True)
    spec.target_parallel_config.worker_cls = "auto"
    spec._claim_worker()
    assert spec.uses_v2 == (expected == "V2")
    assert f"vllm_{expected.lower()}.worker_gpu" in spec.target_parallel_config.worker_cls
    assert not warnings


@pytest.mark.parametrize(
    ("capabilities", "refused"),
    [(CAPABILITIES, {"longspec", "tokenswift"}), (CAPABILITIES, set())],
)
def test_methods_that_cuda_gives_what_they_need(
    capabilities: dict[str, frozenset[Capability]], refused: set[str]
) -> None:
    missing = {name: get_method(name).needs - capabilities["cuda"] for name in method_names()}
    assert {name for name, lacks in missing.items() if lacks} == refused


def test_v1_refuses_what_v2_alone_gives(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it was asked for, and where the rest of the config takes it."""
    from vllm_specplug.vllm_process import spec_config

    monkeypatch.setattr(spec_config, "CAPABILITIES", {"cpu": frozenset()})
    monkeypatch.setattr(spec_config.SpecPlugSpeculativeConfig, "needs", lambda self: NEEDS)
    refusal = r"'ngram_tree' .*V1 model runner on cpu, which does not give it window\. Unset"
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    with pytest.raises(ValueError, match=refusal):
        start(target)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    spec = start(target).speculative_config
    assert spec.uses_v2
    with pytest.raises(ValueError, match=refusal):
        spec.take_v1()
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER")
    assert spec_config.device_capabilities() == {"cpu": frozenset(Capability)}
