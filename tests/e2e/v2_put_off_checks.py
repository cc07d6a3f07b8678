# SPDX-License-Identifier: Apache-2.0
"""put_off_checks.py on Model Runner V2, whose scheduler works ahead."""

from __future__ import annotations

import os

from tests.e2e.put_off_checks import (
    compare_drafts,
    compare_dropped_prefixes,
    compare_outputs,
    compare_requests_that_ask,
)
from vllm_specplug.vllm_v2.plain_engine import use_v2

use_v2()
# Many engines in one process: small caches.
os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
CACHE = {"kv_cache_memory_bytes": 1 << 24}


def check_jetspec_drafts_what_it_would_have_drafted() -> None:
    compare_drafts("jetspec", **CACHE)


def check_jetspec_does_not_draft_from_a_context_that_is_gone() -> None:
    compare_dropped_prefixes("jetspec", **CACHE)


def check_jetspec_drafts_for_whom_asks() -> None:
    compare_requests_that_ask("jetspec", **CACHE)


def check_outputs_are_plain_ones() -> None:
    compare_outputs("eagle3_tree", **CACHE)
