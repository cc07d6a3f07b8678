# SPDX-License-Identifier: Apache-2.0
"""`tree.beam.draft_level_by_level` on a device: tensors of fixed shapes, and no read on the host.

Every level has entries for the maximum number of nodes per request; an entry without a node scores
-inf. All levels are kept whole, and the best nodes of all levels are chosen once, at the end. A
node that is not among them has no descendant among them.

Letters: R requests, F entries of a frontier per request, K candidates of one node, N nodes of a
tree at most, C nodes of all levels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from vllm_specplug.drafting.device_requests import DeviceTrees
from vllm_specplug.kernels import top_candidates
from vllm_specplug.kernels.cuda_contract import MAX_TREE_ROWS
from vllm_specplug.tree import DraftTree
from vllm_specplug.tree.beam import FRONTIER_WIDTH
from vllm_specplug.tree.draft_tree import ROOT

# Maximum number of draft logits at once: 128 MiB in float32.
MOST_LOGITS = 1 << 25


def most_frontier_width(tree_depth: int) -> int:
    """Returns the maximum entries of a frontier: every level queries all expanded rows again, and
    kernels limit their number."""
    return (MAX_TREE_ROWS - 1) // max(tree_depth - 1, 1)


@dataclass(frozen=True)
class DeviceFrontier:
    """Nodes whose children are drafted next, best first within each request."""

    # [R, F] int64; a legal token also where there is no node
    token_ids: torch.Tensor
    # [R, F] int64 index of each parent in the frontier before this one; 0 for anchors
    parents: torch.Tensor
    # levels drafted so far: 0 when the frontier holds the anchors
    depth: int

    def rows_in(self, width: int) -> torch.Tensor:
        """Returns int64 [R * F]: each parent's row in the previous frontier, which has `width`
        entries per request, request by request."""
        count = len(self.parents)
        first = torch.arange(0, count * width, width, device=self.parents.device)
        return (first[:, None] + self.parents).flatten()


class LevelRows:
    """Rows of all levels of a draft, as attention takes them: those of one request lie together,
    its root, then the entries of every frontier. All are queried again at every level."""

    def __init__(self) -> None:
        # Width of the last frontier, and its first row.
        self.width, self._first = 1, 0
        # Of each level [R, width, ...]: parents of the rows, then q, k and v
        self._parents: list[torch.Tensor] = []
        self._rows: list[tuple[torch.Tensor, ...]] = []

    def add(self, frontier: DeviceFrontier) -> None:
        """Appends a level."""
        if frontier.depth:
            self._parents.append(frontier.parents.to(torch.int32) + self._first)
            self._first += self.width
        else:
            self._parents.append(torch.full_like(frontier.parents, -1, dtype=torch.int32))
        self.width = frontier.parents.shape[1]

    def attend(
        self,
        # parent rows int32 [R, rows] -> attention of these rows
        attention: Callable[[torch.Tensor], Callable[..., torch.Tensor]],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor:
        """Attends the level's rows: query [R * width, Hq, Dh], key and value [R * width, Hkv, Dh]
        -> [R * width, Hq, Dh]."""
        shape = (len(self._parents[-1]), self.width)
        self._rows.append(tuple(x.reshape(*shape, *x.shape[1:]) for x in (query, key, value)))
        joined = [torch.cat(parts, dim=1).flatten(0, 1) for parts in zip(*self._rows, strict=True)]
        mixed = attention(torch.cat(self._parents, dim=1))(*joined)
        mixed = mixed.reshape(shape[0], -1, *mixed.shape[1:])
        return mixed[:, -self.width :].flatten(0, 1)


def level_candidates(
    # [T, H]
    hidden: torch.Tensor,
    lm_head: Callable[[torch.Tensor], torch.Tensor],
    vocab_size: int,
    width: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the `width` likeliest tokens int64 [T, width] and their log-probabilities float32.

    It works in pieces: the logits of all requests would be the largest tensor of a step.
    """
    most = max(1, MOST_LOGITS // vocab_size)
    found = [
        top_candidates(lm_head(hidden[first : first + most]), width)
        for first in range(0, len(hidden), most)
    ]
    ids, log_probs = (torch.cat(part) for part in zip(*found, strict=True))
    return ids, log_probs


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
    widths: torch.Tensor | None = None,
    frontier_width: int | None = FRONTIER_WIDTH,
) -> DeviceTrees:
    """Returns the trees of `draft_level_by_level`, node for node.

    Args:
        num_levels: levels to draft; levels beyond a request's depth are dropped.
        num_nodes: N, at least the largest budget.
        width: maximum children of a node.
        widths: [R] maximum per request; None if all have `width`.
        frontier_width: see `draft_level_by_level`.
    """
    device, count = anchors.device, len(anchors)
    front = DeviceFrontier(anchors[:, None], torch.zeros_like(anchors)[:, None], 0)
    above = torch.zeros((count, 1), dtype=torch.float64, device=device)
    # Of each level [R, nodes]: token, parent as an index among all levels' nodes, score.
    levels: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    first, drafted = ROOT, 0
    for level in range(num_levels):
        ids, log_probs = expand(front)
        ids, log_probs = ids[..., :width], log_probs[..., :width]
        usable = log_probs.isfinite().int().cumprod(-1) > 0
        if widths is not None:
            usable = usable & (torch.arange(ids.shape[-1], device=device) < widths[:, None, None])
        # Rounding can leave a sure token above 0; then it would outscore its parent.
        scores = above[..., None] + log_probs.double().clamp(max=0.0)
        scores = scores.masked_fill(~usable, float("-inf")).flatten(1)
        # Stable: of equal scores the one drafted first, hence the ancestor, stays first.
        scores, order = scores.sort(dim=1, descending=True, stable=True)
        scores, order = scores[:, :num_nodes], order[:, :num_nodes]
        tokens, parents = ids.flatten(1).gather(1, order), order // ids.shape[-1]
        levels.append((tokens, parents + first, scores))
        # The frontier is what its level begins with.
        first, drafted = drafted, drafted + scores.shape[1]
        above = scores[:, :frontier_width]
        front = DeviceFrontier(tokens[:, :frontier_width], parents[:, :frontier_width], level + 1)
    return _best_nodes(levels, budgets, depths, num_nodes)


