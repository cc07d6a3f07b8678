# SPDX-License-Identifier: Apache-2.0
"""Every branch of a tree is what the head would draft as a chain along it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.methods.eagle3_tree.heads import write_head
from tests.unit.methods.eagle3_tree.published import SMALL
from tests.unit.methods.eagle3_tree.reference import ReferenceHead
from vllm_specplug.drafting.drafter import (
    CommittedTokens,
    DrafterOptions,
    DraftRequests,
    TargetWeights,
)
from vllm_specplug.kernels.masks import ancestor_words, words_to_bool
from vllm_specplug.kernels.reference import dense_attention
from vllm_specplug.methods.block.fused_head import plain_linear
from vllm_specplug.methods.eagle3_tree.drafter import Eagle3Drafter
from vllm_specplug.methods.eagle3_tree.options import Eagle3Settings
from vllm_specplug.tree import DraftTree

VOCAB, HIDDEN, HEADS, KV_HEADS, DIM = 40, 16, 4, 2, 8
# Tokens of each request, the anchor last; the shortest has one before it.
LENGTHS = [2, 7, 20, 33]
LAYERS = (1, 3, 4)


class DenseCache:
    """Pages as one table of slots; request r owns the slots from 100 * r on."""

    def __init__(self) -> None:
        self.key = torch.full((1000, KV_HEADS, DIM), float("nan"))
        self.value = self.key.clone()

    def write(self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        self.key[slots], self.value[slots] = keys[0], values[0]

    def branch_attention(
        self, requests: DraftRequests, context_lens: Any, parents: list[np.ndarray]
    ) -> Any:
        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            out, start = torch.empty_like(q), 0
            for index, length, up in zip(requests.req_indices, context_lens, parents, strict=True):
                rows = slice(start, start + len(up) + 1)
                start = rows.stop
                slots = slice(100 * index, 100 * index + length)
                mask = torch.ones(len(up) + 1, length + len(up) + 1, dtype=torch.bool)
                mask[:, length:] = words_to_bool(ancestor_words([up]), len(up) + 1)
                out[rows], _ = dense_attention(
                    q[rows], torch.cat([self.key[slots], k[rows]]),
                    torch.cat([self.value[slots], v[rows]]), DIM**-0.5, HEADS // KV_HEADS, mask,
                )  # fmt: skip
            assert start == len(q)
            return out

        return attend


class World:
    """A head, its drafter, and requests whose target states are random."""

    def __init__(self, folder: Path, layout: str = "specforge", expand: int = 16, **options: Any):
        raw, tensors = write_head(folder, layout)
        config = {**raw, **raw.get("transformer_layer_config", {})}
        config["rope_theta"] = (config.get("rope_parameters") or config).get("rope_theta", 1e4)
        self.reference = ReferenceHead(config, tensors)
        self.ids = tensors["d2t"] + torch.arange(12)
        # Peaked, so that trees become deep.
        self.lm_head = 1.5 * tensors["lm_head.weight"]
        torch.manual_seed(3)
        self.embed = torch.randn(VOCAB, HIDDEN)
        self.drafter = Eagle3Drafter(
            DrafterOptions(
                **{
                    "head_path": str(folder), "num_nodes": 16, "tree_depth": 4, "max_depth": 16,
                    "tree_width": 8, "tree_builder": "best_first", "hybrid_lambda": 0.1,
                    "ngram_topk": 0, "max_model_len": 64,
                    "settings": Eagle3Settings(expand, LAYERS), **options,
                }
            )
        )  # fmt: skip
        self.drafter.load(
            TargetWeights(
                embed_tokens=self.embed, lm_head=torch.zeros(VOCAB, HIDDEN), dtype=torch.float32,
                device=torch.device("cpu"), make_linear=plain_linear,
                text_config=SimpleNamespace(**SMALL),
            )
        )  # fmt: skip
        self.drafter.lm_head = plain_linear(self.lm_head, None)
        self.cache = DenseCache()
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
            )
        )

    def commit_all(self) -> None:
        self.commit([(r, 0, n - 1) for r, n in enumerate(LENGTHS)])

    def requests(self, budgets: list[int], widths: list[int]) -> DraftRequests:
        return DraftRequests(
            req_ids=[f"r{i}" for i in range(len(LENGTHS))],
            token_ids=[t.numpy() for t in self.tokens],
            context_lens=[n - 1 for n in LENGTHS],
            req_indices=list(range(len(LENGTHS))),
            budgets=budgets,
            widths=widths,
            depths=[16] * len(LENGTHS),
        )

    def scores_along(self, r: int, branch: list[int]) -> torch.Tensor:
        """Log-probabilities [V'] after the tokens of a branch, from the equations alone."""
        out = self.reference.along(self.tokens[r], branch, self.aux[r], self.embed)
        return (out @ self.lm_head.T).log_softmax(-1)

    def check(self, r: int, tree: DraftTree) -> None:
        """Every node has the score that its branch has when it is drafted as a chain."""
        branches: list[list[int]] = []
        for i, token in enumerate(tree.token_ids.tolist()):
            parent = int(tree.parent_indices[i])
            before = [] if parent < 0 else branches[parent]
            branches.append([*before, token])
            draft_id = int((self.ids == token).nonzero()[0, 0])
            expected = float(self.scores_along(r, before)[draft_id])
            above = 0.0 if parent < 0 else float(tree.scores[parent])
            assert tree.scores[i] - above == pytest.approx(expected, abs=2e-4)


@pytest.mark.parametrize("layout", ["specforge", "specforge_eagle31", "speculators", "yuhuili"])
def test_each_branch_equals_the_chain_along_it(layout: str, tmp_path: Path) -> None:
    world = World(tmp_path, layout)
    world.commit_all()
    trees = world.drafter.propose(world.requests([16, 9, 16, 12], [8, 8, 1, 3]))
    for r, tree in enumerate(trees):
        tree.validate(VOCAB)
        world.check(r, tree)
    assert trees[2].max_depth == trees[2].num_nodes  # width 1: a chain
    assert [tree.num_nodes for tree in trees] == [16, 9, 4, 12]
    assert max(tree.max_depth for tree in trees) > 2


def _exact(world: World, r: int, budget: int, depth: int, beam: int | None = None) -> list[Any]:
    """The best branches by the equations, searched without any tree of the package: [(score,
    tokens)]. With `beam`, the published search: the best `beam` children of the best `beam` nodes
    of each level, then the best `budget` of all."""
    level: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    everything: list[tuple[float, tuple[int, ...]]] = []
    for _ in range(depth):
        children = []
        for score, branch in level:
            logps = world.scores_along(r, list(branch))
            ranked = logps.sort(descending=True).indices[: beam or len(logps)].tolist()
            children += [(score + float(logps[d]), (*branch, int(world.ids[d]))) for d in ranked]
        children.sort(reverse=True)
        everything += children
        level = children[: beam or budget]
    return sorted(everything, reverse=True)[:budget]


def _branches(tree: DraftTree) -> list[tuple[int, ...]]:
    made: list[tuple[int, ...]] = []
    for token, parent in zip(tree.token_ids.tolist(), tree.parent_indices.tolist(), strict=True):
        made.append((*(made[parent] if parent >= 0 else ()), token))
    return made


@pytest.mark.parametrize("beam", [None, 3])
def test_trees_are_the_published_search(beam: int | None, tmp_path: Path) -> None:
    """`expand_width` and `tree_width` k with a node budget are the dynamic beam of k per level and
    its reranking; the default is the exact best-first tree."""
    world = World(tmp_path, expand=beam or 16, tree_depth=3)
    world.commit_all()
    trees = world.drafter.propose(world.requests([10] * 4, [beam or 12] * 4))
    for r, tree in enumerate(trees):
        expected = {branch for _, branch in _exact(world, r, 10, 3, beam)}
        assert set(_branches(tree)) == expected


def test_chunks_leave_the_context_of_one_pass(tmp_path: Path) -> None:
    """However a prompt was cut: the last slot of a chunk knows the first token of the next."""
    whole, cut = World(tmp_path), World(tmp_path)
    whole.commit_all()
    cut.commit([(0, 0, 1), (1, 0, 3), (2, 0, 16), (3, 0, 1)])
    cut.commit([(1, 3, 6), (2, 16, 19), (3, 1, 32)])
    cut.commit([(0, 0, 1), (1, 5, 6), (2, 18, 19), (3, 31, 32)])
    for r, n in enumerate(LENGTHS):
        slots = slice(100 * r, 100 * r + n - 1)
        torch.testing.assert_close(cut.cache.key[slots], whole.cache.key[slots])
        torch.testing.assert_close(cut.cache.value[slots], whole.cache.value[slots])
    asked = whole.requests([16] * 4, [8] * 4)
    for a, b in zip(whole.drafter.propose(asked), cut.drafter.propose(asked), strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()


def test_only_the_last_slot_depends_on_the_next_token(tmp_path: Path) -> None:
    """Hence a hit of cached blocks needs its last one again, and no other."""
    world = World(tmp_path)
    world.commit_all()
    key = world.cache.key.clone()
    world.tokens[2][16] = (world.tokens[2][16] + 1) % VOCAB
    world.commit_all()
    changed = (world.cache.key != key).flatten(1).any(1) & ~key.flatten(1).isnan().any(1)
    assert changed.nonzero().flatten().tolist() == [200 + 15]


def test_requests_that_want_no_forward_get_none(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.commit_all()
    asked = world.requests([8] * 4, [8] * 4)
    asked.forward_depths[:] = [0, 2, 0, 1]
    trees = world.drafter.propose(asked)
    assert [tree.max_depth for tree in trees] == [0, 2, 0, 1]
    world.check(1, trees[1])


def test_a_draft_that_no_step_came_before(tmp_path: Path) -> None:
    """Warm-up and calibration draft for requests that nothing was committed for."""
    world = World(tmp_path)
    world.cache.key.zero_(), world.cache.value.zero_()
    trees = world.drafter.propose(world.requests([4] * 4, [2] * 4))
    assert all(tree.is_valid(VOCAB) and tree.num_nodes for tree in trees)


def test_tokens_past_the_vocabulary_stop_nothing(tmp_path: Path) -> None:
    world = World(tmp_path)
    for tokens in world.tokens:
        tokens[:-1:3] = VOCAB + 1
    world.commit_all()
    trees = world.drafter.propose(world.requests([8] * 4, [8] * 4))
    assert all(tree.is_valid(VOCAB) and tree.num_nodes for tree in trees)


def test_positions_past_the_models_end_are_not_looked_up(tmp_path: Path) -> None:
    world = World(tmp_path, max_model_len=34)
    world.commit_all()
    trees = world.drafter.propose(world.requests([8] * 4, [8] * 4))
    assert trees[-1].num_nodes == 8
