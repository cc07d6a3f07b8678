# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs where there is no GPU: recorded operations over the storages of their capture.

A capture runs what it is given once and notes each operation of torch and each launch of Triton's
interpreter with its tensors. A replay repeats them over the same memory with the same host values,
which is all that a device would do: nothing else of the captured code runs again.

What a capture must not do is an error: reading a tensor on the host, making one from values of the
host, and operations whose shape follows from values. Before a replay all memory that captures of
this process made is overwritten with NaN and -1, as graphs of one pool may overwrite each other's:
whoever relies on what a graph left behind is found out by the answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace, TracebackType
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Written in Python: what they run is recorded, as a device would see it.
_PYTHON_OPERATIONS = {"vllm"}
_UNWRITTEN = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}
_READS = {
    torch.ops.aten._local_scalar_dense,
    torch.ops.aten.argwhere,
    torch.ops.aten.equal,
    torch.ops.aten.is_nonzero,
    torch.ops.aten.item,
    torch.ops.aten.masked_select,
    torch.ops.aten.nonzero,
    torch.ops.aten.unique_consecutive,
    torch.ops.aten._unique2,
}
_HOST_FUNCTIONS = ((torch, "tensor"), (torch, "from_numpy"), (torch, "as_tensor"))
_HOST_METHODS = ("numpy", "tolist", "cpu", "pin_memory")


class CaptureError(AssertionError):
    """What a CUDA graph cannot hold."""


class PretendedGraph:
    """In place of `torch.cuda.CUDAGraph`."""

    # Those of this process, which share one pool.
    captured: list[PretendedGraph] = []
    replays = 0

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []
        self.made: list[torch.Tensor] = []
        PretendedGraph.captured.append(self)

    @torch.inference_mode()
    def replay(self) -> None:
        PretendedGraph.replays += 1
        for graph in PretendedGraph.captured:
            graph.poison()
        for call in self.calls:
            call()

    def poison(self) -> None:
        for tensor in self.made:
            data = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            data.fill_(255)


def is_python(func: Any) -> bool:
    """Whether an operation is written in Python, in operations of its own."""
    return func.namespace in _PYTHON_OPERATIONS


def is_host_sized(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the host reads the device for an operation, be it for a shape."""
    if func.overloadpacket in _READS:
        return True
    if func.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put):
        return any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1])
    if func in (
        torch.ops.aten.repeat_interleave.Tensor,
        torch.ops.aten.repeat_interleave.self_Tensor,
    ):
        return kwargs.get("output_size") is None
    return False


class _Recorder(TorchDispatchMode):
    def __init__(self, graph: PretendedGraph) -> None:
        super().__init__()
        self.graph = graph
        self.is_paused = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.is_paused:
            return func(*args, **kwargs)
        if is_host_sized(func, args, kwargs):
            raise CaptureError(f"{func} reads the device in a capture")
        if is_python(func):
            with self:
                return func._op_dk(torch._C.DispatchKey.CPU, *args, **kwargs)
        result = func(*args, **kwargs)
        given = {t.untyped_storage().data_ptr() for t in tensors_of((args, kwargs))}
        outputs = [t for t in tensors_of(result) if t.untyped_storage().data_ptr() not in given]
        if func.is_view and not outputs:
            # What may be one is a copy where strides want it.
            return result
        self.graph.made.extend(outputs)
        if func not in _UNWRITTEN:
            self.graph.calls.append(lambda: _repeat(func, args, kwargs, result, outputs))
        return result

    def launch(self, run: Callable[[], Any]) -> None:
        self.is_paused = True
        try:
            run()
        finally:
            self.is_paused = False
        self.graph.calls.append(run)


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """Those anywhere within."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _repeat(
    func: Any, args: tuple[Any, ...], kwargs: Any, result: Any, outputs: list[torch.Tensor]
) -> None:
    again = func(*args, **kwargs)
    new = {id(t) for t in outputs}
    for before, now in zip(tensors_of(result), tensors_of(again), strict=True):
        if id(before) in new:
            before.copy_(now)


class capturing:
    """In place of `torch.cuda.graph`."""

    def __init__(self, graph: PretendedGraph, pool: Any = None, stream: Any = None) -> None:
        self.graph = graph

    def __enter__(self) -> None:
        from triton.runtime.interpreter import InterpretedFunction

        recorder = _Recorder(self.graph)
        stock = InterpretedFunction.run
        self.stack = ExitStack()

        def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
            recorder.launch(lambda: stock(kernel, *args, grid=grid, warmup=warmup, **kwargs))

        self.stack.enter_context(patch.object(InterpretedFunction, "run", run))
        for owner, name in _HOST_FUNCTIONS:
            self.stack.enter_context(_forbidden(recorder, owner, name))
        for name in _HOST_METHODS:
            self.stack.enter_context(_forbidden(recorder, torch.Tensor, name))
        self.stack.enter_context(recorder)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stack.__exit__(kind, error, traceback)


def _forbidden(recorder: _Recorder, owner: Any, name: str) -> Any:
    stock = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        if not recorder.is_paused:
            raise CaptureError(f"{name} meets the host in a capture")
        return stock(*args, **kwargs)

    return patch.object(owner, name, call)


@contextmanager
def pretended_graphs(distributed: bool = True) -> Iterator[None]:
    """vLLM captures and replays pretended graphs while entered.

    Args:
        distributed: whether vLLM's groups of ranks are there.
    """
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu import cudagraph_utils, model_runner

    replaced: dict[tuple[Any, str], Any] = {
        (torch.cuda, "CUDAGraph"): PretendedGraph,
        (torch.cuda, "graph"): capturing,
        (cudagraph_utils, "graph_capture"): lambda device: nullcontext(),
        (cudagraph_utils, "capture_pool"): lambda pool, config: nullcontext(pool),
        (cudagraph_utils, "current_stream"): lambda: None,
        (model_runner, "lock_workspace"): lambda: None,
        (type(current_platform), "get_global_graph_pool"): lambda self: object(),
    }
    if not distributed:
        alone = SimpleNamespace(is_first_rank=True, is_last_rank=True)
        replaced[cudagraph_utils, "get_pp_group"] = lambda: alone
        replaced[cudagraph_utils, "is_global_first_rank"] = lambda: False
    with ExitStack() as stack:
        for (owner, name), new in replaced.items():
            stack.enter_context(patch.object(owner, name, new))
        yield
