# SPDX-License-Identifier: Apache-2.0
"""Verifying trees over the latent cache of a target with multi-head latent attention, on a CPU.

A module of its own: it needs classes of vLLM that no other target does.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_specplug.kernels import ancestor_words, move_latents
from vllm_specplug.kernels.masks import words_to_bool
from vllm_specplug.kvcache import path_moves
from vllm_specplug.vllm_attention.latent import (
    LatentRequest,
    attach_latent_rows,
    attach_rehearsed_rows,
)
from vllm_specplug.vllm_v1.runner_state import RunnerState
from vllm_specplug.vllm_v1.tree_backend import CpuTreeBackend
from vllm_specplug.vllm_worker.cache_groups import CacheGroup
from vllm_specplug.vllm_worker.step import StepRequest, TreeStep


class LatentTreeBackend(CpuTreeBackend):
    """Trees over a latent cache on a CPU."""

    reads_fp8 = False

    def bind(self, groups: list[CacheGroup]) -> None:
        self.groups = [(group.index, list(group.caches.values())) for group in groups]
        self.block_size = self.groups[0][1][0].shape[1]

    def attach(
        self,
        attn_metadata: Any,
        step: TreeStep,
        common: Any,
        *,
        for_capture: bool = False,
        padded_requests: int | None = None,
    ) -> None:
        """As the others, for lines of drafts as well: vLLM would expand their context."""
        if for_capture:
            return
        if self.rehearsed_rows:
            rows, context = common.num_actual_tokens, int(common.seq_lens.max()) - 1
            attach_rehearsed_rows(
                attn_metadata, rows, self.rehearsed_rows, context, self.block_size
            )  # fmt: skip
        elif step.has_drafts:
            attach_latent_rows(attn_metadata, [_latent_request(r) for r in step.requests])

    def compact(self, step: TreeStep, state: RunnerState) -> None:
        moved = [(i, r) for i, r in enumerate(step.requests) if r.accepted_path and not r.is_linear]
        for index, caches in self.groups if moved else ():
            block_ids = state.block_ids(index)
            paths = ((r.accepted_path, r.context_len, block_ids[i]) for i, r in moved)
            sources, targets = path_moves(paths, self.block_size)
            if len(sources):
                move_latents(caches, torch.from_numpy(sources), torch.from_numpy(targets))


def _latent_request(r: StepRequest) -> LatentRequest:
    mask = None
    if not r.is_linear:
        assert r.tree is not None
        mask = words_to_bool(ancestor_words([r.tree.parent_indices]), r.tree.num_nodes + 1)
    return LatentRequest(r.first_row, r.root_row, r.end_row, r.num_computed, mask)
