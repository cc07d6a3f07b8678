# SPDX-License-Identifier: Apache-2.0
"""Method `successors`: a tree of what followed each token earlier in the request."""

from pydantic import Field

from vllm_specplug.api import DraftPlan, Method, MethodOptions, SharedOptions, TargetInfo


class SuccessorOptions(MethodOptions):
    """Options of this method alone, keys of --speculative-config like all others."""

    memory: int = Field(default=512, ge=2, le=65536)
    """Tokens before the anchor that are looked at."""

    def resolve(self, method: str, shared: SharedOptions, target: TargetInfo) -> DraftPlan:
        return DraftPlan(depth=shared.tree_depth or 6, settings=self.memory)


METHOD = Method(
    name="successors",
    summary="what followed each token earlier in the request, most frequent first",
    options="specplug_successors:SuccessorOptions",
    drafter="specplug_successors.drafter:SuccessorDrafter",
    needs_head=False,
)
