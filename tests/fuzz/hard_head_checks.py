# SPDX-License-Identifier: Apache-2.0
"""The state machine with heads that are too sure or broken; see tests/e2e/hard_heads.py."""

from __future__ import annotations

from tests.fuzz.machine_checks import method_checks
from vllm_specplug.registry import method_names

globals().update(
    method_checks(
        *(f"{name}-confident" for name in method_names()),
        *(f"{name}-broken" for name in ("dels", "tokenswift")),
        *(f"{name}-nan_weights" for name in ("dels", "eagle3_tree", "longspec", "tokenswift")),
    )
)
