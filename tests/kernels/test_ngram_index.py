# SPDX-License-Identifier: Apache-2.0
"""N-gram lookups: what followed before, the compiled index like the readable one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.ngram_oracle import NgramOracle
from tests.unit.tree.candidates import tree_of, trees
from vllm_specplug.kernels.extension import has_cpu_extension
from vllm_specplug.kernels.ngram_index import (
    MIN_SUFFIX,
    CompiledNgramIndex,
    NgramIndex,
    TreeArrays,
    make_ngram_index,
)
from vllm_specplug.tree import DraftTree

KINDS: list[type[NgramIndex]] = [NgramOracle]
if has_cpu_extension():
    KINDS.append(CompiledNgramIndex)
needs_kernels = pytest.mark.skipif(len(KINDS) == 1, reason="the kernels are not compiled")
each_kind = pytest.mark.parametrize("kind", KINDS)

TOKENS = st.lists(st.integers(0, 3), max_size=60)


def _tokens(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def _arrays(tree: DraftTree) -> TreeArrays:
    return tree.token_ids, tree.parent_indices, tree.depths, tree.scores


def _tree(nodes: list[tuple[int, int, float]]) -> TreeArrays:
    """From (token, parent, score) of each node."""
    return _arrays(tree_of(*zip(*nodes, strict=True)) if nodes else tree_of((), ()))


TREES = trees(10, 5, (0.0, 0.25, 0.5, 2.0, 1000.0, np.inf)).map(_arrays)


def _graft(
    kind: type[NgramIndex],
    tokens: list[int],
    tree: TreeArrays,
    shares: list[float],
    budget: int = 12,
    width: int = 3,
    depth: int = 6,
) -> list[tuple[tuple[int, ...], float]]:
    """Paths and scores of the grafted tree."""
    index = kind(len(shares) - 1)
    index.lookup(_tokens(tokens), 1, 1)
    weights = np.array(shares, np.float32)
    grafted = index.graft(_tokens(tokens), tree, weights, width, depth, budget)
    assert grafted is not None
    paths: list[tuple[int, ...]] = []
    for token, parent, node_depth in zip(*(part.tolist() for part in grafted[:3]), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
        assert len(paths[-1]) == node_depth
    return list(zip(paths, grafted[3].tolist(), strict=True))


@each_kind
@given(TOKENS, TREES, st.integers(1, 5), st.integers(0, 20), st.integers(1, 4))
def test_a_grafted_tree_is_best_first(
    kind: type[NgramIndex],
    tokens: list[int],
    tree: TreeArrays,
    longest: int,
    budget: int,
    width: int,
) -> None:
    shares = [0.0, *(0.3 + 0.1 * size for size in range(longest))]
    nodes = _graft(kind, tokens, tree, shares, 40, width)
    scores = [score for _, score in nodes]
    assert scores == sorted(scores, reverse=True) and all(score <= 0 for score in scores)
    assert len({path for path, _ in nodes}) == len(nodes)
    # The best tree of a smaller budget is the beginning of a larger one.
    assert _graft(kind, tokens, tree, shares, budget, width) == nodes[:budget]
    if kind is CompiledNgramIndex:
        assert nodes == _graft(NgramOracle, tokens, tree, shares, 40, width)


@each_kind
def test_every_node_is_looked_up(kind: type[NgramIndex]) -> None:
    # The head's 9 is new after 1 2, but what followed 9 is known.
    tokens = [9, 7, 8, 5, 1, 2]
    nodes = dict(_graft(kind, tokens, _tree([(9, -1, np.log(0.5))]), [0, 0.5, 0.5]))
    assert nodes[9,] == pytest.approx(np.log(0.5))
    assert nodes[9, 7] == pytest.approx(np.log(0.25))
    # Two tokens of the path are a suffix too.
    assert nodes[9, 7, 8] == pytest.approx(np.log(0.125))


@each_kind
def test_head_and_text_are_mixed(kind: type[NgramIndex]) -> None:
    # After 1 came 2 twice and 3 once; the head gives 2 a half and 4 a quarter.
    tokens = [1, 2, 1, 3, 1, 2, 1]
    tree = _tree([(2, -1, np.log(0.5)), (4, -1, np.log(0.25))])
    nodes = dict(_graft(kind, tokens, tree, [0, 0.6], depth=1))
    expected = {2: 0.4 * 0.5 + 0.6 * 2 / 3, 4: 0.4 * 0.25, 3: 0.6 / 3}
    assert nodes == {(token,): pytest.approx(np.log(p)) for token, p in expected.items()}
    assert nodes[2,] > max(np.log(0.5), np.log(0.4))
    # Text that is never right leaves the head's tree.
    alone = dict(_graft(kind, tokens, tree, [0, 0.0], depth=1))
    assert alone == {(2,): pytest.approx(np.log(0.5)), (4,): pytest.approx(np.log(0.25))}


@each_kind
def test_tokens_that_are_not_the_targets_are_not_proposed(kind: type[NgramIndex]) -> None:
    # A prompt may hold ids of the tokenizer past the target's vocabulary.
    tokens, shares = _tokens([1, 2, 9, 3, 1, 2]), np.full(3, 0.5, np.float32)
    index = kind(2)
    assert index.lookup(tokens, 2, 3, vocab_size=9) == [(2, [])]
    assert index.lookup(tokens, 2, 3) == [(2, [9, 3, 1])]
    for vocab_size, expected in ((9, [1]), (10, [1, 9])):
        grafted = index.graft(tokens, _tree([(1, -1, -1.0)]), shares, 3, 1, 5, vocab_size)
        assert grafted is not None and sorted(grafted[0].tolist()) == expected


@each_kind
@pytest.mark.parametrize("place", range(4))
def test_arrays_of_other_types_are_no_tree(kind: type[NgramIndex], place: int) -> None:
    tokens, shares = _tokens([1, 2, 1]), np.full(3, 0.5, np.float32)
    index = kind(2)
    index.lookup(tokens, 1, 1)
    tree = list(_tree([(2, -1, -1.0), (3, 0, -2.0)]))
    assert index.graft(tokens, tuple(tree), shares, 3, 4, 5) is not None  # type: ignore[arg-type]
    for wrong in (tree[place].astype(np.float64), tree[place][:1], tree[place][None]):
        other = [*tree[:place], wrong, *tree[place + 1 :]]
        assert index.graft(tokens, tuple(other), shares, 3, 4, 5) is None  # type: ignore[arg-type]


@each_kind
def test_periodic_text_is_grafted_as_it_goes_on(kind: type[NgramIndex]) -> None:
    nodes = _graft(kind, [5, 6, 5, 6], _tree([]), [0, 0.9, 0.9], budget=5)
    assert [path for path, _ in nodes] == [(5, 6, 5, 6, 5)[:end] for end in range(1, 6)]


@each_kind
@pytest.mark.parametrize(
    "nodes", [[(1, 0, 0.0)], [(1, -2, 0.0)], [(1, -1, 0.5)], [(1, -1, np.nan)],
              [(1, -1, -1.0), (2, 0, -0.5)]],
)  # fmt: skip
def test_what_is_no_tree_is_not_grafted(
    kind: type[NgramIndex], nodes: list[tuple[int, int, float]]
) -> None:
    tokens, parents, scores = zip(*nodes, strict=True)
    tree = (np.array(tokens, np.int64), np.array(parents, np.int32),
            np.ones(len(nodes), np.int32), np.array(scores, np.float32))  # fmt: skip
    index = kind(2)
    index.lookup(_tokens([1, 2, 1]), 1, 1)
    shares = np.full(3, 0.5, np.float32)
    assert index.graft(_tokens([1, 2, 1]), tree, shares, 3, 4, 5) is None


@each_kind
@given(TOKENS, st.integers(2, 8), st.integers(1, 4), st.integers(1, 9))
def test_continuations_followed_the_same_suffix(
    kind: type[NgramIndex], tokens: list[int], longest: int, count: int, length: int
) -> None:
    found = kind(longest).lookup(_tokens(tokens), count, length)
    assert len(found) <= count
    sizes = [size for size, _ in found]
    assert sizes == sorted(sizes, reverse=True)
    for size, branch in found:
        assert MIN_SUFFIX <= size <= longest
        assert len(branch) == length
        suffix = tokens[len(tokens) - size :]
        # Past the end the text is taken to go on as it has been drafted.
        longer = tokens + branch
        assert any(
            tokens[at : at + size] == suffix and longer[at + size : at + size + length] == branch
            for at in range(len(tokens) - size)
        )
    assert len({tuple(branch) for _, branch in found}) == len(found)


@each_kind
@given(TOKENS)
def test_whatever_occurred_before_is_found(kind: type[NgramIndex], tokens: list[int]) -> None:
    suffix = tokens[-MIN_SUFFIX:]
    before = any(tokens[at : at + MIN_SUFFIX] == suffix for at in range(len(tokens) - MIN_SUFFIX))
    assert bool(kind(4).lookup(_tokens(tokens), 1, 1)) == before


@needs_kernels
@given(
    st.lists(st.lists(st.integers(0, 3), max_size=30), max_size=6),
    st.integers(2, 8),
    st.integers(1, 5),
    st.integers(1, 9),
)
def test_the_compiled_index_equals_the_readable_one(
    pieces: list[list[int]], longest: int, count: int, length: int
) -> None:
    compiled, readable = CompiledNgramIndex(longest), NgramOracle(longest)
    tokens: list[int] = []
    for piece in pieces:
        tokens += piece
        expected = readable.lookup(_tokens(tokens), count, length)
        assert compiled.lookup(_tokens(tokens), count, length) == expected
        assert compiled.num_tokens == readable.num_tokens == len(tokens)
    assert CompiledNgramIndex(longest).lookup(_tokens(tokens), count, length) == (
        NgramOracle(longest).lookup(_tokens(tokens), count, length)
    )


@each_kind
def test_a_repeated_passage_is_found_whole(kind: type[NgramIndex]) -> None:
    passage = list(range(10, 30))
    found = kind(4).lookup(_tokens([1, 2, *passage, 3, *passage[:5]]), 1, 8)
    assert found == [(4, passage[5:13])]


@needs_kernels
def test_a_long_text_is_indexed_as_it_grows_and_memory_follows_its_length() -> None:
    rng = np.random.default_rng(0)
    # Few distinct tokens, so that suffixes of every length recur; ids of any size.
    tokens = rng.choice(np.array([0, 7, 128_000, 2**31 - 1]), 9_000).astype(np.int32)
    compiled, readable = CompiledNgramIndex(4), NgramOracle(4)
    hits = 0
    for end in (1, 500, 1024, 1025, 4000, 9000):
        found = compiled.lookup(tokens[:end], 3, 6)
        assert found == readable.lookup(tokens[:end], 3, 6)
        hits += len(found)
    assert hits > 9
    assert compiled.num_bytes == 3 * 4 * 16384 * 4


def _crowded_text(count: int, bits: int) -> list[int]:
    """`count` 4-grams that an unseeded multiplicative hash puts into one of 2^`bits` buckets."""
    rng = np.random.default_rng(0)
    grams = rng.integers(0, 1 << 17, ((count << bits) * 5 // 4, 4), dtype=np.uint64)
    hashes = np.zeros(len(grams), np.uint64)
    for column in grams.T:
        hashes = (hashes ^ column) * np.uint64(0x9E3779B97F4A7C15)
        hashes ^= hashes >> np.uint64(29)
    buckets = (hashes * np.uint64(0xBF58476D1CE4E5B9)) >> np.uint64(64 - bits)
    return grams[buckets == buckets[0]][:count].flatten().tolist()


@needs_kernels
@pytest.mark.parametrize("text", ["crowded", "random", "one token"])
def test_no_text_makes_a_lookup_long(text: str) -> None:
    rng = np.random.default_rng(1)
    tokens = {
        "crowded": lambda: _crowded_text(300, 11),
        "random": lambda: rng.integers(0, 1 << 17, 1200).tolist(),
        "one token": lambda: [5] * 1200,
    }[text]()
    index = CompiledNgramIndex(4)
    expected = NgramOracle(4).lookup(_tokens(tokens), 3, 6)
    assert index.lookup(_tokens(tokens), 3, 6) == expected
    for level, size in enumerate((4, 3, 2, 1)):
        # Links lead to the same suffix and nowhere else ...
        place, suffix = len(tokens), tokens[-size:]
        for _ in range(50):
            place = int(index._links[level, place - 1])
            assert not place or tokens[place - size : place] == suffix, (size, place)
            if not place:
                break
        # ... and no table is crowded: the longest run of taken entries bounds what an insertion
        # or a lookup tries.
        taken = "".join("x" if head else " " for head in index._heads[level].tolist())
        assert max(len(run) for run in taken.split()) < 200, size


@needs_kernels
def test_the_operator_refuses_what_does_not_fit() -> None:
    def call(tokens: int = 4, links: int = 8, heads: int = 16, indexed: int = 0) -> int:
        return torch.ops.specplug.ngram_lookup.default(
            torch.zeros(tokens).int(), torch.zeros(3, links).int(), torch.zeros(3, heads).int(),
            indexed, 4, torch.zeros(2).int(), torch.zeros(2, 5).int(),
        )  # fmt: skip

    assert call() == 1
    for wrong in ({"links": 3}, {"heads": 8}, {"heads": 24}, {"indexed": 5}, {"indexed": -1}):
        with pytest.raises(RuntimeError, match="ngram_lookup"):
            call(**wrong)


@needs_kernels
def test_the_graft_operator_refuses_what_does_not_fit() -> None:
    def call(tokens=4, heads=16, shares=5, nodes=2, out=3) -> int:
        return torch.ops.specplug.ngram_graft.default(
            torch.zeros(tokens).int(), torch.zeros(3, 8).int(), torch.zeros(3, heads).int(), 4,
            torch.zeros(shares), 3, 4, 100, torch.arange(2), torch.full((nodes,), -1).int(),
            torch.zeros(2), torch.zeros(3).long(), torch.zeros(out).int(), torch.zeros(3).int(),
            torch.zeros(3),
        )  # fmt: skip

    assert call() == 2
    for wrong in ({"tokens": 9}, {"heads": 24}, {"shares": 4}, {"nodes": 1}, {"out": 2}):
        with pytest.raises(RuntimeError, match="ngram_graft"):
            call(**wrong)


def test_the_compiled_index_is_used_where_there_is_one() -> None:
    assert type(make_ngram_index(4)) is KINDS[-1]
