# SPDX-License-Identifier: Apache-2.0
"""Acceptance: one target sample per visited node."""

from vllm_specplug.accept.walk import WalkResult, walk_trees

__all__ = ["WalkResult", "walk_trees"]
