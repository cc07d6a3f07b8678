# SPDX-License-Identifier: Apache-2.0
"""Regions of a fixed memory, one per running request."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar


@dataclass
class Region:
    """One request's part of the memory."""

    index: int


AnyRegion = TypeVar("AnyRegion", bound=Region)


class RegionPool(Generic[AnyRegion]):
    """Assigns regions to requests. Without a free one, it evicts the least recently used request.

    Args:
        count: number of regions.
        make: makes a new request's region from its index.
    """

    def __init__(self, count: int, make: Callable[[int], AnyRegion]) -> None:
        self.make = make
        # Least recently used first.
        self.regions: OrderedDict[str, AnyRegion] = OrderedDict()
        self.free = list(range(count - 1, -1, -1))

    def region_of(self, req_id: str) -> AnyRegion:
        """Returns a request's region, which becomes the most recently used one."""
        region = self.regions.pop(req_id, None)
        if region is None:
            if not self.free:
                self.free.append(self.regions.popitem(last=False)[1].index)
            region = self.make(self.free.pop())
        self.regions[req_id] = region
        return region

    def forget(self, req_ids: Iterable[str]) -> None:
        """Frees the regions of requests that ended or were preempted."""
        for req_id in req_ids:
            region = self.regions.pop(req_id, None)
            if region is not None:
                self.free.append(region.index)
