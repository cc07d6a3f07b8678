# SPDX-License-Identifier: Apache-2.0
"""The choice of the tree attention kernel on a CUDA device: the fastest correct one.

A kernel can serve if it supports the shape and agrees with the reference on this device. With
"auto" these are timed for at most `TIME_LIMIT_S`. The torch reference synchronises with the host,
so it must be requested.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from .cuda_contract import TOKEN_SCALE_BYTES, numbers_and_scales
from .features import PLAIN, AttnFeatures, FeatureKind
from .metadata import TreeAttnMetadata
from .reference import tree_attn_cuda_reference

logger = logging.getLogger(__name__)

# In the order in which they replace each other.
CUDA_KERNELS = ("cute", "flash", "triton", "reference")
TIME_LIMIT_S = 5.0
_TRITON_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MIN_TRITON_CAPABILITY = (8, 0)
_MAX_TRITON_HEAD_DIM = 512
# The first capability with e4m3 in Triton.
_MIN_FP8_CAPABILITY = (8, 9)
FP8 = torch.float8_e4m3fn
TreeAttnFn = Callable[..., None]


# Query heads, KV heads, head size and block size of an attention layer.
LayerShape = tuple[int, int, int, int]


class KernelFaultError(ValueError):
    """A kernel faulted and this process lost the device; the message has the remedy."""


@dataclass(frozen=True)
class KernelShape:
    """The shape that a kernel must support to serve a model."""

    head_dim: int
    dtype: torch.dtype
    block_size: int
    num_heads: int
    num_kv_heads: int
    kinds: tuple[FeatureKind, ...] = (FeatureKind(),)
    """The kinds of the model's layers, each once."""

    @classmethod
    def of(
        cls,
        layer: LayerShape,
        dtype: torch.dtype,
        kinds: Sequence[FeatureKind] = (PLAIN.kind,),
    ) -> KernelShape:
        """Returns the shape of layers of one kind."""
        num_heads, num_kv_heads, head_dim, block_size = layer
        return cls(head_dim, dtype, block_size, num_heads, num_kv_heads, tuple(kinds))


@dataclass(frozen=True)
class KernelUse:
    """A use for which kernels are timed."""

    shape: KernelShape
    for_drafts: bool
    from_graphs: bool = False
    """Whether calls are replayed from graphs, so that launches cost the host no time."""


@dataclass(frozen=True)
class ChosenKernel:
    """The chosen kernel and the reason."""

    name: str
    run: TreeAttnFn
    reason: str
    times: dict[str, float] = field(default_factory=dict)
    """Microseconds of a call of each kernel that was timed."""

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    @property
    def reads_words(self) -> bool:
        """Whether it reads ancestor words in addition to parents."""
        return self.name in ("flash", "triton")


@dataclass(frozen=True)
class KernelsByShape:
    """A `ChosenKernel` for each layer shape of a model."""

    by_shape: dict[LayerShape, ChosenKernel]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(kernel.name for kernel in self.by_shape.values()))

    @property
    def name(self) -> str:
        return " + ".join(self.names)

    @property
    def reason(self) -> str:
        return "; ".join(
            f"{heads} heads over {kv_heads} of {head_dim}: {kernel.name}, {kernel.reason}"
            for (heads, kv_heads, head_dim, _), kernel in self.by_shape.items()
        )

    @property
    def reads_words(self) -> bool:
        return any(kernel.reads_words for kernel in self.by_shape.values())

    def run(self, query: torch.Tensor, key_cache: torch.Tensor, *args: Any, **more: Any) -> None:
        """Calls the kernel of this layer's shape; see `cuda_contract`."""
        _, block_size, num_kv_heads, head_dim = key_cache.shape
        shape = (query.shape[1], num_kv_heads, head_dim, block_size)
        self.by_shape[shape].run(query, key_cache, *args, **more)


def by_layer_shape(chosen: dict[LayerShape, ChosenKernel]) -> ChosenKernel | KernelsByShape:
    """Returns one call for all layers of a model."""
    if len(chosen) == 1:
        return next(iter(chosen.values()))
    return KernelsByShape(chosen)


