# SPDX-License-Identifier: Apache-2.0
"""Drafters whose roots read a state of the last committed position."""

from __future__ import annotations

import torch

from vllm_specplug.drafting.device_requests import DeviceRequests
from vllm_specplug.drafting.drafter import Drafter
from vllm_specplug.drafting.requests import DraftRequests, device_tensor


class RootStates(Drafter):
    """A drafter that keeps a state of each request's last committed position for its roots."""

    drafts_from_graphs = True
    # [B, H] in batch order; no rows before the first step
    _roots: torch.Tensor

    @property
    def request_states(self) -> torch.Tensor:
        return self._roots

    def root_states(self, requests: DraftRequests | DeviceRequests) -> torch.Tensor:
        """Returns the states of the requests [R, H]; zeros if no step came before the draft."""
        roots = self.request_states
        if isinstance(requests, DeviceRequests):
            if requests.states is not None:
                roots = requests.states
            rows = requests.rows
        else:
            rows = device_tensor(requests.req_indices, roots.device)
            if max(requests.req_indices) >= len(roots):
                roots = roots[:0]
        if len(roots) and rows is not None:
            roots = roots[rows]
        if len(roots) != len(requests):
            return roots.new_zeros(len(requests), *roots.shape[1:])
        return roots
