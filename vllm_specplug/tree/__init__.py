# SPDX-License-Identifier: Apache-2.0
"""Draft trees: the flat tree type and the builders that make trees from per-depth candidates."""

from vllm_specplug.tree.builders import (
    BUILDERS,
    DEFAULT_HYBRID_LAMBDA,
    build_tree,
    build_trees,
)
from vllm_specplug.tree.draft_tree import ROOT, DraftTree
from vllm_specplug.tree.merge import merge_trees

__all__ = [
    "BUILDERS",
    "DEFAULT_HYBRID_LAMBDA",
    "ROOT",
    "DraftTree",
    "build_tree",
    "build_trees",
    "merge_trees",
]
