# SPDX-License-Identifier: Apache-2.0
"""Options of EAGLE-3 trees."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field

from vllm_specplug.drafting.head_path import resolve_head_path
from vllm_specplug.drafting.method import DraftPlan, MethodOptions, SharedOptions, TargetInfo
from vllm_specplug.options import MAX_TREE_NODES

DEFAULT_LEVELS = 5
DEFAULT_FRONTIER = 16


@dataclass(frozen=True)
class Eagle3Settings:
    """How an EAGLE-3 head is run."""

    expand_width: int
    """Nodes of one tree whose children are drafted per level."""
    target_layers: tuple[int, ...]
    """Decoder layers of the target that the head reads, from 0."""


class Eagle3Options(MethodOptions):
    """Levels, and the layers a head reads."""

    expand_width: int | None = Field(default=None, ge=1, le=MAX_TREE_NODES)
    """Number of nodes per level whose children are drafted: those of highest accumulated
    log-probability. The published dynamic beam is 10, with `tree_width` 10. Default: 16, which is
    best-first for node budgets up to 16 and close to it above."""
    aux_layers: list[int] | None = None
    """Decoder layers of the target (first layer: 0) whose outputs the head reads, ascending.
    Default: what the checkpoint says. Trainers number them in two ways, which a checkpoint does
    not always tell apart."""

    def resolve(self, method: str, shared: SharedOptions, target: TargetInfo) -> DraftPlan:
        from vllm_specplug.methods.eagle3_tree.checkpoint import inspect_eagle3_head

        path = resolve_head_path(shared.model, method)
        head = inspect_eagle3_head(path, target.text_config, target_layers=self.aux_layers)
        return DraftPlan(
            depth=min(shared.tree_depth or DEFAULT_LEVELS, shared.num_speculative_tokens),
            head_path=str(path),
            hidden_layers=head.target_layer_ids,
            settings=Eagle3Settings(
                self.expand_width or DEFAULT_FRONTIER, tuple(head.target_layer_ids)
            ),
        )
