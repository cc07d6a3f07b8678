# SPDX-License-Identifier: Apache-2.0
"""The public API for authors of drafting methods; `docs/adding_a_method.md` is the guide.

These names keep their meaning while `API_VERSION` stays the same. Everything else in this package
may change with any release.
"""

from vllm_specplug.drafting.caches import (
    BlockAttention,
    DraftCache,
    DraftCacheSpec,
    DraftWindow,
    PartialCacheSpec,
    RowAttention,
    TargetCache,
    TargetCacheSpec,
    TargetForward,
    WindowSpec,
    WindowTokens,
)
from vllm_specplug.drafting.committed_tokens import CommittedTokens
from vllm_specplug.drafting.drafter import Drafter, DrafterOptions, TargetWeights
from vllm_specplug.drafting.head_files import HeadFiles, read_head_files
from vllm_specplug.drafting.head_path import resolve_head_path
from vllm_specplug.drafting.late_context import LateContextDrafter
from vllm_specplug.drafting.method import (
    API_VERSION,
    Capability,
    DraftPlan,
    Method,
    MethodOptions,
    SharedOptions,
    TargetInfo,
)
from vllm_specplug.drafting.ngram import NgramBranches, ngram_branches
from vllm_specplug.drafting.requests import DraftPenalties, DraftRequests
from vllm_specplug.options import option_error
from vllm_specplug.registry import get_method, method_names, register
from vllm_specplug.tree import DraftTree, build_tree, merge_trees
from vllm_specplug.tree.beam import draft_level_by_level

__all__ = [
    "API_VERSION",
    "BlockAttention",
    "Capability",
    "CommittedTokens",
    "DraftCache",
    "DraftCacheSpec",
    "DraftPenalties",
    "DraftPlan",
    "DraftRequests",
    "DraftTree",
    "DraftWindow",
    "Drafter",
    "DrafterOptions",
    "HeadFiles",
    "LateContextDrafter",
    "Method",
    "MethodOptions",
    "NgramBranches",
    "PartialCacheSpec",
    "RowAttention",
    "SharedOptions",
    "TargetCache",
    "TargetCacheSpec",
    "TargetForward",
    "TargetInfo",
    "TargetWeights",
    "WindowSpec",
    "WindowTokens",
    "build_tree",
    "draft_level_by_level",
    "get_method",
    "merge_trees",
    "method_names",
    "ngram_branches",
    "option_error",
    "read_head_files",
    "register",
    "resolve_head_path",
]
