# SPDX-License-Identifier: Apache-2.0
"""When forwards and drafts become graphs, and what vLLM is asked for then."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import vllm.v1.worker.cpu.shm  # noqa: F401  stand-ins for what CPUs lack
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu import model_runner

from vllm_specplug.kernels.cuda_contract import FULL_GRAPHS_VARIABLE
from vllm_specplug.vllm_v2 import device_speculator, worker_gpu
from vllm_specplug.vllm_v2.device_speculator import DeviceSpeculator
from vllm_specplug.vllm_v2.worker_gpu import DeviceRunnerMixin


class _Stock:
    """In place of vLLM's runner: what its manager of graphs is asked for."""

    asked: Any = None

    def initialize_kv_cache(self, config: Any) -> None:
        self.asked = model_runner.ModelCudaGraphManager(varlen_decode=False)


class _Runner(DeviceRunnerMixin, _Stock):  # type: ignore[misc]
    drafter: Any = None


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(model_runner, "ModelCudaGraphManager", lambda **options: options)
    stock = worker_gpu.TreeRunnerV2Mixin
    monkeypatch.setattr(stock, "initialize_kv_cache", _Stock.initialize_kv_cache)
    made: Any = object.__new__(_Runner)
    made.drafter = SimpleNamespace(state_layers=SimpleNamespace(names=[]))
    return made


@pytest.mark.parametrize("wanted", ["0", "1"])
def test_ragged_graphs_where_they_are_wanted(
    runner: Any, monkeypatch: pytest.MonkeyPatch, wanted: str
) -> None:
    monkeypatch.setenv(FULL_GRAPHS_VARIABLE, wanted)
    runner.initialize_kv_cache(None)
    assert runner.asked == {"varlen_decode": wanted == "1"}
    # vLLM is as it was.
    assert model_runner.ModelCudaGraphManager(varlen_decode=False) == {"varlen_decode": False}


def test_recurrent_states_stop_the_start(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FULL_GRAPHS_VARIABLE, "1")
    runner.drafter.state_layers.names = ["layers.0"]
    with pytest.raises(ValueError, match=f"{FULL_GRAPHS_VARIABLE}=1.*recurrent states.*unset it"):
        runner.initialize_kv_cache(None)
    assert runner.asked is None


@pytest.mark.parametrize(
    ("wanted", "mode", "from_graphs", "budget", "depths"),
    [
        ("1", CUDAGraphMode.FULL_AND_PIECEWISE, True, "fixed", [8]),
        ("1", CUDAGraphMode.FULL_DECODE_ONLY, True, "fixed", [8]),
        ("0", CUDAGraphMode.FULL_AND_PIECEWISE, True, "fixed", None),
        ("1", CUDAGraphMode.PIECEWISE, True, "fixed", None),
        ("1", CUDAGraphMode.NONE, True, "fixed", None),
        ("1", CUDAGraphMode.FULL_AND_PIECEWISE, False, "fixed", None),
        ("1", CUDAGraphMode.FULL_AND_PIECEWISE, True, "adaptive", [2, 4, 8]),
        ("1", CUDAGraphMode.FULL_AND_PIECEWISE, True, "adaptive, waited for", None),
        # Whose drafts are always as deep as they may be.
        ("1", CUDAGraphMode.FULL_AND_PIECEWISE, True, "adaptive, one depth", [5]),
    ],
)
def test_drafts_that_become_graphs(
    monkeypatch: pytest.MonkeyPatch,
    wanted: str,
    mode: CUDAGraphMode,
    from_graphs: bool,
    budget: str,
    depths: list[int] | None,
) -> None:
    monkeypatch.setenv(FULL_GRAPHS_VARIABLE, wanted)
    made: list[list[int]] = []
    captured: list[Any] = []
    graphs = SimpleNamespace(capture_drafts=lambda: captured.append(None))
    monkeypatch.setattr(
        device_speculator, "DraftGraphs", lambda *args: made.append(args[-1]) or graphs
    )
    speculator: Any = object.__new__(DeviceSpeculator)
    speculator.vllm_config = speculator.device = None
    speculator.proposer = SimpleNamespace(
        drafter=SimpleNamespace(
            drafts_from_graphs=from_graphs,
            forward_depth=0 if budget == "adaptive, one depth" else 8,
            rehearsed_depth=5,
        ),
        options=SimpleNamespace(tree_width=3),
    )
    speculator.planner = SimpleNamespace(is_adaptive=budget != "fixed")
    speculator.schedules_ahead = budget in ("adaptive", "adaptive, one depth")
    speculator.store = SimpleNamespace(num_nodes=4)
    speculator.init_cudagraph_manager(mode)
    assert made == ([] if depths is None else [depths])
    speculator.capture()
    assert len(captured) == len(made)
