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

from tests.unit.dense_trees import tree_attention
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

VOCAB, HIDDEN, KV_HEADS, DIM = 40, 16, 2, 8
# Tokens of each request, the anchor last; the shortest has one before it.
LENGTHS = [2, 7, 20, 33]


class DenseCache:
    """Pages as one table of slots; request r owns the slots from 100 * r on."""

    on_device = False

    def __init__(self) -> None:
        self.bind((None,))

    def bind(self, windows: tuple[int | None, ...]) -> None:
        """Makes room for layers with these sliding windows."""
        self.windows = windows
        self.key = torch.full((len(windows), 1000, KV_HEADS, DIM), float("nan"))
        self.value = self.key.clone()

    def write(
        self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, first_layer: int = 0
    ) -> None:
        layers = slice(first_layer, first_layer + len(keys))
        self.key[layers, slots], self.value[layers, slots] = keys, values

    def context_attention(
        self, table_rows: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
    ) -> Any:
        requests: Any = SimpleNamespace(req_indices=table_rows.tolist())
        alone = [np.zeros(0, np.int32)] * len(slots)
        return self.attention(requests, positions, alone)

    def block_attention(self, requests: Any, rows: int, causal: bool) -> Any:
        assert causal
        chains = [np.arange(-1, rows - 2, dtype=np.int32)] * len(requests)
        return self.attention(requests, torch.as_tensor(requests.context_lens), chains)

    def tree_attention(
        self, requests: DraftRequests, context_lens: torch.Tensor, parents: Any
    ) -> Any:
        return self.attention(requests, context_lens, parents)

    def attention(
        self, requests: DraftRequests, context_lens: torch.Tensor, parents: list[np.ndarray]
    ) -> Any:
        indices = getattr(requests, "req_indices", range(len(parents)))
        slots = [
            slice(100 * index, 100 * index + length)
            for index, length in zip(indices, context_lens.tolist(), strict=True)
        ]

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            contexts = [(self.key[layer, at], self.value[layer, at]) for at in slots]
            return tree_attention(q, k, v, contexts, parents, self.windows[layer])

        return attend


class DenseDeviceCache(DenseCache):
    """The same as a device has it: rows of a level's places, some of which hold no node."""

    on_device = True

    def tree_attention(
        self, requests: DraftRequests, context_lens: torch.Tensor, parents: Any
    ) -> Any:
        assert (parents[:, 0] == -1).all()
        arrays = [np.asarray(line[1:]) - 1 for line in parents.tolist()]
        return self.attention(requests, context_lens, arrays)


class World:
    """A head, its drafter, and requests whose target states are random."""

    def __init__(
        self,
        folder: Path,
        layout: str = "specforge",
        expand: int = 16,
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
        self.drafter.frontier_width = expand  # type: ignore[misc]
        self.drafter.lm_head = plain_linear(self.lm_head, None)
        self.cache = DenseDeviceCache() if device_cache else DenseCache()
        self.cache.bind(tuple(spec.window for spec in self.drafter.cache_specs()))
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
