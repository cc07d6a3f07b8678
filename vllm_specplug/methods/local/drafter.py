# SPDX-License-Identifier: Apache-2.0
"""Drafts with a block head whose marginals a local head corrects, branch by branch."""

from __future__ import annotations

import torch

from vllm_specplug.drafting.device_requests import DeviceRequests, DeviceTrees
from vllm_specplug.drafting.drafter import TargetWeights
from vllm_specplug.drafting.requests import DraftRequests
from vllm_specplug.methods.block.drafter import BlockHeadDrafter
from vllm_specplug.methods.local.tree import LocalTreeBuilder
from vllm_specplug.tree import DraftTree


class LocalHeadDrafter(BlockHeadDrafter):
    """Drafter for a block head and a local head. If all fusion weights are 0, it drafts as the
    block head does.

    Subclasses set `local_tree` in `load`.
    """

    local_tree: LocalTreeBuilder | None = None

    def follow_target(self, target: TargetWeights) -> None:
        super().follow_target(target)
        if self.local_tree is not None:
            self.local_tree.follow_target(target.lm_head)

    @property
    def _local_builder(self) -> LocalTreeBuilder | None:
        """The tree builder, unless its local head corrects nothing."""
        builder = self.local_tree
        return None if builder is None or builder.is_idle else builder

    def draft(self, requests: DraftRequests) -> list[DraftTree]:
        local = self._local_builder
        if local is None:
            return super().draft(requests)
        depths = self.depths_of(requests)
        ids, log_probs, slots, terms = self._scored(requests, local, max(depths))
        return local.build(
            ids, log_probs, requests.anchors, requests.budgets, depths, requests.width, slots,
            terms,
        )  # fmt: skip

    def propose_on_device(self, requests: DeviceRequests) -> DeviceTrees:
        local = self._local_builder
        if local is None:
            return super().propose_on_device(requests)
        depth = self.max_depth_of(requests)
        ids, log_probs, slots, terms = self._scored(requests, local, depth)
        return local.build_on_device(
            ids,
            log_probs,
            requests.anchors,
            requests.budgets,
            requests.depths,
            width=requests.width,
            num_nodes=requests.num_nodes,
            slots=slots,
            terms=terms,
        )

    def _scored(
        self, requests: DraftRequests | DeviceRequests, local: LocalTreeBuilder, depth: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Returns the candidates that the local head scores, as draft ids and log-probabilities
        [R, depth, M], the confidence logits of the slots [R, depth], and the local head's
        `slot_terms`; None for a confidence head or terms that it lacks."""
        count = min(local.options.num_candidates, self.draft_vocab_size)
        ids, log_probs, hidden = self.draft_candidates(requests, depth, count)
        slots = None if local.confidence is None else local.confidence.of_slots(hidden)
        return ids, log_probs, slots, local.head.slot_terms(hidden)
