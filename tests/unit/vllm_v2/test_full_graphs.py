# SPDX-License-Identifier: Apache-2.0
"""When forwards and drafts become graphs, and what vLLM is asked for then."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import vllm.v1.worker.cpu.shm  # noqa: F401  stand-ins for what CPUs lack
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager

from vllm_specplug.kernels.cuda_contract import FULL_GRAPHS_VARIABLE
from vllm_specplug.vllm_attention.full_graphs import wants_full_graphs
from vllm_specplug.vllm_v2 import device_speculator, worker_gpu
from vllm_specplug.vllm_v2.device_speculator import DeviceSpeculator
from vllm_specplug.vllm_v2.graph_trees import wrap_graph_manager
from vllm_specplug.vllm_v2.worker_gpu import DeviceRunnerMixin


class _Stock:
    """In place of vLLM's runner: what its manager of graphs is asked for."""

    asked: Any = None

    def initialize_kv_cache(self, config: Any) -> None:
        self.asked = model_runner.ModelCudaGraphManager(varlen_decode=False).asked


class _Runner(DeviceRunnerMixin, _Stock):  # type: ignore[misc]
    drafter: Any = None


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(
        model_runner,
        "ModelCudaGraphManager",
        lambda **asked: SimpleNamespace(asked=asked, _candidates={}, _capture_descs={}),
    )
    stock = worker_gpu.StageRunnerMixin
    monkeypatch.setattr(stock, "initialize_kv_cache", _Stock.initialize_kv_cache)
    made: Any = object.__new__(_Runner)
    made.drafter = SimpleNamespace(state_layers=SimpleNamespace(names=[]))
    made.vllm_config = None
    return made


def config(**changes: Any) -> Any:
    """An engine whose trees become graphs by default."""
    made = SimpleNamespace(
        speculative_config=SimpleNamespace(tree_kernel="auto"),
        parallel_config=SimpleNamespace(world_size=1, data_parallel_size=1),
        model_config=SimpleNamespace(is_hybrid=False, use_mla=False),
        lora_config=None,
    )
    for path, value in changes.items():
        part, _, name = path.partition("__")
        setattr(getattr(made, part) if name else made, name or part, value)
    return made


