# SPDX-License-Identifier: Apache-2.0
"""Options of TokenSwift."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from vllm_specplug.drafting.caches import PartialCacheSpec
from vllm_specplug.drafting.head_path import resolve_head_path
from vllm_specplug.drafting.method import DraftPlan, MethodOptions, SharedOptions, TargetInfo
from vllm_specplug.options import option_error

# Number of first tokens that a partial cache always keeps as attention sinks. Later tokens are
# selected by their scores.
SINK_SIZE = 16


class TokenSwiftOptions(MethodOptions):
    """Options of TokenSwift."""

    draft_source: Literal["heads", "self"] = "heads"
    """What the method drafts from: "heads" runs the heads on the last verified position, "self"
    runs the target over a partial cache and its heads on top, which is meant for long contexts."""
    kv_budget: int = Field(default=4096, ge=1)
    """Number of context tokens that the draft forward attends to: the first 16 (at most an eighth
    of `kv_budget`) and the tokens that matter most to each layer and KV head. It must hold the
    first tokens and `num_speculative_tokens`."""
    self_draft_requests: int = Field(default=4, ge=1, le=1024)
    """Maximum number of requests with a partial cache, which bounds the caches' memory. If more
    requests than this are longer than `kv_budget`, the method drafts from the heads."""

    def resolve(self, method: str, shared: SharedOptions, target: TargetInfo) -> DraftPlan:
        from vllm_specplug.methods.tokenswift.head import inspect_heads

        path = resolve_head_path(shared.model, method)
        heads = inspect_heads(path, target.text_config)
        spec = self.partial_cache(shared)
        # The base prediction and the heads.
        deepest = 1 + heads.medusa_heads
        return DraftPlan(
            depth=min(shared.tree_depth or deepest, deepest, shared.num_speculative_tokens),
            head_path=str(path),
            hidden_layers=(target.text_config.num_hidden_layers - 1,),
            target_forward_option=None if spec is None else f"draft_source={self.draft_source!r}",
            settings=spec,
        )

    def partial_cache(self, shared: SharedOptions) -> PartialCacheSpec | None:
        """Returns the partial caches of the target's forward; None for drafts from the heads.

        Raises:
            ValueError: for a combination that cannot work, naming the option.
        """
        sink = min(SINK_SIZE, self.kv_budget // 8)
        min_budget = sink + shared.num_speculative_tokens + 1
        if self.kv_budget < min_budget:
            raise option_error(
                "kv_budget",
                self.kv_budget,
                f"the budget must hold {sink} tokens of the context's start and a tree: more than "
                f"{sink} + num_speculative_tokens={shared.num_speculative_tokens}",
                "Raise kv_budget; 1024 to 4096 is usual",
            )
        if self.draft_source == "heads":
            return None
        options = ("self_draft_requests", "kv_budget")
        return PartialCacheSpec(self.kv_budget, sink, self.self_draft_requests, options)
