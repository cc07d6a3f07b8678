# SPDX-License-Identifier: Apache-2.0
"""Options of EAGLE-3 trees."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_specplug.drafting.head_path import resolve_head_path
from vllm_specplug.drafting.method import DraftPlan, MethodOptions, SharedOptions, TargetInfo

DEFAULT_LEVELS = 5


@dataclass(frozen=True)
class Eagle3Settings:
    """Resolved options of an EAGLE-3 head."""

    target_layers: tuple[int, ...]
    """Zero-based decoder layers of the target that the head reads."""


class Eagle3Options(MethodOptions):
    """Options of EAGLE-3 heads."""

    aux_layers: list[int] | None = None
    """Zero-based decoder layers of the target whose outputs the head reads, in ascending order.
    Default: the checkpoint's layers. Trainers number layers in two ways, and a checkpoint does not
    always tell which one it uses."""

    def resolve(self, method: str, shared: SharedOptions, target: TargetInfo) -> DraftPlan:
        from vllm_specplug.methods.eagle3_tree.checkpoint import inspect_eagle3_head

        path = resolve_head_path(shared.model, method)
        head = inspect_eagle3_head(path, target.text_config, target_layers=self.aux_layers)
        return DraftPlan(
            depth=min(shared.tree_depth or DEFAULT_LEVELS, shared.num_speculative_tokens),
            head_path=str(path),
            hidden_layers=head.target_layer_ids,
            settings=Eagle3Settings(tuple(head.target_layer_ids)),
        )
