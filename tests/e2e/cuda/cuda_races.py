# SPDX-License-Identifier: Apache-2.0
"""Races of engines on a device that keeps only the order of streams; see `cuda_streams`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

# Before vLLM's CPU worker.
from tests.e2e.cuda.cuda_streams import device, on_device  # isort: skip

import torch

from tests.e2e.cuda.cuda_graphs import known_on_the_device
from tests.pretended_device import DEVICE
from tests.stream_order import Race


@contextmanager
def races() -> Iterator[list[Race]]:
    """Yields those of what is run, once it has been."""
    order, found = device.order, []
    # What was run before is done.
    device.synchronize()
    order.races.clear()
    try:
        yield found
    finally:
        found += order.races
        order.races.clear()


@contextmanager
def ordered() -> Iterator[None]:
    """No access races, neither the package's nor vLLM's."""
    before = device.order.accesses
    with races() as found:
        yield
    accesses = device.order.accesses - before
    assert accesses > 1000, accesses
    assert not found, "\n".join(str(race) for race in found[:4])


@contextmanager
def knowing() -> Iterator[None]:
    """`known_on_the_device`, with its tensors there."""
    with ExitStack() as stack:
        with on_device():
            stack.enter_context(known_on_the_device(DEVICE))
        yield


def kept_pinned() -> Any:
    """`to_device` through pinned buffers of its own, which nothing waits for."""
    kept: dict[Any, torch.Tensor] = {}

    def to_device(values: Any, where: torch.device) -> torch.Tensor:
        tensor = values if isinstance(values, torch.Tensor) else torch.from_numpy(values)
        key = tensor.shape, tensor.dtype
        if key not in kept:
            kept[key] = tensor.pin_memory()
        kept[key].copy_(tensor)
        return kept[key].to(where, non_blocking=True)

    return to_device
