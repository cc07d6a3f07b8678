# SPDX-License-Identifier: Apache-2.0
"""The base class of drafters that may compute their context later than the target."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import cast

import torch

from vllm_specplug.drafting.caches import DraftCache, HostCache
from vllm_specplug.drafting.context_backlog import (
    DEFERRED_BYTES,
    ContextBacklog,
    WriteContext,
)
from vllm_specplug.drafting.device_requests import DeviceRequests
from vllm_specplug.drafting.drafter import Drafter
from vllm_specplug.drafting.requests import DraftRequests


class LateContextDrafter(Drafter):
    """A drafter whose context cache may lag behind the target's.

    Subclasses call `begin_backlog` in `load`, add committed tokens to `backlog`, and call
    `prepare_context` before they draft.
    """

    def begin_backlog(self, device: torch.device, write: WriteContext) -> None:
        """Creates the backlog of committed tokens; `write` stores their context."""
        self._backlog_args = device, write
        self.backlog = ContextBacklog(write)

    def bind_cache(self, cache: DraftCache) -> None:
        super().bind_cache(cache)
        # A new backlog, because slots of another cache mean nothing in this one. Deferral saves
        # time only on a CPU: other devices are bound by launches. The cache decides about slots,
        # not the device: a CPU may interpret a GPU's kernels, with the GPU's cache.
        device, write = self._backlog_args
        knows_slots = getattr(cache, "knows_slots", False)
        defers = not self.attends_context and device.type == "cpu" and knows_slots
        self.backlog = ContextBacklog(write, DEFERRED_BYTES if defers else 0)

    def begin(self, req_id: str, req_index: int, num_cached: int) -> None:
        if self.backlog.knows_slots:
            slots = cast(HostCache, self.cache).slots(req_index, num_cached)
            self.backlog.begin(req_id, slots)

    def prepare_context(self, requests: DraftRequests | DeviceRequests) -> None:
        """Writes the context that a draft for these requests reads."""
        # On a device nothing is deferred.
        if not isinstance(requests, DeviceRequests):
            self.backlog.write(requests.req_ids)

    def set_deferred(self, is_deferring: bool) -> None:
        self.backlog.set_deferred(is_deferring)

    def pending_context_ms(self, req_ids: Sequence[str]) -> list[float]:
        backlog = self.backlog
        return [
            math.inf if backlog.is_incomplete(req_id) else count * backlog.token_ms
            for req_id, count in zip(req_ids, backlog.num_deferred(req_ids), strict=True)
        ]

    def materialize_context(self, requests: DraftRequests) -> None:
        self.backlog.write(requests.for_forward()[1].req_ids)

    def forget(self, req_ids: Iterable[str]) -> None:
        ended = list(req_ids)
        self.backlog.forget(ended)
        super().forget(ended)
