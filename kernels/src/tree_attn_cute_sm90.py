# SPDX-License-Identifier: Apache-2.0
"""Tree attention by the CuTe kernel for compute capability 9.0; see `cuda_contract`.

Importing this needs neither cutlass nor a GPU. Kernels are loaded at their first call: call once
before capturing a CUDA graph, as loading is not allowed within a capture.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial

import torch

from .cute import driver, store
from .cute.config import (
    WARPGROUP_CHOICES,
    CombineConfig,
    ForwardConfig,
)
from .cute.launch import Arguments, Call, box_of, call_key, unsupported, unsupported_feature
from .cute.launch_params import COMBINE_PARAMETERS, FORWARD_PARAMETERS
from .cute.store import CuteUnavailable
from .features import PLAIN, AttnFeatures, FeatureKind
from .metadata import TreeAttnMetadata

__all__ = ["CuteUnavailable", "unsupported_reason", "tree_attn_cute"]

CAPABILITY = (9, 0)
# Limit of prepared calls: one per layer and bucket of `launch.Bounds`.
_MAX_PREPARED = 4096


def unsupported_reason(
    capability: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
    block_size: int,
    kinds: Sequence[FeatureKind] = (FeatureKind(),),
) -> str | None:
    """Returns why the kernel does not support layers of these kinds, or None."""
    if tuple(capability) != CAPABILITY:
        return f"compute capability {capability[0]}.{capability[1]} is not 9.0"
    problems = (unsupported(head_dim, dtype, block_size), *map(unsupported_feature, kinds))
    if any(problems):
        return next(filter(None, problems))
    name = str(dtype).removeprefix("torch.")
    variants = (
        ForwardConfig(head_dim, name, warpgroups, box_of(block_size), bool(kind.window))
        for kind in kinds
        for warpgroups in WARPGROUP_CHOICES
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
    *,
    features: AttnFeatures = PLAIN,
) -> None:
    """See `cuda_contract`. `splits` overrides the default, for measurements.

    Raises:
        CuteUnavailable: if a kernel cannot be read, compiled or loaded. Nothing is launched then.
    """
    if meta.num_trees == 0 or meta.max_rows == 0:
        return
    arguments = Arguments(
        query, key_cache, value_cache, output, meta, scale, tail_key, tail_value, features
    )
    key = call_key(arguments, splits)
    stream = torch.cuda.current_stream(query.device).cuda_stream
    prepared = _prepared.get((stream, key))
    if prepared is None:
        prepared = _Prepared(Call(arguments, _num_sms_of(query.device), splits), query.device)
        if len(_prepared) >= _MAX_PREPARED:
            _prepared.clear()
        _prepared[stream, key] = prepared
    prepared.launch(arguments, stream)


class _Prepared:
    """The loaded kernels of a `Call` with their parameters. A launch changes only some of these."""

    def __init__(self, call: Call, device: torch.device) -> None:
        """Raises CuteUnavailable."""
        self._call, self._device = call, device
        # `launch` sets these.
        values = call.fixed | dict.fromkeys(_STEP_PARAMETERS, 0)
        self._kernels = []
        with _lock:
            for config, named in (
                (call.config, FORWARD_PARAMETERS),
                (call.merge, COMBINE_PARAMETERS),
            ):
                try:
                    kernel, param_bytes = _load(device.index, config)
                    first = call.descriptors if named is FORWARD_PARAMETERS else ()
                    given = (*first, *(values[name] for name, _ in named))
                    parameters = driver.Parameters(param_bytes, given)
                except driver.DriverError as error:
                    raise CuteUnavailable(str(error)) from error
                # Negative indices: descriptors and empty parameters precede the named ones.
                step_indices = {
                    name: index - len(named)
                    for index, (name, _) in enumerate(named)
                    if name in _STEP_PARAMETERS
                }
                self._kernels.append((kernel, parameters, step_indices))

    def launch(self, arguments: Arguments, stream: int) -> None:
        with _lock:
            values = self._call.step(arguments, partial(_workspace, self._device, stream))
            # Without a split tree there is no combine launch.
            grids = self._call.grids(arguments.meta.num_trees)
            for grid, (kernel, parameters, step_indices) in zip(grids, self._kernels, strict=False):
                for name, index in step_indices.items():
                    parameters.set(index, values[name])
                kernel.launch(grid, parameters, stream)


_STEP_PARAMETERS = frozenset(
    (
        "query", "output", "tail_key", "tail_value", "plan", "parents", "table", "part_out",
        "part_lse", "part_record", "num_trees", "forced_parts", "slots",
    )
)  # fmt: skip
_lock = threading.Lock()
_prepared: dict[tuple, _Prepared] = {}
_kernels: dict[tuple[int, str], tuple[driver.Kernel, tuple[int, ...]]] = {}
_num_sms: dict[int, int] = {}
# Partial results by stream. Captured graphs may still use a buffer after a larger one replaces it,
# so replaced buffers are never freed.
_workspaces: dict[tuple[int, int], torch.Tensor] = {}
_retired: list[torch.Tensor] = []


def _workspace(
    device: torch.device, stream: int, parts: int, rows: int, heads: int, head_dim: int, trees: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    # The part records come first: they are written 8 bytes at a time, and the number of LSEs may be
    # odd.
    outputs = 2 * trees + parts * rows * heads * head_dim
    size = outputs + parts * rows * heads
    held = _workspaces.get((device.index, stream))
    if held is None or held.numel() < size:
        if held is not None:
            _retired.append(held)
        held = torch.empty(size, dtype=torch.float32, device=device)
        _workspaces[device.index, stream] = held
    return held[2 * trees : outputs], held[outputs:size], held[: 2 * trees].view(torch.int32)


def drop_workspace(stream: int) -> None:
    """Frees the workspace and prepared calls of a stream that gets no more calls."""
    for device, own in [*_workspaces]:
        if own == stream:
            del _workspaces[device, own]
    for own, call in [*_prepared]:
        if own == stream:
            del _prepared[own, call]


def _num_sms_of(device: torch.device) -> int:
    if device.index not in _num_sms:
        properties = torch.cuda.get_device_properties(device)
        _num_sms[device.index] = properties.multi_processor_count
    return _num_sms[device.index]


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
