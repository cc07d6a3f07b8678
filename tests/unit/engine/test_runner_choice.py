# SPDX-License-Identifier: Apache-2.0
"""Tree methods run in vLLM's V2 model runner, or stop with a reason; plain vLLM chooses as ever."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.unit.engine_config import engine_config
from vllm_specplug.engine import spec_config
from vllm_specplug.engine.model_runner import schedules_ahead

pytestmark = pytest.mark.usefixtures("installed")

TREES = {"method": "ngram_tree"}
WORKERS = {"cpu": "worker_cpu.TreeCPUWorker", "cuda": "worker_gpu.TreeGPUWorker"}


@pytest.fixture(autouse=True)
def _unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)


def with_triton(monkeypatch: pytest.MonkeyPatch, has: bool = True) -> None:
    """As vLLM finds out whether Triton serves the device, on a CPU that of triton-cpu."""
    monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", has)


def ask_for(monkeypatch: pytest.MonkeyPatch, runner: str | None) -> None:
    if runner is not None:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", runner)


def on_device(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Configs as on CUDA: beyond their options, they look at nothing of the device."""
    monkeypatch.setattr(spec_config, "current_device", lambda: device)


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is said of the choice."""
    found: list[str] = []
    monkeypatch.setattr(spec_config.logger, "info", lambda text, *a: found.append(text % a))
    return found


def said(lines: list[str]) -> list[str]:
    return [line for line in lines if "model runner" in line]


@pytest.mark.parametrize("ahead", [None, True, False])
@pytest.mark.parametrize("asked", [None, "1"])
@pytest.mark.parametrize(("device", "triton"), [("cpu", False), ("cpu", True), ("cuda", True)])
def test_trees_take_v2(
    target: Path,
    monkeypatch: pytest.MonkeyPatch,
    lines: list[str],
    device: str,
    triton: bool,
    asked: str | None,
    ahead: bool | None,
) -> None:
    """Scheduled ahead where that is asked for: the config's device stays a CPU."""
    on_device(monkeypatch, device)
    with_triton(monkeypatch, triton)
    ask_for(monkeypatch, asked)
    config = engine_config(target, TREES, async_scheduling=ahead)
    assert config.use_v2_model_runner
    assert config.parallel_config.worker_cls == f"vllm_specplug.vllm_v2.{WORKERS[device]}"
    assert config.scheduler_config.async_scheduling == bool(ahead)
    is_ahead = config.scheduler_config.get_scheduler_cls().__name__ == "AsyncScheduler"
    assert is_ahead == bool(ahead)
    # Where plain vLLM would take V1, one line says so.
    expected = 1 if asked is None and not triton else 0
    assert len(said(lines)) == expected
    assert all("'ngram_tree'" in line and "Plain vLLM uses V1" in line for line in said(lines))


@pytest.mark.parametrize(("device", "triton"), [("cpu", False), ("cpu", True), ("cuda", True)])
def test_v1_that_is_asked_for_stops_the_start(
    target: Path, monkeypatch: pytest.MonkeyPatch, device: str, triton: bool
) -> None:
    on_device(monkeypatch, device)
    with_triton(monkeypatch, triton)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    message = r"VLLM_USE_V2_MODEL_RUNNER=0 .*'ngram_tree', which runs in .*Unset VLLM_USE_V2_MODEL"
    with pytest.raises(ValueError, match=message):
        engine_config(target, TREES)
    assert not engine_config(target, None).use_v2_model_runner


@pytest.mark.parametrize("asked", [None, "1"])
@pytest.mark.parametrize("triton", [False, True])
def test_what_vllms_own_v2_lacks_stops_the_start(
    target: Path, monkeypatch: pytest.MonkeyPatch, triton: bool, asked: str | None
) -> None:
    from vllm.config import VllmConfig

    name = "_get_v2_model_runner_unsupported_features"
    stock = getattr(VllmConfig, name)
    monkeypatch.setattr(VllmConfig, name, lambda self: [*stock(self), "this feature"])
    with_triton(monkeypatch, triton)
    ask_for(monkeypatch, asked)
    with pytest.raises(ValueError, match="'ngram_tree' .*does not support this feature. Leave"):
        engine_config(target, TREES)


@pytest.mark.parametrize(
    ("asked", "triton", "is_v2"),
    [
        (None, False, False),
        (None, True, True),
        ("0", True, False),
        ("1", True, True),
        ("1", False, None),
    ],
)
def test_plain_vllm_keeps_its_own_choice(
    target: Path,
    monkeypatch: pytest.MonkeyPatch,
    lines: list[str],
    asked: str | None,
    triton: bool,
    is_v2: bool | None,
) -> None:
    """Of which V2 needs Triton."""
    with_triton(monkeypatch, triton)
    ask_for(monkeypatch, asked)
    if is_v2 is None:
        with pytest.raises(ValueError, match="Triton"):
            engine_config(target, None)
        return
    assert engine_config(target, None).use_v2_model_runner == is_v2
    assert not lines


@pytest.mark.parametrize("asked", [None, True, False])
@pytest.mark.parametrize("can", [True, False])
def test_on_a_device_steps_are_scheduled_ahead_unless_told_not_to(
    monkeypatch: pytest.MonkeyPatch, asked: bool | None, can: bool
) -> None:
    from vllm.v1.executor.abstract import Executor

    executor = SimpleNamespace(supports_async_scheduling=lambda: can)
    monkeypatch.setattr(Executor, "get_class", lambda config: executor)
    config = SimpleNamespace(
        device_config=SimpleNamespace(device_type="cuda"),
        parallel_config=SimpleNamespace(distributed_executor_backend="slow"),
    )
    if asked and not can:
        with pytest.raises(ValueError, match="async_scheduling=True .*backend='slow'"):
            schedules_ahead(config, asked)
        return
    assert schedules_ahead(config, asked) == (can and asked is not False)


# -- devices -------------------------------------------------------------------------------


def test_trees_fill_the_row_tiles_of_the_device(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 rows with the root on CUDA; a depth or a number that is asked for stays."""
    assert engine_config(target, TREES).speculative_config.num_speculative_tokens == 16
    on_device(monkeypatch, "cuda")
    assert engine_config(target, TREES).speculative_config.num_speculative_tokens == 15
    for given, expected in (({"tree_depth": 20}, 20), ({"num_speculative_tokens": 16}, 16)):
        config = engine_config(target, TREES | given)
        assert config.speculative_config.num_speculative_tokens == expected


def test_a_device_that_does_not_serve_trees_is_named(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spec_config, "WORKERS", {})
    with pytest.raises(ValueError, match="'ngram_tree' does not run on device 'cpu'"):
        engine_config(target, TREES)