def unsupported_by(name: str, shape: KernelShape, capability: tuple[int, int]) -> str | None:
    """Returns why kernel `name` cannot serve `shape` on a device of `capability`, or None."""
    quantised = any(kind.quantised_cache for kind in shape.kinds)
    if name == "reference":
        return "a quantised cache" if quantised else None
    if shape.num_heads % shape.num_kv_heads:
        return f"{shape.num_heads} query heads over {shape.num_kv_heads} KV heads"
    if name == "flash":
        from .tree_attn_flash import reads_context
        from .tree_attn_flash import unsupported_reason as flash_problem

        problem = flash_problem(shape.head_dim, shape.dtype, shape.block_size)
        if problem is not None:
            return problem
        if not any(map(reads_context, shape.kinds)):
            return f"it reads no layer with {_listed(shape.kinds)}"
    if name in ("flash", "triton"):
        if capability < _MIN_TRITON_CAPABILITY:
            return f"compute capability {capability[0]}.{capability[1]} is below 8.0"
        if shape.dtype not in _TRITON_DTYPES:
            return f"dtype {shape.dtype}"
        if shape.head_dim > _MAX_TRITON_HEAD_DIM or shape.head_dim % 8:
            return f"head_dim {shape.head_dim} (multiples of 8 up to {_MAX_TRITON_HEAD_DIM})"
        floats = any(kind.quantised_cache and not kind.int8_cache for kind in shape.kinds)
        if floats and capability < _MIN_FP8_CAPABILITY:
            return f"a cache of e4m3 on compute capability {capability[0]}.{capability[1]}"
        return None
    try:
        from .tree_attn_cute_sm90 import unsupported_reason
    except ImportError as error:
        return f"it cannot be imported ({error})"
    return unsupported_reason(
        capability, shape.head_dim, shape.dtype, shape.block_size, shape.kinds
    )


def _listed(kinds: Sequence[FeatureKind]) -> str:
    """Returns the features of some layers; empty if all are plain."""
    return ", ".join(dict.fromkeys(name for kind in kinds for name in kind.names))


def load_kernel(name: str) -> TreeAttnFn:
    """Returns the call of kernel `name`, see `cuda_contract`."""
    if name == "cute":
        from .tree_attn_cute_sm90 import tree_attn_cute

        return tree_attn_cute
    if name == "flash":
        from .tree_attn_flash import tree_attn_flash

        return tree_attn_flash
    if name == "triton":
        from .tree_attn_triton import tree_attn_triton

        return tree_attn_triton
    return tree_attn_cuda_reference


def choose_cuda_kernel(
    requested: str,
    shape: KernelShape,
    device: torch.device,
    capability: tuple[int, int],
    for_drafts: bool = False,
    # float64 [n] to [n]
    largest: Callable[[list[float]], list[float]] = list,
    *,
    from_graphs: bool = False,
    examined: Mapping[str, str | None] = MappingProxyType({}),
) -> ChosenKernel:
    """Returns the fastest kernel that can serve here for "auto", otherwise the first one from
    `requested` on. Logs one warning for skipped kernels.

    Args:
        for_drafts: whether it serves blocks of a draft, whose keys and values are not in the cache
            and whose requests leave gaps; else trees of the target.
        largest: of each value the largest over all ranks that share a layer, and choose together.
            They take one kernel: one that is right on all of them, the fastest on the slowest rank,
            for which the others wait in every layer.
        from_graphs: whether its calls will be replayed, and so are timed.
        examined: problems of the kernels that were tested before, None for none.

    Raises:
        ValueError: for a name that is none of `CUDA_KERNELS` or "auto", and when no kernel but the
            reference serves and that was not asked for.
    """
    if requested not in ("auto", *CUDA_KERNELS):
        raise ValueError(
            f"tree_kernel={requested!r} does not run on CUDA; use auto, {', '.join(CUDA_KERNELS)}"
        )
    passed_over, good = [], []
    names = CUDA_KERNELS if requested == "auto" else CUDA_KERNELS[CUDA_KERNELS.index(requested) :]
    for name in names:
        if name == "reference" != requested:
            break
        # It would pass blocks with gaps to Triton.
        if name == "flash" and for_drafts:
            continue
        if name in examined:
            problem = examined[name]
        else:
            problem = find_problem(name, shape, device, capability)
        (is_wrong,) = largest([float(problem is not None)])
        if is_wrong and problem is None:
            problem = "another rank cannot run it, or it is wrong there"
        if problem is None:
            good.append(name)
            if requested != "auto":
                break
        # Skipping the Hopper kernel on other architectures is not worth a warning.
        elif not (name == "cute" and requested == "auto" and capability[0] != 9):
            passed_over.append(f"{name}: {problem}")
    if not good:
        raise ValueError(
            f"tree_kernel={requested!r} finds no kernel that serves {shape} here "
            f"({'; '.join(passed_over)}). Use a target and a head of other sizes, or "
            "tree_kernel='reference', which is right but far slower than plain decoding."
        )
    times: dict[str, float] = {}
    chosen, reason = good[0], "requested" if requested == good[0] else "the first that is right"
    if len(good) > 1:
        times = kernel_times(good, KernelUse(shape, for_drafts, from_graphs), device)
        slowest = largest([times.get(name, float("inf")) for name in good])
        # Kernels for which no time was left are missing.
        times = {name: us for name, us in zip(good, slowest, strict=True) if us < float("inf")}
        if times:
            chosen = min(times, key=lambda name: times[name])
            reason = "fastest of " + ", ".join(f"{name} {us:.0f} us" for name, us in times.items())
    elif requested == "auto":
        reason = "the only one that runs and is right here"
    if passed_over:
        logger.warning(
            "Tree attention kernels skipped (%s); using %s instead", "; ".join(passed_over), chosen
        )
    return ChosenKernel(chosen, load_kernel(chosen), reason, times)


