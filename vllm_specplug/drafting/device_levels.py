# SPDX-License-Identifier: Apache-2.0
"""`tree.beam.draft_level_by_level` on a device, with tensors of fixed shapes and no host reads.

Every level has entries for the maximum number of nodes per request; an entry without a node scores
-inf. All levels are kept in full, and the best nodes of all levels are selected once at the end. A
node that is not selected has no selected descendants.

Letters: R requests, F frontier entries per request, K candidates per node, N maximum nodes per
tree, C nodes of all levels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from vllm_specplug.drafting.device_requests import DeviceTrees
from vllm_specplug.kernels.cuda_contract import MAX_TREE_ROWS
from vllm_specplug.tree import DraftTree
from vllm_specplug.tree.beam import FRONTIER_WIDTH
from vllm_specplug.tree.draft_tree import ROOT


def max_frontier_width(tree_depth: int) -> int:
    """Returns the maximum entries of a frontier.

    Every level queries the rows of all frontiers again, and kernels limit their number.
    """
    return (MAX_TREE_ROWS - 1) // max(tree_depth - 1, 1)


@dataclass(frozen=True)
class DeviceFrontier:
    """Nodes whose children are drafted next, best first within each request."""

    # [R, F] int64; entries without a node also hold a legal token
    token_ids: torch.Tensor
    # [R, F] int64 index of each parent in the frontier before this one; 0 for anchors
    parents: torch.Tensor
    # levels drafted so far: 0 when the frontier holds the anchors
    depth: int
    # entries per request of that frontier; 1 for anchors
    parents_width: int = 1

    @property
    def parent_rows(self) -> torch.Tensor:
        """int64 [R * F] index of each parent among all entries of the frontier before this one."""
        count, width = len(self.parents), self.parents_width
        first = torch.arange(0, count * width, width, device=self.parents.device)
        return (first[:, None] + self.parents).flatten()


# frontier -> candidate token ids int64 [R, F, K], best first, and their log-probabilities given
# the branch float32 [R, F, K]; as `tree.beam.Expand`
DeviceExpand = Callable[[DeviceFrontier], tuple[torch.Tensor, torch.Tensor]]


def draft_levels_on_device(
    # [R] int64
    anchors: torch.Tensor,
    # [R]
    budgets: torch.Tensor,
    # [R]
    depths: torch.Tensor,
    expand: DeviceExpand,
    *,
    num_levels: int,
    num_nodes: int,
    width: int,
    frontier_width: int | None = FRONTIER_WIDTH,
) -> DeviceTrees:
    """Returns the same trees as `draft_level_by_level`.

    Args:
        num_levels: levels to draft; levels beyond a request's depth are dropped.
        num_nodes: N, at least the largest budget.
        width: maximum children per node.
        frontier_width: see `draft_level_by_level`.
    """
    device, count = anchors.device, len(anchors)
    frontier = DeviceFrontier(anchors[:, None], torch.zeros_like(anchors)[:, None], 0)
    frontier_scores = torch.zeros((count, 1), dtype=torch.float64, device=device)
    # Per level [R, nodes]: token, parent as an index among the nodes of all levels, score.
    levels: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    # Index of the first node of the frontier and of the new level.
    first_parent, first_node = ROOT, 0
    for level in range(num_levels):
        ids, log_probs = expand(frontier)
        ids, log_probs = ids[..., :width], log_probs[..., :width]
        usable = log_probs.isfinite().int().cumprod(-1) > 0
        # Rounding can make the log-probability of a certain token positive. Without the clamp it
        # would outscore its parent.
        scores = frontier_scores[..., None] + log_probs.double().clamp(max=0.0)
        scores = scores.masked_fill(~usable, float("-inf")).flatten(1)
        # A stable sort keeps an ancestor before its descendants with equal scores.
        scores, order = scores.sort(dim=1, descending=True, stable=True)
        scores, order = scores[:, :num_nodes], order[:, :num_nodes]
        tokens, parents = ids.flatten(1).gather(1, order), order // ids.shape[-1]
        levels.append((tokens, parents + first_parent, scores))
        # The frontier is the beginning of its level.
        first_parent, first_node = first_node, first_node + scores.shape[1]
        frontier_scores = scores[:, :frontier_width]
        frontier = DeviceFrontier(
            tokens[:, :frontier_width],
            parents[:, :frontier_width],
            level + 1,
            frontier.token_ids.shape[1],
        )
    return _best_nodes(levels, budgets, depths, num_nodes)


def _best_nodes(
    levels: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    budgets: torch.Tensor,
    depths: torch.Tensor,
    num_nodes: int,
) -> DeviceTrees:
    device = budgets.device
    if not levels:
        return DeviceTrees.none(len(budgets), num_nodes, device)
    # [R, C] each
    tokens, parents, scores = (torch.cat(parts, dim=1) for parts in zip(*levels, strict=True))
    node_depths = torch.cat([
        torch.full((part.shape[1],), i + 1, dtype=torch.int32, device=device)
        for i, (_, _, part) in enumerate(levels)
    ])  # fmt: skip
    missing = num_nodes - tokens.shape[1]
    if missing > 0:
        tokens, parents, node_depths = (
            torch.nn.functional.pad(part, (0, missing)) for part in (tokens, parents, node_depths)
        )
        scores = torch.nn.functional.pad(scores, (0, missing), value=float("-inf"))
    scores = scores.masked_fill(node_depths > depths[:, None], float("-inf"))
    scores, order = scores.sort(dim=1, descending=True, stable=True)
    # Rank of every node by score, after an entry for the root.
    ranks = torch.empty_like(order).scatter_(
        1, order, torch.arange(order.shape[1], device=device).expand_as(order)
    )
    ranks = torch.nn.functional.pad(ranks, (1, 0), value=ROOT)
    scores, order = scores[:, :num_nodes], order[:, :num_nodes]
    num_drafted = scores.isfinite().sum(1)
    return DeviceTrees(
        token_ids=tokens.gather(1, order),
        parents=ranks.gather(1, parents.gather(1, order) + 1).to(torch.int32),
        depths=node_depths[order],
        scores=scores.to(torch.float32),
        counts=torch.minimum(num_drafted, budgets.clamp_min(0)).to(torch.int32),
    )


def packed_trees(trees: DeviceTrees) -> torch.Tensor:
    """Returns int32 [R, 1 + 4 * N]: counts, token ids, parents, depths, and the bits of scores."""
    fields = (trees.token_ids.to(torch.int32), trees.parents, trees.depths)
    return torch.cat([trees.counts[:, None], *fields, trees.scores.view(torch.int32)], dim=1)


def unpacked_trees(packed: np.ndarray) -> list[DraftTree]:
    """Inverts `packed_trees` on the host."""
    counts = packed[:, 0]
    if not counts.any():
        return [DraftTree.empty()] * len(packed)
    tokens, parents, depths, scores = np.split(packed[:, 1:], 4, axis=1)
    floats = np.ascontiguousarray(scores).view(np.float32)
    return DraftTree.split(tokens.astype(np.int64), parents, depths, floats, counts)


def read_trees(trees: DeviceTrees) -> list[DraftTree]:
    """Copies the trees to the host, waits for the copy and returns them."""
    return unpacked_trees(packed_trees(trees).cpu().numpy())
