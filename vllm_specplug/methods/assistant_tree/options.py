# SPDX-License-Identifier: Apache-2.0
"""Options of assistant trees."""

from __future__ import annotations

from vllm_specplug.drafting.head_path import resolve_head_path
from vllm_specplug.drafting.method import DraftPlan, MethodOptions, SharedOptions, TargetInfo

DEFAULT_LEVELS = 4


class AssistantOptions(MethodOptions):
    """Assistant trees have only the shared options."""

    def resolve(self, method: str, shared: SharedOptions, target: TargetInfo) -> DraftPlan:
        from vllm_specplug.methods.assistant_tree.checkpoint import inspect_assistant

        path = resolve_head_path(shared.model, method)
        inspect_assistant(path, target.text_config)
        return DraftPlan(
            depth=min(shared.tree_depth or DEFAULT_LEVELS, shared.num_speculative_tokens),
            head_path=str(path),
        )
