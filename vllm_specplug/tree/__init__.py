# SPDX-License-Identifier: Apache-2.0
"""Draft trees: the flat tree type, and builders of trees from the candidates of each depth."""

from vllm_specplug.tree.builders import build_tree
from vllm_specplug.tree.draft_tree import ROOT, DraftTree
from vllm_specplug.tree.merge import merge_trees

__all__ = [
    "ROOT",
    "DraftTree",
    "build_tree",
    "merge_trees",
]
