# SPDX-License-Identifier: Apache-2.0
"""Tree attention by the CuTe kernel for compute capability 9.0; see `cuda_contract`.

Importing this needs neither cutlass nor a GPU. Kernels are loaded at their first call: call once
before capturing a CUDA graph, as loading is not allowed within a capture.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .cute import driver, store
from .cute.config import WARPGROUP_CHOICES, CombineConfig, ForwardConfig
from .cute.launch import feature_flags, plan_launches, unsupported
from .cute.store import CuteUnavailable
from .features import PLAIN, AttnFeatures, FeatureKind
from .metadata import TreeAttnMetadata

__all__ = ["CuteUnavailable", "unsupported_reason", "tree_attn_cute"]

CAPABILITY = (9, 0)
# Calls that differ in an address or a shape are prepared once each; more than a model has layers
# times graph sizes are not expected.
_MAX_PREPARED = 4096


def unsupported_reason(
    capability: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
    block_size: int,
    kinds: Sequence[FeatureKind] = (FeatureKind(),),
) -> str | None:
    """Why the kernel does not serve layers of these kinds, or None."""
    if tuple(capability) != CAPABILITY:
        return f"compute capability {capability[0]}.{capability[1]} is not 9.0"
    problem = unsupported(head_dim, dtype, block_size)
    if problem is None and any(kind.quantised_cache for kind in kinds):
        problem = "layers with a quantised cache"
    if problem is not None:
        return problem
    name = str(dtype).removeprefix("torch.")
    variants = (
        ForwardConfig(head_dim, name, WARPGROUP_CHOICES[0], False, **feature_flags(kind))
        for kind in kinds
    )
    return next(filter(None, map(store.missing, variants)), None)


def tree_attn_cute(
    # [T, Hq, Dh]
    query: torch.Tensor,
    # [num_blocks, block_size, Hkv, Dh]
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    # [T, Hq, Dh], written in place
    output: torch.Tensor,
    meta: TreeAttnMetadata,
    scale: float,
    # [M, Hkv, Dh]
    tail_key: torch.Tensor | None = None,
    tail_value: torch.Tensor | None = None,
    splits: int | None = None,
    stages: int = 0,
    *,
    features: AttnFeatures = PLAIN,
) -> None:
    """See `cuda_contract`. `splits` and `stages` override what is chosen, for measurements.

    Raises:
        CuteUnavailable: if a kernel cannot be read, compiled or loaded; nothing was launched.
    """
    key = (
        *(_identity(t) for t in (query, key_cache, value_cache, output, tail_key, tail_value)),
        features.kind,
        _identity(features.sinks),
        _identity(features.alibi_slopes),
        meta.plan.data_ptr(),
        meta.plan.shape,
        meta.parent_rows.data_ptr(),
        meta.parent_rows.shape,
        meta.block_table.data_ptr(),
        meta.block_table.shape,
        meta.max_rows,
        meta.max_context,
        meta.mask_kind,
        scale,
        splits,
        stages,
        query.device.index,
    )
    stream = torch.cuda.current_stream(query.device).cuda_stream
    prepared = _prepared.get((stream, key))
    if prepared is None:
        prepared = _prepare(
            stream,
            query,
            key_cache,
            value_cache,
            output,
            meta,
            scale,
            tail_key,
            tail_value,
            splits,
            stages,
            features,
        )
        if len(_prepared) >= _MAX_PREPARED:
            _prepared.clear()
        _prepared[stream, key] = prepared
    for launch in prepared:
        launch.kernel.launch(launch.grid, launch.parameters, stream)


@dataclass(frozen=True)
class _Prepared:
    kernel: driver.Kernel
    grid: tuple[int, int, int]
    parameters: driver.Parameters


_lock = threading.Lock()
_prepared: dict[tuple, list[_Prepared]] = {}
_kernels: dict[tuple[int, str], tuple[driver.Kernel, tuple[int, ...]]] = {}
_multiprocessors: dict[int, int] = {}
# Partial results by stream. A larger one replaces a smaller; captured graphs may still use the
# smaller, so none is ever freed.
_workspaces: dict[tuple[int, int], torch.Tensor] = {}
_retired: list[torch.Tensor] = []


def _identity(tensor: torch.Tensor | None) -> tuple | None:
    return None if tensor is None else (tensor.data_ptr(), tensor.shape, tensor.stride())


def _prepare(
    stream: int,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    output: torch.Tensor,
    meta: TreeAttnMetadata,
    scale: float,
    tail_key: torch.Tensor | None,
    tail_value: torch.Tensor | None,
    splits: int | None,
    stages: int,
    features: AttnFeatures,
) -> list[_Prepared]:
    device = query.device

    def workspace(parts: int, rows: int, heads: int, head_dim: int):
        size = parts * rows * heads * (head_dim + 1)
        held = _workspaces.get((device.index, stream))
        if held is None or held.numel() < size:
            if held is not None:
                _retired.append(held)
            held = torch.empty(size, dtype=torch.float32, device=device)
            _workspaces[device.index, stream] = held
        outputs = parts * rows * heads * head_dim
        return held[:outputs], held[outputs:size]

    with _lock:
        if device.index not in _multiprocessors:
            properties = torch.cuda.get_device_properties(device)
            _multiprocessors[device.index] = properties.multi_processor_count
        launches = plan_launches(
            query,
            key_cache,
            value_cache,
            output,
            meta,
            scale,
            tail_key,
            tail_value,
            _multiprocessors[device.index],
            workspace,
            splits,
            stages,
            features,
        )
        prepared = []
        try:
            for launch in launches:
                kernel, param_bytes = _load(device.index, launch.config)
                parameters = driver.Parameters(param_bytes, launch.arguments)
                prepared.append(_Prepared(kernel, launch.grid, parameters))
        except driver.DriverError as error:
            raise CuteUnavailable(str(error)) from error
        return prepared


def _load(
    device: int, config: ForwardConfig | CombineConfig
) -> tuple[driver.Kernel, tuple[int, ...]]:
    if (device, config.name) not in _kernels:
        stored = store.obtain(config)
        with torch.cuda.device(device):
            kernel = driver.load_first(
                stored.images, stored.entry, config.threads, config.shared_bytes
            )
        _kernels[device, config.name] = (kernel, stored.param_bytes)
    return _kernels[device, config.name]
