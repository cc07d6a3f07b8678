# SPDX-License-Identifier: Apache-2.0
"""Trees as tensors do what the host's trees do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.tree.candidates import tree_of
from tests.unit.vllm_v2.steps import VOCAB, attached, input_batch, trees
from vllm_specplug.kernels import ancestor_words as words_on_host
from vllm_specplug.tree import DraftTree
from vllm_specplug.tree.step_trees import (
    NO_NODE,
    ROOT,
    TreeStore,
    along_paths,
    ancestor_words,
    attach_trees,
    committed_rows,
    emitting_rows,
    path_moves,
    walk_trees,
)
from vllm_specplug.vllm_v2.step_input import step_rows

CPU = torch.device("cpu")
batches = st.lists(trees(), min_size=1, max_size=4)
BLOCK = 4


def test_words_of_trees_wider_than_a_word() -> None:
    tokens = np.zeros(150, np.int64)
    tokens[60:] = np.arange(90) % VOCAB
    parents = np.arange(-1, 149, dtype=np.int32)
    chain = tree_of(tokens.tolist(), parents.tolist())
    step, _, _ = attached([chain, chain.prefix(70)], num_nodes=150)
    padded = np.concatenate([parents[:70], np.full(80, -1, np.int32)])
    assert torch.equal(ancestor_words(step), words_on_host([parents, padded]))


def walk_on_host(tree: DraftTree, samples: list[int]) -> tuple[list[int], list[int]]:
    """Accepted nodes from the root down, and the emitted tokens, which are one more, of the
    target's samples at the root and at each node."""
    path: list[int] = []
    node = -1
    while (child := tree.child_of(node, samples[node + 1])) is not None:
        path.append(node := child)
    return path, [samples[0], *(samples[node + 1] for node in path)]


@given(batches, st.integers(0, 2**32 - 1))
def test_the_walk_is_that_of_the_host(batch: list[DraftTree], seed: int) -> None:
    step, tokens, contexts = attached(batch)
    rng = np.random.default_rng(seed)
    starts = step.rows.starts.tolist()
    samples = torch.from_numpy(rng.integers(0, VOCAB, starts[-1]))
    # Mostly a child, so that paths grow long.
    for i, tree in enumerate(batch):
        for node in range(tree.num_nodes):
            if rng.random() < 0.7:
                row = starts[i] + 1 + int(tree.parent_indices[node])
                samples[row] = int(tree.token_ids[node])
    walk = walk_trees(step, samples, tokens)
    emitting = emitting_rows(step, walk)
    # A slot is its block and offset; blocks in no order.
    slots = np.concatenate([_slots(context, rng, 40 * i) for i, context in enumerate(contexts)])
    cache = torch.arange(len(batch) * 40 * BLOCK)
    for source, target in zip(
        *(t.flatten() for t in path_moves(step, walk, torch.from_numpy(slots))), strict=True
    ):
        cache[target] = cache[source].clone()
    for i, tree in enumerate(batch):
        path, emitted = walk_on_host(tree, samples[starts[i] : starts[i + 1]].tolist())
        assert walk.lengths[i] == len(path)
        assert walk.emitted[i, : len(path) + 1].tolist() == emitted
        rows = [starts[i], *(starts[i] + 1 + node for node in path)]
        assert walk.path_rows[i, : len(rows)].tolist() == rows
        assert emitting[starts[i] : starts[i] + len(rows)].tolist() == rows
        # One move after the other, no row of the path is lost.
        behind_root = slots[starts[i] : starts[i] + len(rows)]
        assert cache[behind_root].tolist() == slots[rows].tolist()


