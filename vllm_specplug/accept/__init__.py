# SPDX-License-Identifier: Apache-2.0
"""Acceptance: one target sample per visited node."""

from vllm_specplug.accept.walk import EndFn, WalkResult, walk_trees

__all__ = ["EndFn", "WalkResult", "walk_trees"]
