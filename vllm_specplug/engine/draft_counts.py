# SPDX-License-Identifier: Apache-2.0
"""Makes vLLM count the nodes of trees as drafts where the scheduler works ahead.

Seam: draft_counts.

vLLM takes every reserved row for a draft. A tree may have fewer nodes than its reservation,
or none. The acceptance rate and the acceptance length would be too low, in `/metrics` and in the
answer (`--per-request-spec-decode-metrics`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

from vllm_specplug.engine.spec_config import tree_config


@dataclass
class TreeRequestMetrics(RequestSpecDecodeMetrics):
    """vLLM's statistics of one request, without the steps in which it had no tree."""

    def observe(self, num_draft_tokens: int, num_accepted: int, detailed: bool = False) -> None:
        if num_draft_tokens:
            super().observe(num_draft_tokens, num_accepted, detailed)


def exclude_unused_rows(scheduler_output: Any, nodes: Mapping[str, int]) -> None:
    """Counts the rows that a step reserved beyond its trees as invalid drafts.

    Args:
        nodes: number of nodes of each request's tree; none for a request without a tree.
    """
    invalid = dict(scheduler_output.num_invalid_spec_tokens or {})
    for req_id, drafts in scheduler_output.scheduled_spec_decode_tokens.items():
        unused = max(0, len(drafts) - nodes.get(req_id, 0))
        # The grammar's count already includes the unused rows.
        invalid[req_id] = max(unused, invalid.get(req_id, 0))
    scheduler_output.num_invalid_spec_tokens = invalid


def wrap_make_spec_decoding_stats(original: Callable[..., Any]) -> Callable[..., Any]:
    """`Scheduler.make_spec_decoding_stats`, which skips a draft without nodes."""

    def make_spec_decoding_stats(
        self: Any,
        spec_decoding_stats: Any,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_invalid_spec_tokens: dict[str, int] | None,
        request_id: str,
    ) -> Any:
        invalid = (num_invalid_spec_tokens or {}).get(request_id, 0)
        if tree_config(self.vllm_config) is not None and num_draft_tokens == invalid:
            return spec_decoding_stats
        return original(
            self,
            spec_decoding_stats,
            num_draft_tokens=num_draft_tokens,
            num_accepted_tokens=num_accepted_tokens,
            num_invalid_spec_tokens=num_invalid_spec_tokens,
            request_id=request_id,
        )

    return make_spec_decoding_stats


def wrap_add_request(original: Callable[..., None]) -> Callable[..., None]:
    """`Scheduler.add_request`, after which a request counts only its trees."""

    def add_request(self: Any, request: Any) -> None:
        original(self, request)
        if request.spec_decode_metrics is not None and tree_config(self.vllm_config) is not None:
            request.spec_decode_metrics = TreeRequestMetrics.new(self.num_spec_tokens)

    return add_request