@pytest.mark.parametrize(
    "changes",
    [
        {"speculative_config__tree_kernel": "reference"},
        # A method of vLLM's.
        {"speculative_config": SimpleNamespace()},
        {"parallel_config__world_size": 2},
        {"parallel_config__data_parallel_size": 2},
        {"model_config__is_hybrid": True},
        {"model_config__use_mla": True},
        {"lora_config": object()},
    ],
)
def test_where_trees_become_graphs_by_default(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(FULL_GRAPHS_VARIABLE, raising=False)
    assert wants_full_graphs(config()) and not wants_full_graphs(config(**changes))
    assert not wants_full_graphs()
    monkeypatch.setenv(FULL_GRAPHS_VARIABLE, "1")
    assert wants_full_graphs(config(**changes)) and wants_full_graphs()
    monkeypatch.setenv(FULL_GRAPHS_VARIABLE, "0")
    assert not wants_full_graphs(config())


@pytest.mark.parametrize("wanted", ["0", "1"])
def test_ragged_graphs_where_they_are_wanted(
    runner: Any, monkeypatch: pytest.MonkeyPatch, wanted: str
) -> None:
    monkeypatch.setenv(FULL_GRAPHS_VARIABLE, wanted)
    runner.initialize_kv_cache(None)
    assert runner.asked == {"varlen_decode": wanted == "1"}
    # vLLM is as it was.
    stock = model_runner.ModelCudaGraphManager(varlen_decode=False)
    assert stock.asked == {"varlen_decode": False}


def wrapped(captures: Any, candidates: Any, rows: int, requests: int, limit: int) -> Any:
    """Our manager of graphs over one of vLLM's that captures these."""

    def stock(**asked: Any) -> Any:
        made: Any = object.__new__(CudaGraphManager)
        made._capture_descs = captures
        made._candidates = {(n, 0): descs for n, descs in candidates.items()}
        made._lora_dispatch_map, made._graphs_captured = {}, True
        made.decode_query_len, made.max_num_reqs, made.lora_capture_cases = rows, requests, [0]
        scheduler = SimpleNamespace(max_num_batched_tokens=limit)
        made.vllm_config = SimpleNamespace(scheduler_config=scheduler)
        return made

    return wrap_graph_manager(stock)()


@pytest.mark.parametrize(
    ("rows", "requests", "limit", "sizes"),
    [
        (16, 64, 8192, [576, 640, 704, 768, 832, 896, 960, 1024]),
        (64, 12, 8192, [576, 640, 704, 768]),
        (17, 256, 8192, [544, 612, 680, 748, 816, 884, 952, 1020]),
        (257, 4, 8192, [514, 771]),
        (16, 40, 600, [576, 592]),
        # vLLM's own sizes are enough.
        (16, 32, 8192, []),
        (8, 64, 8192, []),
    ],
)
def test_larger_steps_of_trees_have_graphs(
    rows: int, requests: int, limit: int, sizes: list[int]
) -> None:
    full = [BatchExecutionDescriptor(CUDAGraphMode.FULL, 512, requests, max_query_len=rows)]
    piece = BatchExecutionDescriptor(CUDAGraphMode.PIECEWISE, 512, None)

    captures = {CUDAGraphMode.FULL: [*full], CUDAGraphMode.PIECEWISE: [piece]}
    manager = wrapped(captures, {n: [*full, piece] for n in range(513)}, rows, requests, limit)
    # In vLLM's order. Its buffers for outputs are as large as the first one's.
    modes = (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL)
    captured = [desc for mode in modes for desc in manager._capture_descs[mode]]
    assert captured[0].num_tokens == max(desc.num_tokens for desc in captured)
    full_sizes = [desc.num_tokens for desc in captured if desc != piece]
    assert list(dict.fromkeys(full_sizes)) == [*sizes[::-1], 512]
    assert manager._capture_descs[CUDAGraphMode.PIECEWISE][-1] == piece
    for size in sizes:
        asked = size // rows
        found = manager.dispatch(asked, size, None, 0, rows)
        assert (found.cg_mode, found.num_tokens) == (CUDAGraphMode.FULL, size)
        # A prompt is no step of trees.
        assert manager.dispatch(1, size, None, 0, None).cg_mode == CUDAGraphMode.NONE
    beyond = manager.dispatch(1, (sizes or [512])[-1] + 1, None, 0, rows)
    assert beyond.cg_mode == CUDAGraphMode.NONE


def test_vllm_takes_the_fewest_places_that_do() -> None:
    descs = [
        BatchExecutionDescriptor(CUDAGraphMode.FULL, rows, min(rows, 32), max_query_len=17)
        for rows in (1, 16, 64)
    ]

    candidates = {n: [d for d in descs if d.num_tokens >= n] for n in range(65)}
    manager = wrapped({CUDAGraphMode.FULL: descs[::-1]}, candidates, 17, 32, 64)
    captured = manager._capture_descs[CUDAGraphMode.FULL]
    assert [(d.num_tokens, d.max_query_len, d.num_reqs) for d in captured] == [
        (64, 17, 32), (64, 17, 4), (64, 16, 32), (64, 16, 4), (16, 16, 16), (16, 16, 1), (1, 16, 1),
    ]  # fmt: skip

    def shape(requests: int, rows: int, longest: int) -> tuple[int, int | None, int | None]:
        found = manager.dispatch(requests, rows, None, 0, longest)
        return found.num_tokens, found.max_query_len, found.num_reqs

    assert shape(1, 1, 1) == (1, 16, 1)
    assert shape(1, 9, 9) == (16, 16, 1)
    assert shape(3, 9, 7) == (16, 16, 16)
    assert shape(4, 64, 16) == (64, 16, 4)
    assert shape(3, 30, 17) == (64, 17, 4)
    assert shape(5, 60, 17) == (64, 17, 32)
    assert shape(5, 60, 16) == (64, 16, 32)


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
            observes_from_graphs=False,
            forward_depth=0 if budget == "adaptive, one depth" else 8,
            warmup_depth=5,
        ),
        options=SimpleNamespace(tree_width=3),
    )
    speculator.planner = SimpleNamespace(is_adaptive=budget != "fixed")
    speculator.store = SimpleNamespace(num_nodes=4)
    speculator.init_cudagraph_manager(mode)
    assert made == ([] if depths is None else [depths])
    speculator.capture()
    assert len(captured) == len(made)
