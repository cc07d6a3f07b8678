# SPDX-License-Identifier: Apache-2.0
"""Options of n-gram trees: the shared options except `model`."""

from __future__ import annotations

from vllm_specplug.drafting.method import DraftPlan, MethodOptions, SharedOptions, TargetInfo
from vllm_specplug.options import option_error


class NgramTreeOptions(MethodOptions):
    """N-gram trees have only the shared options."""

    def resolve(self, method: str, shared: SharedOptions, target: TargetInfo) -> DraftPlan:
        if shared.model is not None:
            raise option_error(
                "model",
                shared.model,
                f"method {method!r} has no draft head",
                "Leave model out, or choose a method with a head",
            )
        if not shared.ngram_topk:
            raise option_error(
                "ngram_topk",
                shared.ngram_topk,
                f"method {method!r} drafts by n-grams only, so 1..16",
                "Leave ngram_topk out or give at least 1",
            )
        return DraftPlan(depth=shared.tree_depth or shared.num_speculative_tokens)
