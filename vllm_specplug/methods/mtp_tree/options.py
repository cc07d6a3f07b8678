# SPDX-License-Identifier: Apache-2.0
"""Options of multi-token-prediction trees."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field

from vllm_specplug.drafting.head_path import resolve_head_path
from vllm_specplug.drafting.method import DraftPlan, MethodOptions, SharedOptions, TargetInfo
from vllm_specplug.options import MAX_TREE_NODES

DEFAULT_LEVELS = 4
DEFAULT_FRONTIER = 16


@dataclass(frozen=True)
class MtpSettings:
    """How a module is run."""

    expand_width: int
    """Nodes of one tree whose children are drafted per level."""


class MtpOptions(MethodOptions):
    """Width of a level. `model` may be left out: the module is in the target's checkpoint."""

    expand_width: int | None = Field(default=None, ge=1, le=MAX_TREE_NODES)
    """Number of nodes per level whose children are drafted: those of highest accumulated
    log-probability. Default: 16."""

    def resolve(self, method: str, shared: SharedOptions, target: TargetInfo) -> DraftPlan:
        from vllm_specplug.methods.mtp_tree.checkpoint import inspect_mtp_module

        path = resolve_head_path(shared.model or str(target.model_config.model), method)
        inspect_mtp_module(path, target.text_config)
        return DraftPlan(
            depth=min(shared.tree_depth or DEFAULT_LEVELS, shared.num_speculative_tokens),
            head_path=str(path),
            settings=MtpSettings(self.expand_width or DEFAULT_FRONTIER),
        )