def kernel_times(names: Sequence[str], use: KernelUse, device: torch.device) -> dict[str, float]:
    """Returns microseconds of a call of each kernel that does not fail. No call begins after
    `TIME_LIMIT_S`."""
    times: dict[str, list[float]] = {}
    deadline = time.monotonic() + TIME_LIMIT_S
    # Kernels take turns, so that short disturbances affect one time of each.
    for name in [name for _ in range(_TURNS) for name in names]:
        if time.monotonic() > deadline:
            break
        try:
            times.setdefault(name, []).append(call_us(load_kernel(name), use, device))
        except Exception as failure:
            # For example out of memory. The next kernel may need less.
            logger.warning("Tree attention kernel %s cannot be timed: %s", name, failure)
    return {name: min(us) for name, us in times.items() if us}


# Timed calls: one request with a large tree, and several with small trees.
_TIMED_CALLS = (((4096, 63),), ((1024, 15),) * 8)
_TURNS, _WARM_UPS, _CALLS_TIMED = 3, 3, 20


def call_us(run: TreeAttnFn, use: KernelUse, device: torch.device) -> float:
    """Returns microseconds per call: the geometric mean over `_TIMED_CALLS` and the kinds of
    layers. Launches count unless calls are replayed."""
    product = 1.0
    cells = [(trees, kind) for trees in _TIMED_CALLS for kind in use.shape.kinds]
    for trees, kind in cells:
        problem = _Problem.of(trees, use.shape, device, 0, use.for_drafts, kind)

        def call(times: int, problem: _Problem = problem) -> None:
            for _ in range(times):
                problem.run(run)

        call(_WARM_UPS)
        timed = partial(call, _CALLS_TIMED)
        if use.from_graphs:
            timed = _replay_of(timed, device)
            timed()
        _wait_for(device)
        start = time.perf_counter()
        timed()
        _wait_for(device)
        product *= (time.perf_counter() - start) / _CALLS_TIMED * 1e6
    return product ** (1 / len(cells))


