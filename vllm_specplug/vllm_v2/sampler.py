# SPDX-License-Identifier: Apache-2.0
"""Acceptance: sample every row at once, then walk down each tree.

V2 keys its random numbers by seed and position, and a node's position is its root's plus its depth.
Each row's sample is therefore the one that plain decoding would draw there. Samples of rows that no
walk visits are ignored.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.config.model import PROCESSED_LOGPROBS_MODES
from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
from vllm.v1.worker.gpu.metrics.logits import get_num_nans
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.sample.output import SamplerOutput, SamplingMaskTensors

from vllm_specplug.tree.step_trees import along_paths, emitting_rows, walk_trees
from vllm_specplug.vllm_v2.step_context import StepContext
from vllm_specplug.vllm_v2.stop_tokens import StopTokens


class TreeSampler:
    """Replaces V2's `RejectionSampler`.

    Args:
        sampler: vLLM's sampler.
        step: the running step, which has the trees and receives their walk.
        stops: tokens that end requests.
    """

    # vLLM's warm-up reads it, from 0.33 on.
    enable_adaptive_verification = False

    def __init__(
        self,
        sampler: Any,
        step: StepContext,
        stops: StopTokens,
    ) -> None:
        self.sampler = sampler
        self.step = step
        self.stops = stops

    def __call__(
        self,
        # [M, V]
        logits: torch.Tensor,
        input_batch: Any,
        draft_logits: torch.Tensor | None = None,
        invalid_drafts: torch.Tensor | None = None,
    ) -> SamplerOutput:
        """Returns vLLM's output for R requests: emitted tokens [R, N + 1], of which `num_sampled`
        count.

        `draft_logits` is ignored: acceptance compares tokens. Rows marked in `invalid_drafts`
        bool [M] have no grammar mask and are not accepted.
        """
        sampler = self.sampler
        trees = self.step.trees
        assert trees is not None
        num_nans = get_num_nans(logits) if sampler.compute_nans else None
        if invalid_drafts is not None:
            trees = trees.without(invalid_drafts)
        rows = input_batch.logits_indices
        token_ids = input_batch.input_ids[rows]
        scores = sampler.get_logprobs_dims(input_batch.idx_mapping_np)
        samples, processed = sampler.sample(
            logits,
            input_batch.expanded_idx_mapping,
            input_batch.idx_mapping,
            input_batch.idx_mapping_np,
            input_batch.positions[rows],
            token_ids,
            input_batch.expanded_local_pos,
            input_batch.seq_lens_cpu_upper_bound.numpy(),
            return_logprobs=scores is not None,
        )
        trees = self.stops.mask_after_stop(trees, token_ids)
        self.step.walk = walk = walk_trees(trees, samples, token_ids)
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            walk.lengths + 1,
            input_batch.seq_lens,
            input_batch.cu_num_logits,
            input_batch.idx_mapping,
            sampler.req_states.prefill_len.gpu,
        )
        emitting = None
        if scores is not None or sampler.return_sampling_mask:
            # From here on, row i of a request is the row that its emitted token i was sampled from.
            emitting = emitting_rows(trees, walk)
        logprobs = masks = None
        if scores is not None:
            is_processed = sampler.logprobs_mode in PROCESSED_LOGPROBS_MODES
            logprobs = compute_topk_scores(
                (processed if is_processed else logits)[emitting],
                scores[0],
                samples[emitting],
                input_batch.cu_num_logits_np.tolist(),
                logprob_token_ids_state=sampler.logprob_token_ids_state,
                expanded_idx_mapping=input_batch.expanded_idx_mapping,
                max_per_req_token_ids=scores[1],
                logits_mode=sampler.logprobs_mode in ("raw_logits", "processed_logits"),
            )
        if sampler.return_sampling_mask:
            top_k = sampler.sampling_states.top_k.np[input_batch.idx_mapping_np]
            masks = SamplingMaskTensors.from_logits(
                processed[emitting],
                input_batch.cu_num_logits,
                num_sampled,
                int(np.max(top_k)),
                trees.rows.max_rows,
            )
        return SamplerOutput(
            sampled_token_ids=walk.emitted,
            logprobs_tensors=logprobs,
            num_nans=None if num_nans is None else along_paths(walk, num_nans),
            num_sampled=num_sampled,
            num_rejected=num_rejected,
            sampling_mask_tensors=masks,
        )
