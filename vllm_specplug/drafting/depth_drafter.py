# SPDX-License-Identifier: Apache-2.0
"""The base class of drafters whose forward drafts all depths at once."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch

from vllm_specplug.drafting.device_requests import DeviceRequests, DeviceTrees
from vllm_specplug.drafting.head_drafter import HeadDrafter
from vllm_specplug.drafting.requests import DraftRequests
from vllm_specplug.kernels import build_best_first, can_build_best_first
from vllm_specplug.tree import DraftTree, build_tree


class DepthDrafter(HeadDrafter):
    """A drafter with candidates for each depth that do not depend on the branch. Trees are the
    best-first expansion of these marginals."""

    drafts_on_device = True
    drafts_from_graphs = True

    @abstractmethod
    def candidates(
        self, requests: DraftRequests | DeviceRequests, depth: int, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the `width` likeliest tokens of each depth.

        Returns:
            Target token ids int64 [R, depth, width], best first, and their natural
            log-probabilities float32 [R, depth, width].
        """

    def draft(self, requests: DraftRequests) -> list[DraftTree]:
        depths = self.depths_of(requests)
        candidates = self.candidates(requests, max(depths), requests.width)
        return best_first_trees(*candidates, requests.budgets, depths, requests.width)

    def propose_on_device(self, requests: DeviceRequests) -> DeviceTrees:
        depth = self.max_depth_of(requests)
        return best_first_on_device(*self.candidates(requests, depth, requests.width), requests)


def best_first_trees(
    # [R, D, K] target token ids of each depth, best first, and their log-probabilities
    token_ids: torch.Tensor,
    log_probs: torch.Tensor,
    budgets: Sequence[int],
    depths: Sequence[int],
    width: int,
) -> list[DraftTree]:
    """Returns one tree per request from the candidates of its depths."""
    if can_build_best_first(token_ids.device):
        limits = (torch.tensor(values, dtype=torch.int32) for values in (budgets, depths))
        built = build_best_first(token_ids, log_probs, *limits, width)
        return DraftTree.split(*(array.numpy() for array in built))
    ids, logps = token_ids.numpy(), log_probs.numpy()
    return [
        build_tree(ids[r], logps[r], budgets[r], tree_width=width, tree_depth=depth)
        for r, depth in enumerate(depths)
    ]


def best_first_on_device(
    # [R, D, K] each, as for `best_first_trees`
    token_ids: torch.Tensor,
    log_probs: torch.Tensor,
    requests: DeviceRequests,
) -> DeviceTrees:
    """Returns the trees of `best_first_trees` without a read on the host."""
    from vllm_specplug.kernels.tree_builder_triton import build_best_first_triton

    limits = requests.budgets, requests.depths, requests.width, requests.num_nodes
    return DeviceTrees(*build_best_first_triton(token_ids, log_probs, *limits))
