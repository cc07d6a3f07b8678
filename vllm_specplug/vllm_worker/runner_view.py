# SPDX-License-Identifier: Apache-2.0
"""What both of vLLM's model runners have under the same names.

What calibration, draft forwards and drafters' caches need to know of a runner, they ask here and
get as plain values; each runner's own `RunnerState` adds what differs.

Seam: runner_state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from vllm.forward_context import set_forward_context
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import FullAttentionSpec

from vllm_specplug.drafting.drafter import DrafterOptions
from vllm_specplug.vllm_worker.draft_cache import DraftKVLayer

if TYPE_CHECKING:
    from vllm_specplug.drafting.drafter import Drafter


class RunnerView(ABC):
    """A model runner, or a subclass's instance, seen from outside.

    Args:
        runner: vLLM's runner with one of the package's mixins.
    """

    name: str
    """Which of vLLM's runners it is: their forwards take different times."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.rehearsal_requests = 0
        """Rows of the block table that a draft forward without requests may read."""

    # -- the engine -----------------------------------------------------------------------

    @property
    def vllm_config(self) -> Any:
        return self.runner.vllm_config

    @property
    def device(self) -> torch.device:
        return self.runner.device

    @property
    def dtype(self) -> torch.dtype:
        return self.runner.dtype

    @property
    def max_model_len(self) -> int:
        return self.runner.max_model_len

    @property
    def max_requests(self) -> int:
        """Most requests of a batch."""
        return self.runner.max_num_reqs

    @property
    def max_rows(self) -> int:
        """Most rows of a forward."""
        return self.runner.max_num_tokens

    @property
    def drafter(self) -> Drafter:
        return self.runner.drafter.drafter

    @property
    def drafter_options(self) -> DrafterOptions:
        return self.runner.drafter.options

    # -- forwards beside the step ---------------------------------------------------------

    @abstractmethod
    def dummy_forward(self, rows: int, context: int) -> torch.Tensor:
        """A forward of `rows` rows that attend `context` tokens; hidden states [>= rows, H]."""

    @abstractmethod
    def wait_for_device(self) -> None:
        """Returns when the device is idle."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The target's logits [rows, V] of hidden states [rows, H]."""
        return self.runner.model.compute_logits(hidden)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, attention: dict[str, Any]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The target's forward with `attention` metadata by layer; writes no cache.

        Returns:
            Hidden states [rows, H] and those of the layers that the drafter reads.
        """
        with set_forward_context(
            attention, self.vllm_config, num_tokens=len(input_ids), slot_mapping={}
        ):
            return self.runner.model(
                input_ids=input_ids,
                positions=positions,
                intermediate_tensors=None,
                inputs_embeds=None,
            )

    # -- caches ---------------------------------------------------------------------------

    def cache_groups(self) -> int:
        """KV cache groups of the engine."""
        return len(self.runner.kv_cache_config.kv_cache_groups)

    def target_caches(self) -> dict[str, torch.Tensor]:
        """The target's caches by layer, in order; vLLM's pages. Needs one cache group."""
        context = self.runner.compilation_config.static_forward_context
        return {
            name: context[name].kv_cache
            for name in self.runner.kv_cache_config.kv_cache_groups[0].layer_names
            if not isinstance(context[name], DraftKVLayer)
        }

    def last_layer_cache(self) -> torch.Tensor:
        """The cache of the target's last attention layer."""
        caches = self.target_caches()
        return caches[max(caches, key=extract_layer_index)]

    def full_attention_pages(self) -> list[tuple[int, int]]:
        """(tokens, bytes) of a page of each layer with full attention, draft layers included."""
        specs = self.runner.get_kv_cache_spec().values()
        return [
            (s.block_size, s.page_size_bytes) for s in specs if isinstance(s, FullAttentionSpec)
        ]

    @abstractmethod
    def block_table(self) -> torch.Tensor:
        """int32 [>= B, max_blocks] of the batch, in its order, on the device."""
