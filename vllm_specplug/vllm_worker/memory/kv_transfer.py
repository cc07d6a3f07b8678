# SPDX-License-Identifier: Apache-2.0
"""KV connectors, which copy the pages of a running engine to other memory or other engines.

A connector knows a request's committed tokens and the blocks that hold them. Between steps these
blocks hold exactly the committed tokens, because compaction ends inside the step. Only a connector
that saves layer by layer reads pages during the forward.

Seam: kv_connector.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.forward_context import get_forward_context

from vllm_specplug.vllm_worker.memory.draft_cache import DraftKVLayer


class CommittedSaves:
    """Hands layers to this worker's KV connector when their pages hold committed tokens.

    During a forward with trees the rows of a request lie side by side, accepted or not. Calls of
    `save_kv_layer` in such a forward wait for `wait_for_save`, which vLLM calls at the end of the
    step. Draft layers are written after the forward and are saved there as well.

    Args:
        has_trees: returns whether the running step has trees.
    """

    def __init__(
        self,
        draft_layers: Sequence[tuple[str, DraftKVLayer]],
        has_trees: Callable[[], bool],
    ) -> None:
        connector: Any = get_kv_transfer_group()
        self._draft_layers = draft_layers
        self._has_trees = has_trees
        self._save, self._wait_for_save = connector.save_kv_layer, connector.wait_for_save
        self._waiting: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        # Attention metadata by layer of a step whose layers are saved one by one.
        self._metadata: Any = None
        connector.save_kv_layer = self.save_kv_layer
        connector.wait_for_save = self.wait_for_save

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        """Replaces the connector's method; layers call it during the forward."""
        self._metadata = get_forward_context().attn_metadata
        if self._has_trees():
            self._waiting.append((args, kwargs))
        else:
            self._save(*args, **kwargs)

    def wait_for_save(self) -> None:
        """Replaces the connector's method; vLLM calls it once per step, after `propose`."""
        waiting, self._waiting = self._waiting, []
        for args, kwargs in waiting:
            self._save(*args, **kwargs)
        metadata, self._metadata = self._metadata, None
        if metadata is not None:
            for name, layer in self._draft_layers:
                self._save(name, layer.kv_cache, metadata[name])
        self._wait_for_save()
