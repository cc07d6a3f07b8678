# SPDX-License-Identifier: Apache-2.0
"""N-gram branches of the device, in Triton's interpreter, against those of the host."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vllm_specplug.drafting.ngram import BranchStatistics
from vllm_specplug.kernels.ngram_index import NgramIndexReference
from vllm_specplug.tree import DraftTree, build_tree, merge_trees

pytest.importorskip("triton")

from vllm_specplug.kernels import ngram_lookup_triton
from vllm_specplug.kernels.ngram_lookup_triton import NgramLookup
from vllm_specplug.kernels.tree_builder_triton import build_best_first_triton
from vllm_specplug.kernels.tree_merge_triton import Trees, merge_branches

pytestmark = pytest.mark.usefixtures("interpreter")

SLOTS = 9


def texts(rng: np.random.Generator, count: int, longest: int) -> list[np.ndarray]:
    """Random texts of few tokens, periodic ones, and the shortest there are."""
    made = [np.array([3]), np.array([3, 3]), np.tile(rng.integers(0, 9, 3), 7)]
    while len(made) < count:
        made.append(rng.integers(0, rng.integers(2, 30), rng.integers(1, longest)))
    return [text.astype(np.int32) for text in made[:count]]


def lookup(
    histories: list[np.ndarray], depths: list[int], size: int, count: int, length: int,
    rng: np.random.Generator,
) -> tuple[torch.Tensor, torch.Tensor, int]:  # fmt: skip
    most = max(len(h) for h in histories)
    # Anything may lie behind a request's tokens and in slots of no request.
    tokens = torch.from_numpy(rng.integers(0, 3, (SLOTS, most + 5), dtype=np.int32))
    slots = torch.from_numpy(rng.permutation(SLOTS)[: len(histories)])
    for slot, history in zip(slots.tolist(), histories, strict=True):
        tokens[slot, : len(history)] = torch.from_numpy(history)
    found = NgramLookup(size, count, length, most + 5)(
        tokens,
        slots,
        torch.tensor([len(h) for h in histories], dtype=torch.int32),
        torch.tensor(depths, dtype=torch.int32),
        most,
    )
    return *found, most


def host_branches(
    history: np.ndarray, depth: int, size: int, count: int, length: int
) -> list[tuple[int, list[int]]]:
    return NgramIndexReference(size).lookup(history, count, min(depth, length))


@pytest.mark.parametrize(("size", "count", "length"), [(4, 3, 16), (2, 1, 5), (8, 16, 7)])
def test_branches_are_those_of_the_host(
    size: int, count: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ngram_lookup_triton, "PIECE", 32)
    rng = np.random.default_rng(size)
    several = 0
    for _ in range(3):
        histories = texts(rng, 7, 150)
        depths = [int(d) for d in rng.integers(0, length + 3, len(histories))]
        sizes, branches, _ = lookup(histories, depths, size, count, length, rng)
        for r, (history, depth) in enumerate(zip(histories, depths, strict=True)):
            wanted = host_branches(history, depth, size, count, length)
            several += len(wanted) > 1
            assert sizes[r].tolist() == [s for s, _ in wanted] + [0] * (count - len(wanted))
            for rank, (_, branch) in enumerate(wanted):
                padded = branch + [-1] * (length - len(branch))
                assert branches[r, rank].tolist() == padded
    assert several > 1 or count == 1


def test_a_long_history_is_read_once() -> None:
    """32k tokens, a third of which match; the kernel has no loop over them."""
    rng = np.random.default_rng(5)
    history = rng.integers(0, 3, 32_000).astype(np.int32)
    sizes, branches, _ = lookup([history, history[:7]], [16, 16], 4, 3, 16, rng)
    wanted = host_branches(history, 16, 4, 3, 16)
    assert len(wanted) == 3
    assert list(zip(sizes[0].tolist(), branches[0].tolist(), strict=True)) == wanted


def test_a_request_of_no_tokens_has_no_branches() -> None:
    empty = torch.zeros(2, dtype=torch.int32)
    sizes, _ = NgramLookup(4, 3, 8, 40)(
        torch.zeros((3, 40), dtype=torch.int32), torch.tensor([2, 0]), empty, empty + 8, 30
    )
    assert not sizes.any()


# -- merging -------------------------------------------------------------------------------


def learnt(rng: np.random.Generator, size: int, length: int) -> BranchStatistics:
    statistics = BranchStatistics()
    for _ in range(60):
        branch = rng.integers(0, 2, length).tolist()
        actual = rng.integers(0, 2, length).tolist()
        statistics.observe(int(rng.integers(1, size + 1)), int(rng.integers(0, 5)), branch, actual)
    return statistics


def assert_trees(built: Trees, wanted: list[DraftTree]) -> None:
    *fields, counts = built
    assert counts.tolist() == [tree.num_nodes for tree in wanted]
    for r, tree in enumerate(wanted):
        arrays = (tree.token_ids, tree.parent_indices, tree.depths, tree.scores)
        for field, array in zip(fields, arrays, strict=True):
            assert np.array_equal(field[r, : tree.num_nodes].numpy(), array)


@pytest.mark.parametrize("has_head", [True, False])
@pytest.mark.parametrize(("nodes", "count"), [(24, 3), (9, 1), (40, 6)])
def test_merged_trees_are_those_of_the_host(has_head: bool, nodes: int, count: int) -> None:
    rng = np.random.default_rng(nodes)
    size, length, width = 4, 10, 4
    merged_nodes = shared = 0
    for _ in range(2):
        statistics = learnt(rng, size, length)
        histories = texts(rng, 6, 90)
        depths = [int(d) for d in rng.integers(0, length + 1, len(histories))]
        budgets = [int(b) for b in rng.integers(0, nodes + 1, len(histories))]
        sizes, branches, _ = lookup(histories, depths, size, count, length, rng)
        # Few tokens, so that the head drafts what lookups find.
        ids = torch.from_numpy(rng.permuted(np.tile(np.arange(6), (6, 5, 1)), axis=2)[..., :width])
        logps = torch.from_numpy(rng.normal(size=(6, 5, width)).astype(np.float32))
        logps = logps.log_softmax(-1).sort(-1, descending=True).values
        b, d = (torch.tensor(v, dtype=torch.int32) for v in (budgets, depths))
        head = build_best_first_triton(ids, logps, b, d, width, nodes) if has_head else None
        table = torch.from_numpy(statistics.table(size, length))
        built = merge_branches(head, sizes, branches, table, b, nodes, lookup_only=True)
        together, alone = [], []
        for r, (history, depth, budget) in enumerate(zip(histories, depths, budgets, strict=True)):
            chains = [
                DraftTree.chain(branch[: len(scores)], scores)
                for rank, (matched, branch) in enumerate(
                    host_branches(history, depth, size, count, length)
                )
                for scores in [statistics.scores(matched, rank, len(branch))]
            ]
            own = []
            if has_head:
                own = [build_tree(ids[r].numpy(), logps[r].numpy(), budget,
                                  tree_width=width, tree_depth=depth)]  # fmt: skip
            together.append(merge_trees([*own, *chains], budget))
            alone.append(merge_trees(chains, budget))
            bare = own[0].token_ids.tolist() if own else []
            merged_nodes += together[-1].token_ids.tolist() != bare
            shared += len(chains) > 1 and alone[-1].num_nodes < sum(c.num_nodes for c in chains)
        assert_trees(built[0], together)
        assert_trees(built[1], alone)
    assert merged_nodes > 2 and (shared or count == 1)
