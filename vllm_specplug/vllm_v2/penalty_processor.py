# SPDX-License-Identifier: Apache-2.0
"""The contextual penalty (`tree.contextual_penalty`) as one of V2's logits processors.

It reads the windows on the device, where V2 keeps committed tokens, so that steps may be scheduled
ahead.

Seam: penalty_processor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor

from vllm_specplug.drafting.requests import DraftPenalties
from vllm_specplug.kernels import to_device
from vllm_specplug.request_params import parse_penalty
from vllm_specplug.tree.contextual_penalty import penalise
from vllm_specplug.vllm_v2.tree_paths import TreePaths, output_tail

logger = init_logger("vllm.specplug.penalty")

# Window tokens processed at once: a few temporaries of 8 MiB.
MAX_ELEMENTS = 1 << 20


def request_penalty(extra_args: dict[str, Any] | None) -> tuple[int, float] | None:
    """Returns window in tokens and theta; None for a request without a usable penalty."""
    try:
        return parse_penalty(extra_args)
    except ValueError:
        # The front end refuses it. A front end that does not must not end the worker.
        logger.warning_once("Ignored an invalid contextual penalty of a request")
        return None


class ContextualPenalty(LogitsProcessor):
    """Penalises recent tokens of the requests that ask for it."""

    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        self.req_states = req_states
        # [slots] tokens, 0 for no penalty
        self.windows = UvaBackedTensor(req_states.max_num_reqs, dtype=torch.int32)
        # [slots]
        self.thetas = UvaBackedTensor(req_states.max_num_reqs, dtype=torch.float32)
        self.is_stale = False

    def add_request(self, slot: int, sampling_params: Any) -> bool:
        window, theta = request_penalty(sampling_params.extra_args) or (0, 1.0)
        longest = self.req_states.all_token_ids.gpu.shape[1]
        self.windows.np[slot], self.thetas.np[slot] = min(window, longest), theta
        self.is_stale = True
        return window > 0

    def apply_staged_writes(self) -> None:
        if self.is_stale:
            self.windows.copy_to_uva()
            self.thetas.copy_to_uva()
            self.is_stale = False

    def is_used(self, slots: np.ndarray) -> bool:
        """Whether any request of the batch has a penalty."""
        return bool(np.any(self.windows.np[slots]))

    def apply(self, logits: torch.Tensor, ctx: Any) -> torch.Tensor:
        if not self.is_used(ctx.idx_mapping_np):
            return logits
        return self.apply_along(TreePaths.none(len(logits), logits.device), logits, ctx)

    def apply_along(self, paths: TreePaths, logits: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Penalises logits [M, V] in place; each row's path follows its committed tokens."""
        slots = ctx.expanded_idx_mapping.long()
        width = int(self.windows.np[ctx.idx_mapping_np].max())
        width = min(width, int(ctx.seq_lens_upper_bound_np.max()))
        # In chunks: all rows take the width of the widest window, which may be max_model_len.
        most = max(1, MAX_ELEMENTS // max(1, width))
        for first in range(0, len(logits), most):
            rows = slice(first, first + most)
            part = TreePaths(paths.tokens[rows], paths.lengths[rows])
            self._penalise(part, logits[rows], slots[rows], width)
        return logits

    def _penalise(
        self, paths: TreePaths, logits: torch.Tensor, slots: torch.Tensor, width: int
    ) -> None:
        total_lens = self.req_states.total_len.gpu[slots]
        back = torch.arange(width, device=logits.device)
        positions = (total_lens + paths.lengths).long()[:, None] - 1 - back
        all_token_ids = self.req_states.all_token_ids.gpu
        # [M, W]
        tokens = output_tail(paths, positions, total_lens, all_token_ids, slots)
        tokens = torch.where(back < self.windows.gpu[slots][:, None], tokens, -1)
        penalise(logits[:, None], tokens, self.thetas.gpu[slots])


def draft_penalties(
    # [R] window and theta of each request, None for no penalty
    penalties: Sequence[tuple[int, float] | None],
    req_states: Any,
    # [R] int64 slots of the requests
    slots: torch.Tensor,
    longest: int,
) -> DraftPenalties | None:
    """Returns the penalties that the sampler applies in the next step; None if there are none.

    No request has more than `longest` tokens, the anchor included. All depths of a draft see the
    first depth's window; the walk's window moves with every token.
    """
    if not any(penalties):
        return None
    all_token_ids, total_lens = req_states.all_token_ids.gpu, req_states.total_len.gpu
    windows = [0 if penalty is None else min(penalty[0], longest) for penalty in penalties]
    thetas = [1.0 if penalty is None else penalty[1] for penalty in penalties]
    # Both are exact in float64.
    table = to_device(np.array([windows, thetas]), slots.device)
    back = torch.arange(max(windows), device=slots.device)
    positions = total_lens[slots].long()[:, None] - 1 - back
    tokens = all_token_ids[slots[:, None], positions.clamp_min(0)].long()
    is_recent = (positions >= 0) & (back < table[0][:, None])
    return DraftPenalties(torch.where(is_recent, tokens, -1), table[1].float())
