# SPDX-License-Identifier: Apache-2.0
"""Options of TokenSwift."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from vllm_specplug.drafting.head_path import resolve_head_path
from vllm_specplug.drafting.method import DraftPlan, MethodOptions, SharedOptions, TargetInfo
from vllm_specplug.options import option_error

DraftSource = Literal["auto", "self", "heads", "ngrams"]


@dataclass(frozen=True)
class TokenSwiftSettings:
    """How the target drafts for itself, resolved."""

    source: DraftSource
    kv_budget: int
    sink_size: int
    kv_refresh: int
    max_requests: int
    gamma: int
    tree_widths: tuple[int, ...] | None


class TokenSwiftOptions(MethodOptions):
    """Sources of drafts, partial caches, shape of the heads' tree."""

    draft_source: DraftSource = "auto"
    """What the method drafts from: "self" runs the target over a partial cache and its heads on
    top, "heads" runs the heads on the last verified position, "ngrams" only looks up n-grams.
    "auto" measures which one gives the most tokens per second and uses it."""
    kv_budget: int = Field(default=4096, ge=1)
    """Number of context tokens that the draft forward attends to: the first `sink_size` and those
    that matter most to each layer and KV head. Must be more than `sink_size` plus
    `num_speculative_tokens`."""
    sink_size: int = Field(default=16, ge=0)
    """Number of tokens at the start of the context that are always kept."""
    kv_refresh: int | None = Field(default=None, ge=1)
    """Number of generated tokens after which the kept tokens are selected again; until then, new
    tokens replace the least important ones. Default and maximum: `kv_budget` - `sink_size`."""
    self_draft_requests: int = Field(default=4, ge=1, le=1024)
    """Number of requests whose partial caches are kept at once, which bounds its memory. When more
    requests than this exceed `kv_budget`, the method drafts from heads and n-grams."""
    gamma: int | None = Field(default=None, ge=1, le=17)
    """Number of consecutive tokens that the base prediction and heads draft. Default: the number of
    heads in the checkpoint plus one."""
    tree_widths: list[int] | None = None
    """Number of children per node, 1..64, on each of at most `gamma` levels; the published static
    tree is [1, 3, 3, 3], whose 40 nodes need `num_speculative_tokens` 40 or more.
    Default: best-first within the node budget."""

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
                f"draft_source={settings.source!r}" if settings.source in ("self", "auto") else None
            ),
            settings=settings,
        )

    def settings(self, shared: SharedOptions, num_heads: int) -> TokenSwiftSettings:
        """The options worked out for a checkpoint of `num_heads` heads.

        Raises:
            ValueError: for a combination that cannot work, naming the option.
        """
        if self.draft_source == "ngrams" and shared.ngram_topk == 0:
            raise option_error(
                "ngram_topk",
                shared.ngram_topk,
                'draft_source="ngrams" drafts by n-grams only, so 1..16',
                "Leave ngram_topk out or choose another draft_source",
            )
        least = self.sink_size + shared.num_speculative_tokens + 1
        if self.kv_budget < least:
            raise option_error(
                "kv_budget",
                self.kv_budget,
                f"the budget must hold the sink and a tree: at least sink_size={self.sink_size} + "
                f"num_speculative_tokens={shared.num_speculative_tokens} + 1 = {least}",
                f"Raise kv_budget to {least} or more; 1024 to 4096 is usual",
            )
        most = self.kv_budget - self.sink_size
        if self.kv_refresh is not None and self.kv_refresh > most:
            raise option_error(
                "kv_refresh",
                self.kv_refresh,
                f"after kv_budget - sink_size = {most} tokens nothing selected is left",
                f"Choose 1..{most}, or leave kv_refresh out",
            )
        gamma = num_heads + 1 if self.gamma is None else self.gamma
        if gamma > num_heads + 1:
            raise option_error(
                "gamma",
                self.gamma,
                f"the checkpoint has {num_heads} heads, which with the base prediction draft "
                f"{num_heads + 1} tokens",
                f"Choose 1..{num_heads + 1}, or leave gamma out",
            )
        widths = self.tree_widths
        if widths is not None:
            legal = f"a list of 1 to gamma={gamma} numbers, each 1..64"
            if not 1 <= len(widths) <= gamma or not all(1 <= width <= 64 for width in widths):
                raise option_error(
                    "tree_widths", widths, legal, "The published tree is [1, 3, 3, 3]"
                )
            nodes, level = 0, 1
            for width in widths:
                level *= width
                nodes += level
            if nodes > shared.num_speculative_tokens:
                raise option_error(
                    "tree_widths",
                    widths,
                    f"this tree has {nodes} nodes, more than num_speculative_tokens="
                    f"{shared.num_speculative_tokens}",
                    f"Raise num_speculative_tokens to {nodes} or narrow the tree",
                )
        return TokenSwiftSettings(
            source=self.draft_source,
            kv_budget=self.kv_budget,
            sink_size=self.sink_size,
            kv_refresh=self.kv_refresh or most,
            max_requests=self.self_draft_requests,
            gamma=gamma,
            tree_widths=None if widths is None else tuple(widths),
        )
