# SPDX-License-Identifier: Apache-2.0
"""Trees of a LongSpec layer's plain module, branch by branch, to compare those of drafters with."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from vllm_specplug.methods.longspec.head import LongSpecHead
from vllm_specplug.methods.longspec.train.features import KVSequence
from vllm_specplug.methods.longspec.train.objective import attention
from vllm_specplug.tree import DraftTree
from vllm_specplug.tree.beam import Frontier, draft_level_by_level


def tree_of_branches(
    logits: Callable[[list[int]], torch.Tensor], anchor: int, *, budget: int, depth: int, width: int
) -> DraftTree:
    """The tree after a token, from the logits [V] after each branch; branches begin with it."""
    branches: dict[int, list[int]] = {}

    def expand(frontier: Frontier) -> tuple[np.ndarray, np.ndarray]:
        found = []
        for node, parent, token in zip(
            frontier.nodes.tolist(), frontier.parents.tolist(), frontier.token_ids.tolist(),
            strict=True,
        ):  # fmt: skip
            branches[node] = [*(branches[parent] if frontier.depth else []), token]
            found.append(logits(branches[node]))
        best = torch.stack(found).log_softmax(-1).topk(width)
        return best.indices.numpy(), best.values.numpy()

    return draft_level_by_level([anchor], [budget], [depth], width, expand)[0]


@torch.no_grad()
def module_tree(
    head: LongSpecHead,
    sequence: KVSequence,
    tables: tuple[torch.Tensor, torch.Tensor],
    anchor: int,
    *,
    budget: int,
    depth: int,
    width: int = 8,
) -> DraftTree:
    """The tree after the token at index `anchor`, which is in no cache; `tables` are the target's
    embeddings and LM head."""
    embed_tokens, lm_head = tables
    window = slice(max(0, anchor - head.config.window_size), anchor)
    seen: list[torch.Tensor] = []

    def remember(q: torch.Tensor, *own: torch.Tensor) -> torch.Tensor:
        seen.extend(own)
        return q

    embeds = embed_tokens[sequence.tokens[window]]
    head(embeds, sequence.positions[window], remember, lambda q: q)
    key, value = (x[None, :anchor].to(lm_head) for x in (sequence.key, sequence.value))

    def logits(branch: list[int]) -> torch.Tensor:
        rows = len(branch)

        def self_attend(q: torch.Tensor, *own: torch.Tensor) -> torch.Tensor:
            k, v = (torch.cat(both)[None] for both in zip(seen, own, strict=True))
            mask = torch.ones(rows, k.shape[1], dtype=torch.bool).tril(k.shape[1] - rows)
            return attention(q[None], k, v, mask[None])[0]

        def cross_attend(q: torch.Tensor) -> torch.Tensor:
            mask = torch.ones(1, rows, anchor, dtype=torch.bool)
            return attention(q[None], key, value, mask)[0] if anchor else torch.zeros_like(q)

        positions = sequence.positions[anchor] + torch.arange(rows)
        return head(embed_tokens[branch], positions, self_attend, cross_attend)[-1] @ lm_head.t()

    token = int(sequence.tokens[anchor])
    return tree_of_branches(logits, token, budget=budget, depth=depth, width=width)
