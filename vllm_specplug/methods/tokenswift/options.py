# SPDX-License-Identifier: Apache-2.0
"""Options of TokenSwift."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from vllm_specplug.drafting.head_path import resolve_head_path
from vllm_specplug.drafting.method import DraftPlan, MethodOptions, SharedOptions, TargetInfo
from vllm_specplug.options import option_error

DraftSource = Literal["heads", "self"]

# Number of first tokens that a partial cache always keeps as attention sinks. Later tokens are
# selected by their scores.
SINK_SIZE = 16


@dataclass(frozen=True)
class TokenSwiftSettings:
    """Resolved options of TokenSwift."""

    source: DraftSource
    kv_budget: int
    sink_size: int
    max_requests: int
    gamma: int
    """Number of consecutive tokens that the base prediction and the heads draft."""


class TokenSwiftOptions(MethodOptions):
    """Options of TokenSwift."""

    draft_source: DraftSource = "heads"
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
        settings = self.settings(shared, heads.medusa_heads)
        depth = min(shared.tree_depth or settings.gamma, settings.gamma)
        return DraftPlan(
            depth=min(depth, shared.num_speculative_tokens),
            head_path=str(path),
            hidden_layers=(target.text_config.num_hidden_layers - 1,),
            target_forward_option=(
                f"draft_source={settings.source!r}" if settings.source == "self" else None
            ),
            settings=settings,
        )

    def settings(self, shared: SharedOptions, num_heads: int) -> TokenSwiftSettings:
        """The resolved options for a checkpoint with `num_heads` heads.

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
        return TokenSwiftSettings(
            source=self.draft_source,
            kv_budget=self.kv_budget,
            sink_size=sink,
            max_requests=self.self_draft_requests,
            gamma=num_heads + 1,
        )
