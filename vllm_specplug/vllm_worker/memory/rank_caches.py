# SPDX-License-Identifier: Apache-2.0
"""The target's caches on tensor parallel ranks, each of which has only some of the KV heads."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
)

from vllm_specplug.drafting.caches import TargetCache, TargetCacheSpec
from vllm_specplug.vllm_worker.ranks import first_rank_tensor

if TYPE_CHECKING:
    from vllm_specplug.drafting.drafter import Drafter


class RankTargetCache:
    """`drafting.caches.TargetCache` over a layer whose KV heads are on several ranks.

    Each rank attends the query heads that belong to its KV heads. One all-gather per call joins
    the heads of all ranks. Nothing is summed, so the ranks get the same bits.

    With fewer KV heads than ranks, neighbouring ranks hold copies of one KV head. They divide its
    query heads, or compute the same ones if there are too few.

    Args:
        own: the cache of this rank's KV heads.
    """

    def __init__(self, own: TargetCache) -> None:
        self.own = own
        self.rank = get_tensor_model_parallel_rank()
        self.num_ranks = get_tensor_model_parallel_world_size()

    def level_attention(
        self, requests: Any, context_lens: torch.Tensor, owners: torch.Tensor
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """Returns the attention of all heads; see the protocol."""
        attend_own = self.own.level_attention(requests, context_lens, owners)

        def attend(query: torch.Tensor) -> torch.Tensor:
            heads = query.shape[1]
            parts = math.gcd(heads, self.num_ranks)
            copies, size = self.num_ranks // parts, heads // parts
            first = self.rank // copies * size
            mixed = attend_own(query[:, first : first + size].contiguous())
            gathered = tensor_model_parallel_all_gather(mixed, dim=1)
            return gathered.unflatten(1, (parts, copies, size))[:, :, 0].flatten(1, 2)

        return attend


def bind_target_caches(drafter: Drafter, caches: Mapping[TargetCacheSpec, TargetCache]) -> None:
    """Gives a drafter its caches of the target, which hold the KV heads of this rank.

    Raises:
        ValueError: if there are several ranks and the drafter does not share its rows.
    """
    if (ranks := get_tensor_model_parallel_world_size()) > 1:
        if not drafter.follows_first_rank:
            raise ValueError(
                f"tensor_parallel_size={ranks} cannot be used with {type(drafter).__name__}, which "
                "drafts from the target's caches and does not share its rows (see "
                "TargetCaches.follows_first_rank). Use --tensor-parallel-size 1."
            )
        caches = {spec: RankTargetCache(own) for spec, own in caches.items()}
        drafter.first_rank = first_rank_tensor
    drafter.bind_target_caches([caches[spec] for spec in drafter.target_cache_specs()])