def _best_nodes(
    levels: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    budgets: torch.Tensor,
    depths: torch.Tensor,
    num_nodes: int,
) -> DeviceTrees:
    device = budgets.device
    if not levels:
        shape = (len(budgets), num_nodes)
        numbers = torch.zeros(shape, dtype=torch.int32, device=device)
        return DeviceTrees(numbers.long(), numbers, numbers, numbers.float(), numbers[:, 0])
    # [R, C] each
    tokens, parents, scores = (torch.cat(parts, dim=1) for parts in zip(*levels, strict=True))
    deep = torch.cat([
        torch.full((part.shape[1],), i + 1, dtype=torch.int32, device=device)
        for i, (_, _, part) in enumerate(levels)
    ])  # fmt: skip
    missing = num_nodes - tokens.shape[1]
    if missing > 0:
        tokens, parents, deep = (
            torch.nn.functional.pad(part, (0, missing)) for part in (tokens, parents, deep)
        )
        scores = torch.nn.functional.pad(scores, (0, missing), value=float("-inf"))
    scores = scores.masked_fill(deep > depths[:, None], float("-inf"))
    scores, order = scores.sort(dim=1, descending=True, stable=True)
    # Rank of every node by score, behind one for the root.
    ranks = torch.empty_like(order).scatter_(
        1, order, torch.arange(order.shape[1], device=device).expand_as(order)
    )
    ranks = torch.nn.functional.pad(ranks, (1, 0), value=ROOT)
    scores, order = scores[:, :num_nodes], order[:, :num_nodes]
    above = ranks.gather(1, parents.gather(1, order) + 1)
    drafted = scores.isfinite().sum(1)
    return DeviceTrees(
        token_ids=tokens.gather(1, order),
        parents=above.to(torch.int32),
        depths=deep[order],
        scores=scores.to(torch.float32),
        counts=torch.minimum(drafted, budgets.clamp_min(0)).to(torch.int32),
    )


def packed_trees(trees: DeviceTrees) -> torch.Tensor:
    """int32 [R, 1 + 4 * N]: counts, token ids, parents, depths, and scores as bits."""
    fields = (trees.token_ids.to(torch.int32), trees.parents, trees.depths)
    return torch.cat([trees.counts[:, None], *fields, trees.scores.view(torch.int32)], dim=1)


def read_trees(trees: DeviceTrees) -> list[DraftTree]:
    """Copies the trees to the host, waits for the copy and returns them."""
    packed = packed_trees(trees).cpu()
    # [4, R, N]
    arrays = packed[:, 1:].reshape(len(packed), 4, -1).transpose(0, 1).contiguous()
    tokens, parents, depths, scores = arrays.numpy()
    return DraftTree.split(
        tokens.astype(np.int64), parents, depths, scores.view(np.float32), packed[:, 0].numpy()
    )
