# SPDX-License-Identifier: Apache-2.0
"""The contextual penalty as one of vLLM's logits processors.

It works on one row a request, which is what plain decoding and the walk both sample, so the same
object serves both. Between two depths of the walk the live output lists have grown by the path;
they are read anew at every call.

Seam: penalty_processor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.sample.logits_processor.interface import BatchUpdate, LogitsProcessor

from vllm_specplug.accept.contextual_penalty import penalise, recent_tokens
from vllm_specplug.drafters.base import DraftPenalty
from vllm_specplug.tokenswift_options import parse_penalty


@dataclass(frozen=True)
class PenalisedRequest:
    """One request's penalty and its texts; `output` is vLLM's live list."""

    window: int
    theta: float
    prompt: Sequence[int]
    output: Sequence[int]


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
            tokens = recent_tokens(request.prompt, request.output, request.window)
            penalise(logits[index], torch.tensor(tokens, device=self.device), request.theta)
        return logits


def draft_penalty(
    extra_args: dict[str, Any] | None,
    # [n] committed tokens
    token_ids: np.ndarray,
) -> DraftPenalty | None:
    """The penalty that the next step's samples will have, for the drafts it verifies.

    Depths beyond the first see the same window; the walk's window moves on with every token.
    """
    penalty = parse_penalty(extra_args)
    if penalty is None:
        return None
    window, theta = penalty
    tokens = torch.from_numpy(np.unique(token_ids[-window:]).astype(np.int64))
    return DraftPenalty(tokens, lambda logits, indices: penalise(logits, indices, theta))


def _penalised_request(
    params: SamplingParams, prompt: list[int] | None, output: list[int]
) -> PenalisedRequest | None:
    penalty = parse_penalty(params.extra_args)
    if penalty is None:
        return None
    return PenalisedRequest(*penalty, prompt or (), output)
