# SPDX-License-Identifier: Apache-2.0
"""Where a request's tree stands in the target forward."""

from __future__ import annotations

from vllm_specplug.tree import DraftTree
from vllm_specplug.vllm_worker.step import StepRequest


def test_recomputed_tokens_before_the_root_shift_it() -> None:
    empty = DraftTree.empty()
    assert StepRequest(0, 0, 3, num_computed=9, tree=empty).context_len == 9
    assert StepRequest(2, 5, 8, num_computed=9, tree=empty).context_len == 12
