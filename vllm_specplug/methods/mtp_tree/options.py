# SPDX-License-Identifier: Apache-2.0
"""Options of multi-token-prediction trees."""

from __future__ import annotations

from vllm_specplug.drafting.head_path import resolve_head_path
from vllm_specplug.drafting.method import DraftPlan, MethodOptions, SharedOptions, TargetInfo

DEFAULT_LEVELS = 4


class MtpOptions(MethodOptions):
    """MTP trees have only the shared options. `model` defaults to the target, whose checkpoint
    holds the module."""

    def resolve(self, method: str, shared: SharedOptions, target: TargetInfo) -> DraftPlan:
        from vllm_specplug.methods.mtp_tree.checkpoint import inspect_mtp_module

        path = resolve_head_path(shared.model or str(target.model_config.model), method)
        inspect_mtp_module(path, target.text_config)
        return DraftPlan(
            depth=min(shared.tree_depth or DEFAULT_LEVELS, shared.num_speculative_tokens),
            head_path=str(path),
        )
