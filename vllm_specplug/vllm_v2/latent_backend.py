# SPDX-License-Identifier: Apache-2.0
"""Verification of trees over the latent cache of a target with MLA, on a CPU.

It is a separate module because it imports classes of vLLM that other targets do not need.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from vllm_specplug.kernels import LatentSpan, move_latents
from vllm_specplug.kernels.masks import words_to_bool
from vllm_specplug.tree.step_trees import StepTrees, Walk, ancestor_words, path_moves
from vllm_specplug.vllm_attention.latent import attach_latent_rows, attach_warmup_rows, line_mask
from vllm_specplug.vllm_v2.backend import CpuTreeBackend
from vllm_specplug.vllm_worker.memory.cache_groups import CacheGroup


class LatentTreeBackend(CpuTreeBackend):
    """Trees over a latent cache on a CPU."""

    def bind(self, groups: list[CacheGroup]) -> None:
        self.groups = [(group.index, list(group.caches.values())) for group in groups]
        self.block_size = self.groups[0][1][0].shape[1]

    def attach(
        self,
        attn_metadata: dict[str, Any],
        input_batch: Any,
        trees: StepTrees | None,
        block_tables: Sequence[torch.Tensor],
    ) -> None:
        if trees is not None:
            attach_latent_rows(attn_metadata, latent_spans(input_batch, trees))
        elif self.warmup_rows:
            rows, context = input_batch.num_tokens, int(input_batch.seq_lens.max()) - 1
            attach_warmup_rows(
                attn_metadata, rows, self.warmup_rows, context, self.block_size
            )  # fmt: skip

    def compact(self, trees: StepTrees, walk: Walk, slot_mappings: torch.Tensor) -> None:
        for index, caches in self.groups:
            sources, targets = path_moves(trees, walk, slot_mappings[index])
            move_latents(caches, sources.flatten(), targets.flatten())


def latent_spans(input_batch: Any, trees: StepTrees) -> list[LatentSpan]:
    """Returns the rows of the batch's requests, up to the last one with computed tokens. Reads the
    device's tensors: on a CPU this waits for nothing."""
    rows, words = trees.rows, ancestor_words(trees)
    firsts = torch.from_numpy(input_batch.query_start_loc_np[: len(rows.starts)])
    computed = (rows.contexts - firsts.diff() + rows.starts.diff()).tolist()
    # vLLM's order is single rows, other requests with computed tokens, prompts. A prompt out of
    # this order is decoded.
    end = max((i + 1 for i, tokens in enumerate(computed) if tokens), default=0)
    bounds, starts = firsts.tolist(), rows.starts.tolist()
    spans = []
    for i in range(end):
        count = bounds[i + 1] - bounds[i]
        mask = line_mask(count)
        if starts[i + 1] > starts[i] + 1:
            mask = words_to_bool(words[starts[i] : starts[i + 1]], count)
        assert len(mask) == count, "rows precede a tree"
        spans.append(LatentSpan(i, bounds[i], computed[i], mask))
    return spans
