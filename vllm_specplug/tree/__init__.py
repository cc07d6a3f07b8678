# SPDX-License-Identifier: Apache-2.0
"""Draft trees: the flat tree type and the builders that make trees from per-depth candidates."""

from vllm_specplug.tree.builders import (
    BUILDERS,
    DEFAULT_HYBRID_LAMBDA,
    build_tree,
    build_trees,
)
from vllm_specplug.tree.conditional import Expand, grow_tree
from vllm_specplug.tree.draft_tree import ROOT, DraftTree
from vllm_specplug.tree.merge import merge_trees

__all__ = [
    "BUILDERS",
    "DEFAULT_HYBRID_LAMBDA",
    "ROOT",
    "DraftTree",
    "Expand",
    "build_tree",
    "build_trees",
    "grow_tree",
    "merge_trees",
]
