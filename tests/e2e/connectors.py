# SPDX-License-Identifier: Apache-2.0
"""A KV connector that saves every step's blocks layer by layer, in this process's memory.

A step saves the blocks of its rows, so a later step overwrites the rows of rejected drafts, as in
the pages. A request whose tokens begin like those of a saved one loads its whole blocks: a second
turn, and a request that was preempted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)

NAME = "MemoryConnector"


def transfer_config() -> dict[str, Any]:
    """vLLM's `kv_transfer_config` with this connector."""
    return {
        "kv_connector": NAME,
        "kv_connector_module_path": __name__,
        "kv_role": "kv_both",
    }


@dataclass
class _Span:
    """Positions `first` to `end` - 1 of a request, in these blocks; a load copies `source`'s."""

    req_id: str
    block_ids: list[int]
    first: int
    end: int
    source: str = ""

    def numbers(self, block_size: int) -> range:
        """Numbers of the blocks that hold these positions."""
        return range(self.first // block_size, -(-self.end // block_size))


@dataclass
class _Step(KVConnectorMetadata):
    saves: list[_Span] = field(default_factory=list)
    loads: list[_Span] = field(default_factory=list)


@dataclass(repr=False)
class Store:
    """What both sides of all connectors share, and counts."""

    # [Hkv, block size, 2 * Dh] by request, layer and number of the block in the request. Blocks
    # move whole: kernels may pack the rows of a block.
    blocks: dict[str, dict[str, dict[int, torch.Tensor]]] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    loaded_tokens: int = 0
    saved_layers: set[str] = field(default_factory=set)


class MemoryConnector(KVConnectorBase_V1):
    """See the module."""

    store: ClassVar[Store] = Store()

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._block_size = vllm_config.cache_config.block_size
        self._blocks: dict[str, list[int]] = {}
        # Positions to load, by request, until the step that runs it is built.
        self._to_load: dict[str, tuple[str, int, int]] = {}
        self._caches: dict[str, torch.Tensor] = {}

    # -- scheduler ---------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed: int) -> tuple[int, bool]:
        wanted = list(request.all_token_ids)
        known = dict(self.store.tokens)
        if request.request_id in self.store.blocks:
            # It was preempted, so it has blocks of its own.
            known[request.request_id] = wanted
        best, source = 0, ""
        for req_id, tokens in known.items():
            same = 0
            for a, b in zip(wanted[:-1], tokens, strict=False):
                if a != b:
                    break
                same += 1
            if same > best:
                best, source = same, req_id
        end = best // self._block_size * self._block_size
        if end <= num_computed:
            return 0, False
        self._to_load[request.request_id] = source, num_computed, end
        return end - num_computed, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external: int) -> None:
        if not num_external:
            self._to_load.pop(request.request_id, None)

    def build_connector_meta(self, scheduler_output: Any) -> _Step:
        step, output = _Step(), scheduler_output
        for new in output.scheduled_new_reqs:
            self._begin(step, new.req_id, list(new.block_ids[0]), new.num_computed_tokens, output)
        cached = output.scheduled_cached_reqs
        for i, req_id in enumerate(cached.req_ids):
            blocks, computed = cached.new_block_ids[i], cached.num_computed_tokens[i]
            if req_id in cached.resumed_req_ids:
                self._begin(step, req_id, list(blocks[0]), computed, output)
                continue
            if blocks:
                self._blocks[req_id] += blocks[0]
            self._add_save(step, req_id, computed, output)
        return step

    def _begin(
        self, step: _Step, req_id: str, block_ids: list[int], computed: int, output: Any
    ) -> None:
        self._blocks[req_id] = block_ids
        if req_id in self._to_load:
            source, first, end = self._to_load.pop(req_id)
            step.loads.append(_Span(req_id, block_ids, first, end, source))
        self._add_save(step, req_id, computed, output)

    def _add_save(self, step: _Step, req_id: str, computed: int, output: Any) -> None:
        end = computed + output.num_scheduled_tokens[req_id]
        step.saves.append(_Span(req_id, list(self._blocks[req_id]), computed, end))

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        self.store.tokens[request.request_id] = list(request.all_token_ids[:-1])
        return False, None

    # -- worker ------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._caches = dict(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for span in self._get_connector_metadata().loads:
            store = self.store
            store.loaded_tokens += span.end - span.first
            for layer, cache in self._caches.items():
                own = store.blocks.setdefault(span.req_id, {}).setdefault(layer, {})
                for number in span.numbers(self._block_size):
                    own[number] = store.blocks[span.source][layer][number]
                    cache[span.block_ids[number]] = own[number]

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kw: Any) -> None:
        self.store.saved_layers.add(layer_name)
        cache = self._caches[layer_name]
        for span in self._get_connector_metadata().saves:
            own = self.store.blocks.setdefault(span.req_id, {}).setdefault(layer_name, {})
            for number in span.numbers(self._block_size):
                own[number] = cache[span.block_ids[number]].clone()

    def wait_for_save(self) -> None:
        pass
