# SPDX-License-Identifier: Apache-2.0
"""Requests with random target states, an EAGLE-3 head and its drafter over a dense cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.dense_trees import DenseCache
from tests.unit.drafters import load_drafter, requests_of
from tests.unit.methods.block.published_heads import Shared
from tests.unit.methods.eagle3_tree.heads import write_head
from tests.unit.methods.eagle3_tree.published import SMALL
from tests.unit.methods.eagle3_tree.reference import ReferenceHead
from tests.unit.tree.candidates import paths_of
from vllm_specplug.drafting.committed_tokens import CommittedTokens
from vllm_specplug.drafting.method import TargetInfo
from vllm_specplug.drafting.requests import DraftRequests
from vllm_specplug.methods.block.fused_parts import plain_linear
from vllm_specplug.methods.eagle3_tree import METHOD
from vllm_specplug.tree import DraftTree

VOCAB, HIDDEN = 40, 16
# Tokens of each request, the anchor last; the shortest has one before it.
LENGTHS = [2, 7, 20, 33]


class World:
    """A head, its drafter, and requests whose target states are random."""

    def __init__(
        self,
        folder: Path,
        layout: str = "specforge",
        device_cache: bool = False,
        head: Mapping[str, Any] | None = None,
        **options: Any,
    ):
        """`head` has changes of the layout's config, and `extra` tensors; `options` of the tree."""
        raw, tensors = write_head(folder, layout, **(head or {}))
        config = {**raw, **raw.get("transformer_layer_config", {})}
        config["rope_theta"] = (config.get("rope_parameters") or config).get("rope_theta", 1e4)
        self.reference = ReferenceHead(config, tensors)
        self.ids = torch.arange(len(tensors["lm_head.weight"])) + tensors.get("d2t", 0)
        # Peaked, so that trees become deep.
        self.lm_head = 1.5 * tensors["lm_head.weight"]
        torch.manual_seed(3)
        self.embed = tensors.get("embed_tokens.weight", torch.randn(VOCAB, HIDDEN))
        tree = {"num_nodes": 16, "max_depth": 16, "tree_width": 8, **options}
        target = SimpleNamespace(**SMALL)
        plan = METHOD.parse_options({}).resolve(
            METHOD.name, Shared(folder, 16, 8), TargetInfo(target, 64, None)
        )
        self.drafter = load_drafter(
            METHOD.load_drafter(plan), folder, None, torch.zeros(VOCAB, HIDDEN), self.embed,
            target, **tree,
        )  # fmt: skip
        self.drafter.lm_head = plain_linear(self.lm_head, None)
        self.cache = DenseCache(self.drafter.cache_specs(), device_cache)
        self.drafter.bind_cache(self.cache)  # type: ignore[arg-type]
        self.tokens = [torch.randint(0, VOCAB, (n,)) for n in LENGTHS]
        self.aux = [[torch.randn(n, HIDDEN) for _ in range(3)] for n in LENGTHS]

    def commit(self, spans: list[tuple[int, int, int]]) -> None:
        """One step: of each request (index, first, end), its tokens first..end are committed."""
        joined = [torch.cat([self.aux[r][i][a:b] for r, a, b in spans]) for i in range(3)]
        counts = np.cumsum([b - a for _, a, b in spans])
        self.drafter.observe(
            CommittedTokens(
                joined,
                rows=torch.arange(int(counts[-1])),
                positions=torch.cat([torch.arange(a, b) for _, a, b in spans]),
                slots=torch.cat([100 * r + torch.arange(a, b) for r, a, b in spans]),
                last_rows=torch.from_numpy(counts - 1),
                next_token_ids=torch.cat([self.tokens[r][a + 1 : b + 1] for r, a, b in spans]),
                owners=np.repeat([r for r, _, _ in spans], [b - a for _, a, b in spans]),
            )
        )

    def commit_all(self) -> None:
        self.commit([(r, 0, n - 1) for r, n in enumerate(LENGTHS)])

    def requests(self, budgets: list[int], width: int) -> DraftRequests:
        return requests_of(self.tokens, budgets, width)

    def scores_along(self, r: int, branch: list[int]) -> torch.Tensor:
        """Log-probabilities [V'] after the tokens of a branch, from the equations alone."""
        out = self.reference.along(self.tokens[r], branch, self.aux[r], self.embed)
        return (out @ self.lm_head.T).log_softmax(-1)

    def check(self, trees: Sequence[DraftTree], first: int = 0) -> None:
        """Every node has the score that its branch has when it is drafted as a chain."""
        check_branches(trees, self.scores_along, self.ids.tolist(), 2e-4, first)


def check_branches(
    trees: Sequence[DraftTree],
    scores_along: Callable[[int, list[int]], torch.Tensor],
    ids: list[int],
    near: float = 5e-4,
    first: int = 0,
) -> None:
    """Raises unless each node scores less than its parent by what `scores_along` says of its token
    after the tokens before it; of requests from `first` on, and target tokens `ids` by draft id."""
    for r, tree in enumerate(trees, first):
        tree.validate(max(ids) + 1)
        for i, (*before, token) in enumerate(paths_of(tree)):
            parent = int(tree.parent_indices[i])
            above = 0.0 if parent < 0 else float(tree.scores[parent])
            expected = float(scores_along(r, before)[ids.index(token)])
            assert tree.scores[i] - above == pytest.approx(expected, abs=near)
