# SPDX-License-Identifier: Apache-2.0
"""The tokens before each row of a tree: its request's committed tokens, then its path.

Tensor code of fixed shapes: the host reads nothing.

Letters: M logits rows of the step, P the longest path.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_specplug.tree.step_trees import StepTrees


@dataclass(frozen=True)
class TreePaths:
    """The drafted tokens before each row's next token."""

    # [M, P] int64 tokens from the root's child down to the row itself, then -1
    tokens: torch.Tensor
    # [M] int64
    lengths: torch.Tensor

    @classmethod
    def none(cls, num_rows: int, device: torch.device) -> TreePaths:
        """Returns the empty paths of `num_rows` roots."""
        tokens = torch.full((num_rows, 1), -1, dtype=torch.int64, device=device)
        return cls(tokens, torch.zeros(num_rows, dtype=torch.int64, device=device))


def tree_paths(
    trees: StepTrees,
    # [M] token of every row
    input_ids: torch.Tensor,
    # [M] offset within the row's request, 0 for its root
    offsets: torch.Tensor,
    longest: int,
) -> TreePaths:
    """Returns every row's path, which is empty for rows without a parent.

    Args:
        longest: P, at least the maximum depth.
    """
    num_rows = len(offsets)
    rows = torch.arange(num_rows, device=offsets.device)
    is_node = trees.parent_rows >= 0
    above = torch.where(is_node, trees.parent_rows.long(), rows)
    # After k rounds of doubling a row knows its 2 ** k nearest ancestors: their tokens, by depth.
    depth = torch.where(is_node, trees.depths.long() - 1, longest)
    tokens = torch.full((num_rows, longest + 1), -1, dtype=torch.int64, device=offsets.device)
    tokens.scatter_(1, depth[:, None], input_ids[:, None].long())
    # Rows that are not nodes share the last column.
    tokens = tokens[:, :longest]
    for _ in range(max(1, longest.bit_length())):
        tokens = torch.maximum(tokens, tokens[above])
        above = above[above]
    return TreePaths(tokens, torch.where(is_node, trees.depths.long(), 0))


def output_tail(
    paths: TreePaths,
    # [M, n] int64 position in the sequence
    positions: torch.Tensor,
    # [M] committed tokens of the row's request
    total_lens: torch.Tensor,
    # [slots, max_model_len]
    all_token_ids: torch.Tensor,
    # [M] int64
    slots: torch.Tensor,
) -> torch.Tensor:
    """Returns tokens [M, n] at positions of each row's sequence, which is its committed tokens and
    its path; -1 outside of it."""
    drafted = positions - total_lens[:, None]
    committed = all_token_ids[slots[:, None], positions.clamp(0, all_token_ids.shape[1] - 1)].long()
    on_path = paths.tokens.gather(1, drafted.clamp(0, paths.tokens.shape[1] - 1))
    on_path = torch.where(drafted < paths.lengths[:, None], on_path, -1)
    return torch.where(positions < 0, -1, torch.where(drafted < 0, committed, on_path))
