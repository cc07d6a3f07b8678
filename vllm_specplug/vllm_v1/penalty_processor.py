# SPDX-License-Identifier: Apache-2.0
"""The contextual penalty as one of vLLM's logits processors.

It works on one row per request, which is what plain decoding and the walk both sample, so the same
object serves both. Between two depths of the walk the live output lists have grown by the path;
every call follows them.

Seam: penalty_processor.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.sample.logits_processor.interface import BatchUpdate, LogitsProcessor

from vllm_specplug.accept.contextual_penalty import RecentTokens, penalise, penalise_where
from vllm_specplug.drafting.drafter import DraftPenalty
from vllm_specplug.vllm_worker.penalty import request_penalty


@dataclass(frozen=True)
class PenalisedRequest:
    """One request's penalty and where it applies."""

    theta: float
    recent: RecentTokens


class ContextualPenaltyProcessor(LogitsProcessor):
    """Penalises recent tokens of the requests that ask for it."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.device = device
        # By index in the batch.
        self.requests: dict[int, PenalisedRequest] = {}

    @property
    def specplug_idle(self) -> bool:
        """Whether no running request is penalised."""
        return not self.requests

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self.requests, batch_update, _penalised_request)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for index, request in self.requests.items():
            mask = request.recent.mask(logits.shape[-1], logits.device)
            penalise_where(logits[index], mask, request.theta)
        return logits


def draft_penalties(processors: Iterable[Any]) -> dict[int, DraftPenalty]:
    """The penalties that the next step's samples will have, for the drafts it verifies, by index
    in the batch.

    Depths beyond the first see the same window; the walk's window moves on with every token.
    """
    penalties = {}
    for processor in processors:
        if isinstance(processor, ContextualPenaltyProcessor):
            for index, request in processor.requests.items():
                penalties[index] = DraftPenalty(
                    request.recent.token_ids(), functools.partial(penalise, theta=request.theta)
                )
    return penalties


def _penalised_request(
    params: SamplingParams, prompt: list[int] | None, output: list[int]
) -> PenalisedRequest | None:
    penalty = request_penalty(params.extra_args)
    if penalty is None:
        return None
    window, theta = penalty
    return PenalisedRequest(theta, RecentTokens(prompt or (), output, window))
