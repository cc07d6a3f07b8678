# SPDX-License-Identifier: Apache-2.0
"""The target's own layers as a draft model: one token per request over a partial cache.

The draft calls vLLM's model again, under a forward context whose attention metadata is
`PartialAttention`. The tree backend passes it every layer's query, key and value. No slots are
mapped, so nothing is written to the paged cache. Any model that vLLM serves with plain attention
layers works, eager or compiled.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from vllm.logger import init_logger

from vllm_specplug.drafting.caches import PartialCacheSpec
from vllm_specplug.drafting.device_requests import DeviceRequests
from vllm_specplug.drafting.requests import DraftRequests
from vllm_specplug.kernels import TreeAttnMetadata, causal_words, tree_attn
from vllm_specplug.vllm_attention.cpu import cpu_kv_layout
from vllm_specplug.vllm_attention.tree_rows import DraftAttention
from vllm_specplug.vllm_worker.memory.partial_cache import PartialCache, PartialContext
from vllm_specplug.vllm_worker.runner_view import RunnerView

logger = init_logger("vllm.specplug.self_draft")


class PartialAttention(DraftAttention):
    """Attention of one draft forward, layer by layer.

    Requests whose context fits the budget read the paged cache. The others read their region of the
    pool; when a choice is due, the layer's own query chooses its positions.
    """

    def __init__(
        self,
        pool: PartialCache,
        layer_index: dict[str, int],
        requests: DraftRequests,
        # int32 [B, max_blocks]
        block_table: torch.Tensor,
    ) -> None:
        self.pool, self.layer_index = pool, layer_index
        fits = [length <= pool.budget for length in requests.context_lens]
        self.full = [r for r, fit in enumerate(fits) if fit]
        self.partial = [r for r, fit in enumerate(fits) if not fit]
        # Requests to choose for: query row, context, block table row.
        self.due: list[tuple[int, PartialContext, torch.Tensor]] = []
        regions = []
        for r in self.partial:
            row = block_table[requests.req_indices[r]]
            context, due = pool.advance(requests.req_ids[r], requests.context_lens[r], row)
            regions.append(context.index)
            if due:
                self.due.append((r, context, row))
        self.full_metadata = _one_row_each(
            self.full,
            [requests.req_indices[r] for r in self.full],
            [requests.context_lens[r] for r in self.full],
            block_table,
        )
        self.partial_metadata = _one_row_each(
            self.partial, regions, [pool.budget] * len(regions), pool.block_table
        )

    def attend(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        index, pool = self.layer_index[layer.layer_name], self.pool
        for row, context, blocks in self.due:
            pool.choose(index, context, query[row], blocks)
        for rows, metadata, views in (
            (self.full, self.full_metadata, pool.target_views),
            (self.partial, self.partial_metadata, pool.views),
        ):
            if rows:
                tree_attn(
                    query,
                    *views[index],
                    output,
                    metadata,
                    layer.impl.scale,
                    pool.layout,
                    tail_key=key[rows],
                    tail_value=value[rows],
                )


def _one_row_each(
    rows: list[int], req_indices: list[int], context_lens: list[int], block_table: torch.Tensor
) -> TreeAttnMetadata:
    """Returns the metadata of trees of one row each."""
    counts = [1] * len(rows)
    return TreeAttnMetadata.build(
        req_indices, rows, counts, context_lens, causal_words(counts), block_table
    )


class SelfDraft:
    """`drafting.drafter.TargetForward` over a vLLM model runner on CPU.

    Args:
        state: the model runner, whose caches must exist.
    """

    def __init__(self, state: RunnerView, spec: PartialCacheSpec) -> None:
        self.state, self.spec = state, spec
        caches = state.target_caches()
        self.layer_index = {name: i for i, name in enumerate(caches)}
        self.pool = self.make_pool(list(caches.values()), regions_of(state, spec))
        logger.info(
            "Partial caches: %d requests with %d tokens each, %.1f MiB",
            self.pool.max_requests,
            spec.budget,
            sum(cache.nbytes for cache in self.pool.caches) / 2**20,
        )

    def make_pool(self, kv_caches: list[torch.Tensor], max_requests: int) -> Any:
        """Returns the partial caches of `max_requests` requests."""
        layout = cpu_kv_layout(kv_caches[0])
        return PartialCache(kv_caches, layout, self.spec.budget, self.spec.sink, max_requests)

    def can_run(self, requests: DraftRequests | DeviceRequests) -> bool:
        """Whether the pool has room for all of these requests at once."""
        assert isinstance(requests, DraftRequests)
        return self.has_room(requests.context_lens)

    def has_room(self, context_lens: Iterable[int]) -> bool:
        """Whether the pool has room for the contexts that exceed the budget."""
        beyond = sum(length > self.spec.budget for length in context_lens)
        return beyond <= self.pool.max_requests

    def forget(self, req_ids: Iterable[str]) -> None:
        """Drops partial caches of requests that ended or were preempted."""
        self.pool.forget(req_ids)

    @property
    def captures(self) -> bool:
        """Returns False: on a CPU nothing is captured."""
        return False

    def prepare(self, requests: DeviceRequests) -> bool:
        """Returns False, as nothing is captured."""
        return False

    def __call__(
        self, requests: DraftRequests | DeviceRequests
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs each request's anchor; see the protocol."""
        assert isinstance(requests, DraftRequests)
        count = len(requests)
        attention = PartialAttention(
            self.pool, self.layer_index, requests, self.state.block_table()
        )
        input_ids = torch.tensor(requests.anchors, dtype=torch.int32)
        positions = torch.tensor(requests.context_lens, dtype=torch.int64)
        hidden, aux = self.state.forward(
            input_ids,
            positions,
            dict.fromkeys(self.layer_index, attention),
            requests.req_indices,
        )
        return hidden[:count], aux[0][:count]


def partial_cache_bytes(state: RunnerView, spec: PartialCacheSpec) -> int:
    """Returns the bytes that the runner's partial caches will take."""
    requests = regions_of(state, spec)
    # A device needs one more page, for writes that go nowhere; a CPU only if it has no region.
    return sum(
        (requests * -(-spec.budget // tokens) + 1) * num_bytes
        for tokens, num_bytes in state.full_attention_pages()
    )


def regions_of(state: RunnerView, spec: PartialCacheSpec) -> int:
    """Returns how many requests have a partial cache at once; 0 if no context can outgrow the
    budget."""
    return 0 if state.max_model_len <= spec.budget else spec.max_requests
