# SPDX-License-Identifier: Apache-2.0
"""Options of EAGLE-3 trees."""

from __future__ import annotations

from vllm_specplug.drafting.head_path import resolve_head_path
from vllm_specplug.drafting.method import (
    Capability,
    DraftPlan,
    MethodOptions,
    SharedOptions,
    TargetInfo,
)
from vllm_specplug.options import check_tree_depth

DEFAULT_LEVELS = 5
_PARALLEL = "vllm_specplug.methods.eagle3_tree.drafter:ParallelDrafter"


class Eagle3Options(MethodOptions):
    """EAGLE-3 trees have only the shared options."""

    def resolve(self, method: str, shared: SharedOptions, target: TargetInfo) -> DraftPlan:
        from vllm_specplug.methods.eagle3_tree.checkpoint import inspect_eagle3_head

        path = resolve_head_path(shared.model, method)
        head = inspect_eagle3_head(path, target.text_config)
        depth = shared.tree_depth or DEFAULT_LEVELS
        if head.num_draft_tokens is not None:
            depth = check_tree_depth(
                shared.tree_depth,
                head.num_draft_tokens,
                f"this head was trained to draft {head.num_draft_tokens} tokens at once",
            )
        return DraftPlan(
            depth=min(depth, shared.num_speculative_tokens),
            head_path=str(path),
            hidden_layers=head.target_layer_ids,
            needs=frozenset({Capability.CONTEXT_WINDOW} if any(head.windows) else ()),
            drafter=None if head.mask_token_id is None else _PARALLEL,
        )