def _slots(context: int, rng: np.random.Generator, first_block: int) -> np.ndarray:
    """Cache slots of a root at position `context` and of the 12 rows behind it."""
    blocks, positions = first_block + rng.permutation(40), context + np.arange(13)
    return blocks[positions // BLOCK] * BLOCK + positions % BLOCK


@given(st.lists(trees(), min_size=1, max_size=3), st.data())
def test_committed_rows_are_in_the_order_of_positions(
    batch: list[DraftTree], data: st.DataObject
) -> None:
    """Prompt rows, the root, then the accepted path behind it; nothing of what was rejected."""
    prompts = [data.draw(st.integers(0, 4)) for _ in batch]
    step, flat, contexts = attached(batch, prompt_rows=prompts)
    assert step.rows.covers_batch == (not any(prompts))
    # All nodes hold what the row above samples where they are the first child.
    samples = torch.full((13 * len(batch),), VOCAB + 1)
    for row in reversed(range(len(flat))):
        if step.parent_rows[row] >= 0:
            samples[step.parent_rows[row]] = flat[row]
    walk = walk_trees(step, samples, flat)
    total = len(flat) + sum(prompts)
    committed = committed_rows(step, walk, torch.arange(100, 100 + total), torch.arange(total))
    first = 0
    for i, prompt in enumerate(prompts):
        root = first + prompt
        path = [root, *(root + 1 + n for n in _first_children(batch[i]))]
        count = prompt + len(path)
        assert committed.computed_rows[first : first + count].tolist() == [
            *range(first, root), *path,
        ]  # fmt: skip
        places = committed.slots[first : root + 13].tolist()
        assert places[:count] == list(range(100 + first, 100 + first + count))
        assert set(places[count:]) <= {-1}
        positions = committed.positions[root : first + count].tolist()
        assert positions == list(range(contexts[i], contexts[i] + len(path)))
        assert committed.last_rows[i] == path[-1]
        first = root + 13


def _first_children(tree: DraftTree) -> list[int]:
    path: list[int] = []
    node = -1
    while (tree.parent_indices == node).any():
        node = int(np.flatnonzero(tree.parent_indices == node)[0])
        path.append(node)
    return path


def _put(parents: list[int], tokens: list[int]) -> TreeStore:
    store = TreeStore(2, len(parents), VOCAB, CPU)
    given_tokens = torch.tensor([tokens])
    legal = store.put(
        torch.tensor([1]), torch.tensor([8]), given_tokens, torch.tensor([parents]),
        torch.tensor([len(parents)]), torch.zeros(1, len(parents)),
    )  # fmt: skip
    assert int(legal.min()) >= 0 and int(legal.max()) < VOCAB
    return store


def _attached(parents: list[int], tokens: list[int]) -> Any:
    return attach_trees(_put(parents, tokens), step_rows(input_batch([1], [8], [3]), 3))


@pytest.mark.parametrize(
    ("parents", "tokens", "reachable"),
    [
        ([-1, 0, 1], [1, 2, 3], [0, 1, 2]),
        ([-1, 2, 0], [1, 2, 3], [0, 2]),  # a parent behind its child
        ([-1, 1, 0], [1, 2, 3], [0, 2]),  # its own parent
        ([-5, -1, 7], [1, 2, 3], [1]),
        ([-1, -1, 0], [1, 1, 3], [0, 2]),  # siblings that repeat a token
        ([-1, 0, 1], [1, VOCAB, 3], [0]),  # no token; what hangs below is lost with it
        ([-1, 0, 1], [-1, 2, 3], []),
    ],
)
def test_what_breaks_a_rule_is_out_of_reach(
    parents: list[int], tokens: list[int], reachable: list[int]
) -> None:
    step = _attached(parents, tokens)
    got = []
    for node in range(3):
        row, above = node + 1, []
        while row > 0:
            above.append(row)
            row = int(step.parent_rows[row])
        if row == 0:
            got.append(node)
            assert step.depths[node + 1] == len(above)
    assert got == reachable
    # Whatever the tree was, its rows have legal positions and attend what exists.
    assert int(step.depths.min()) >= 0 and int(step.depths.max()) <= 3
    assert bool((ancestor_words(step) & 1 == 1).all())


def test_a_tree_is_only_found_below_its_own_root() -> None:
    """A slot that another request took over, and placeholders that nobody drafted."""
    store = _put([-1, 0, -1], [1, 2, 3])
    for context, is_found in ((8, True), (9, False)):
        step = attach_trees(store, step_rows(input_batch([1], [context], [3]), 3))
        assert (step.parent_rows[1:] != NO_NODE).all() == is_found
        assert step.depths.tolist() == ([0, 1, 2, 1] if is_found else [0, 1, 2, 3])
    store.clear(torch.tensor([1]))
    step = attach_trees(store, step_rows(input_batch([1], [8], [3]), 3))
    assert step.parent_rows.tolist() == [ROOT, NO_NODE, NO_NODE, NO_NODE]


def test_values_are_added_up_along_accepted_paths() -> None:
    # Siblings 1 and 3, and 4 below 1.
    step = _attached([-1, -1, 0], [1, 3, 4])
    for first, total in ((1, 1 + 2 + 8), (3, 1 + 4), (5, 1)):
        walk = walk_trees(step, torch.tensor([first, 4, 7, 7]), torch.tensor([0, 1, 3, 4]))
        assert along_paths(walk, torch.tensor([1, 2, 4, 8])).tolist() == [total]


def test_rows_that_are_taken_out_are_not_accepted() -> None:
    step = _attached([-1, 0, 1], [1, 2, 3])
    samples, tokens = torch.tensor([1, 2, 3, 4]), torch.tensor([0, 1, 2, 3])
    assert walk_trees(step, samples, tokens).lengths.tolist() == [3]
    dropped = torch.tensor([True, False, True, False])
    walk = walk_trees(step.without(dropped), samples, tokens)
    assert walk.lengths.tolist() == [1]
    assert walk.emitted[0, :2].tolist() == [1, 2]