def _replay_of(calls: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Returns a function that replays `calls`. A failed capture restores the current stream."""
    _wait_for(device)
    graph = torch.cuda.CUDAGraph()
    if device.type != "cuda":
        with torch.cuda.graph(graph):
            calls()
        return graph.replay
    stream, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    try:
        # Other threads of the process may use the device meanwhile.
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            calls()
    finally:
        torch.cuda.set_stream(stream)
        # The graph's own pool keeps the memory while it is replayed.
        if (cute := sys.modules.get(f"{__package__}.tree_attn_cute_sm90")) is not None:
            cute.drop_workspace(side.cuda_stream)
    return graph.replay


def _is_lost(device: torch.device) -> bool:
    """Whether all operations on a device fail, as after an illegal access."""
    try:
        _wait_for(device)
    except RuntimeError:
        return True
    return False


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def find_problem(
    name: str, shape: KernelShape, device: torch.device, capability: tuple[int, int]
) -> str | None:
    """Returns why kernel `name` cannot serve `shape` here, or None; see `self_test_failure`."""
    return unsupported_by(name, shape, capability) or self_test_failure(name, shape, device)


def self_test_failure(name: str, shape: KernelShape, device: torch.device) -> str | None:
    """Runs a few trees with kernel `name` on `device`; returns a problem, or None if results agree.

    A kernel that does not load or launch must not end a server.

    Raises:
        KernelFaultError: after a fault this process cannot try another kernel.
    """
    if name == "reference":
        return None
    try:
        error, limit = self_test_error(load_kernel(name), shape, device)
    except Exception as failure:
        text = str(failure).strip().splitlines()
        told = f"{type(failure).__name__}: {text[0] if text else 'no message'}"
        if _is_lost(device):
            other = "reference" if name == "triton" else "triton"
            raise KernelFaultError(
                f"the tree attention kernel {name!r} faulted on this device ({told}), which this "
                "process cannot use any more. Please report it; until then start again with "
                f"tree_kernel={other!r}"
            ) from failure
        return told
    if not error <= limit:
        return f"it differs from the reference by {error:.2g} (limit {limit:.2g})"
    return None


# Trees (context length, nodes) of each call: no context, around a tile, a context that is split.
# Calls differ in their largest tree, because kernels have variants for roots, few and many rows. A
# variant that does not load must be found here, not while serving.
_CALLS = (((0, 0), (0, 70), (63, 8), (900, 33)), ((33, 0), (0, 0)), ((65, 7),))


def self_test_error(
    run: TreeAttnFn, shape: KernelShape, device: torch.device, seed: int = 0
) -> tuple[float, float]:
    """Returns the largest difference from the float32 reference over a few calls, and its limit."""
    errors = [
        _call_error(run, trees, shape, device, seed, kind)
        for kind in shape.kinds
        for trees in (*_CALLS, *_calls_beyond(kind.window))
    ]
    # Inputs are standard normal, so outputs are at most about 4: a few units of rounding.
    limit = {torch.float32: 1e-4, torch.float16: 1e-2}.get(shape.dtype, 6e-2)
    # max() may skip NaN.
    return next((e for e in errors if e != e), max(errors)), limit


def _calls_beyond(window: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Returns a context longer than the window, unless that is too long for a test."""
    return ((((window + 77, 9), (3, 1)),)) if 0 < window <= 2**14 else ()


@dataclass(frozen=True)
class _Problem:
    """Trees over a random cache."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    meta: TreeAttnMetadata
    scale: float
    # tail_key and tail_value
    tail: tuple[torch.Tensor, ...]
    features: AttnFeatures
    dtype: torch.dtype
    """Of the output."""

    @classmethod
    def of(
        cls,
        # context length and nodes of each
        trees: tuple[tuple[int, int], ...],
        shape: KernelShape,
        device: torch.device,
        seed: int,
        for_drafts: bool = False,
        kind: FeatureKind = PLAIN.kind,
    ) -> _Problem:
        draw = torch.Generator().manual_seed(seed)
        rng = np.random.default_rng(seed)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=draw).to(device, shape.dtype)

        blocks = max(-(-(c + n + 1) // shape.block_size) for c, n in trees)
        table = torch.randperm(len(trees) * blocks, generator=draw).view(len(trees), blocks).int()
        key_cache, value_cache, scales = _cache(shape, kind, table.numel(), normal)
        rows = [n + 1 for _, n in trees]
        starts = np.cumsum([0, *rows]).astype(np.int32)
        parents = np.concatenate(
            [[rng.integers(max(0, i - 9), i) if i else -1 for i in range(n)] for n in rows]
        )
        plan = np.array(
            [range(len(trees)), starts[:-1], rows, [c for c, _ in trees], starts[:-1]], np.int32
        )
        meta = TreeAttnMetadata(
            plan=torch.from_numpy(plan).to(device),
            parent_rows=torch.from_numpy(parents.astype(np.int32)).to(device),
            block_table=table.to(device),
            max_rows=max(rows),
            max_context=max(c for c, _ in trees),
            query_starts=None if for_drafts else torch.from_numpy(starts).to(device),
        )
        query = normal(int(starts[-1]), shape.num_heads, shape.head_dim)
        if kind.quantised_query:
            query = query.to(FP8)
        own = (len(query), shape.num_kv_heads, shape.head_dim)
        tail = (normal(*own), normal(*own)) if for_drafts else ()
        one = torch.ones((), device=device)
        by_head = torch.arange(shape.num_heads, device=device) + 1.0
        features = AttnFeatures(
            window=kind.window,
            soft_cap=kind.soft_cap,
            sinks=by_head.log() if kind.sinks else None,
            alibi_slopes=0.1 / by_head if kind.alibi else None,
            query_scales=0.7 * one if kind.quantised_query else None,
            **scales,
        )
        scale = shape.head_dim**-0.5
        return cls(query, key_cache, value_cache, meta, scale, tail, features, shape.dtype)

    def run(self, kernel: TreeAttnFn) -> torch.Tensor:
        """Returns the output of `kernel`; rows that it does not write are NaN."""
        output = torch.full_like(self.query, float("nan"), dtype=self.dtype)
        more = {} if self.features.is_plain else {"features": self.features}
        kernel(
            self.query, self.key_cache, self.value_cache, output, self.meta, self.scale, *self.tail,
            **more,
        )  # fmt: skip
        return output

    def expected(self) -> torch.Tensor:
        """Returns the reference's output in float32."""
        scale = self.features.query_scales
        query = self.query.float() * (1.0 if scale is None else scale)
        output = torch.empty_like(query)
        tree_attn_cuda_reference(
            query, self.key_cache, self.value_cache, output, self.meta, self.scale,
            features=replace(self.features, query_scales=None),
        )  # fmt: skip
        return output


# Scale of random int8 that makes products as large as those of standard normal numbers.
_INT8_STEP = 1 / 40


def _cache(
    shape: KernelShape, kind: FeatureKind, num_blocks: int, normal: Callable[..., torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Returns random keys and values [num_blocks, block_size, Hkv, Dh] in the memory order of
    vLLM's GPU cache (block, token, head, K then V), and their scales as `AttnFeatures`."""
    size = (num_blocks, shape.block_size, shape.num_kv_heads)
    numbers = normal(*size, 2 * shape.head_dim)
    if not kind.quantised_cache:
        return *numbers.chunk(2, dim=-1), {}
    if not kind.token_scales:
        one = torch.ones((), device=numbers.device)
        by_layer = {"key_scales": 0.8 * one, "value_scales": 0.9 * one}
        return *numbers.to(FP8).chunk(2, dim=-1), by_layer
    step = _INT8_STEP if kind.int8_cache else 1.0
    if kind.int8_cache:
        numbers = (numbers.float() / step).round().clamp(-127, 127).to(torch.int8)
    else:
        numbers = numbers.to(FP8)
    cache = numbers.new_empty(*size, 2 * (shape.head_dim + TOKEN_SCALE_BYTES))
    halves = cache.chunk(2, dim=-1)
    (keys, key_scales), (values, value_scales) = map(numbers_and_scales, halves)
    for part, half in zip((keys, values), numbers.chunk(2, dim=-1), strict=True):
        part.copy_(half)
    for scales in (key_scales, value_scales):
        scales.copy_(step * (0.5 + normal(*size).float().sigmoid()))
    of_slots = {"key_scales": key_scales, "value_scales": value_scales}
    return keys, values, {**of_slots, "int8_cache": kind.int8_cache}


def _call_error(
    run: TreeAttnFn,
    trees: tuple[tuple[int, int], ...],
    shape: KernelShape,
    device: torch.device,
    seed: int,
    kind: FeatureKind,
) -> float:
    """Returns the largest difference from the float32 reference in one call."""
    problem = _Problem.of(trees, shape, device, seed, kind=kind)
    return float((problem.run(run).float() - problem.expected()).abs().max())
