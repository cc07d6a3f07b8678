# SPDX-License-Identifier: Apache-2.0
"""Options of LongSpec."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field

from vllm_specplug.drafting.head_path import resolve_head_path
from vllm_specplug.drafting.method import DraftPlan, MethodOptions, SharedOptions, TargetInfo
from vllm_specplug.options import MAX_TREE_NODES, option_error

DEFAULT_LEVELS = 5


@dataclass(frozen=True)
class LongSpecSettings:
    """How a LongSpec layer is run."""

    window_size: int
    """Tokens before the anchor whose keys are kept."""
    beam_widths: tuple[int, ...] | None
    """Nodes of each level of a dynamic beam; None drafts best-first under the budget."""


class LongSpecOptions(MethodOptions):
    """Window and levels."""

    window_size: int | None = Field(default=None, ge=1)
    """Number of tokens before the anchor whose keys and values the method keeps per request,
    whatever the length of the context. Default: what the head was trained with."""
    beam_widths: list[int] | None = None
    """Number of nodes per level of a tree, chosen by cumulative log-probability, together at most
    `num_speculative_tokens`; the published dynamic beam is [4, 16, 16, 16, 16], of 68 nodes.
    Default: best-first within the node budget, down to `tree_depth` (default 5)."""

    def resolve(self, method: str, shared: SharedOptions, target: TargetInfo) -> DraftPlan:
        from vllm_specplug.methods.longspec.checkpoint import inspect_longspec_head
        from vllm_specplug.methods.longspec.config import check_window

        self._check_levels(method, shared)
        path = resolve_head_path(shared.model, method)
        head = inspect_longspec_head(path, target.text_config)
        window = head.window_size if self.window_size is None else self.window_size
        if self.window_size is not None:
            check_window("speculative_config.window_size", window, target.max_model_len)
        widths = self.beam_widths
        depth = shared.tree_depth or (len(widths) if widths else DEFAULT_LEVELS)
        return DraftPlan(
            depth=min(depth, shared.num_speculative_tokens),
            head_path=str(path),
            settings=LongSpecSettings(
                min(window, target.max_model_len), tuple(widths) if widths else None
            ),
        )

    def _check_levels(self, method: str, shared: SharedOptions) -> None:
        widths = self.beam_widths
        if widths is None:
            return
        if not widths or not all(1 <= width <= MAX_TREE_NODES for width in widths):
            raise option_error(
                "beam_widths",
                widths,
                f"a list of level widths, each within 1..{MAX_TREE_NODES}",
                "Give e.g. [4, 16, 16, 16, 16]",
            )
        if sum(widths) > shared.num_speculative_tokens:
            raise option_error(
                "beam_widths",
                widths,
                f"its {sum(widths)} nodes exceed num_speculative_tokens="
                f"{shared.num_speculative_tokens}",
                f"Raise num_speculative_tokens to {sum(widths)} or more, or narrow the levels",
            )
        if shared.tree_depth is not None and shared.tree_depth != len(widths):
            raise option_error(
                "tree_depth",
                shared.tree_depth,
                f"beam_widths has {len(widths)} levels",
                "Leave tree_depth out",
            )
