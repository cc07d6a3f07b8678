# SPDX-License-Identifier: Apache-2.0
"""The checks of number_format_checks.py on Model Runner V2; see test_number_formats.py."""

from __future__ import annotations

from vllm_specplug.vllm_v2.plain_engine import use_v2

use_v2()

from tests.e2e.number_format_checks import (  # noqa: E402
    check_float16_draft_heads,
    check_float16_parts_at_ties_alone,
    check_float16_would_show_missing_compaction,
    check_fp8_caches_in_groups,
    check_fp8_caches_with_scales,
    check_rows_without_drafts_are_attended_as_those_of_trees,
)

__all__ = [
    "check_float16_draft_heads",
    "check_float16_parts_at_ties_alone",
    "check_float16_would_show_missing_compaction",
    "check_fp8_caches_in_groups",
    "check_fp8_caches_with_scales",
    "check_rows_without_drafts_are_attended_as_those_of_trees",
]
