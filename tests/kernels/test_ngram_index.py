# SPDX-License-Identifier: Apache-2.0
"""N-gram lookups: what followed before, the compiled index like the readable one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_specplug.kernels.extension import has_cpu_extension
from vllm_specplug.kernels.ngram_index import (
    MIN_SUFFIX,
    CompiledNgramIndex,
    NgramIndex,
    NgramIndexReference,
    make_ngram_index,
)

KINDS = [NgramIndexReference]
if has_cpu_extension():
    KINDS.append(CompiledNgramIndex)
each_kind = pytest.mark.parametrize("kind", KINDS)

TOKENS = st.lists(st.integers(0, 3), max_size=60)


def _tokens(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int32)


@each_kind
@given(TOKENS, st.integers(2, 8), st.integers(1, 4), st.integers(1, 9))
def test_continuations_followed_the_same_suffix(
    kind: type[NgramIndex], tokens: list[int], longest: int, count: int, length: int
) -> None:
    found = kind(longest).look_up(_tokens(tokens), count, length)
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
    assert bool(kind(4).look_up(_tokens(tokens), 1, 1)) == before


@pytest.mark.skipif(len(KINDS) == 1, reason="the kernels are not compiled")
@given(
    st.lists(st.lists(st.integers(0, 3), max_size=30), max_size=6),
    st.integers(2, 8),
    st.integers(1, 5),
    st.integers(1, 9),
)
def test_the_compiled_index_equals_the_readable_one(
    pieces: list[list[int]], longest: int, count: int, length: int
) -> None:
    compiled, readable = CompiledNgramIndex(longest), NgramIndexReference(longest)
    tokens: list[int] = []
    for piece in pieces:
        tokens += piece
        expected = readable.look_up(_tokens(tokens), count, length)
        assert compiled.look_up(_tokens(tokens), count, length) == expected
        assert compiled.num_tokens == readable.num_tokens == len(tokens)
    assert CompiledNgramIndex(longest).look_up(_tokens(tokens), count, length) == (
        NgramIndexReference(longest).look_up(_tokens(tokens), count, length)
    )


@each_kind
def test_a_repeated_passage_is_found_whole(kind: type[NgramIndex]) -> None:
    passage = list(range(10, 30))
    found = kind(4).look_up(_tokens([1, 2, *passage, 3, *passage[:5]]), 1, 8)
    assert found == [(4, passage[5:13])]


@each_kind
def test_periodic_text_goes_on(kind: type[NgramIndex]) -> None:
    found = kind(4).look_up(_tokens([9, 1, 2, 3, 1, 2, 3, 1]), 3, 8)
    assert found == [(4, [2, 3, 1, 2, 3, 1, 2, 3])]


@pytest.mark.skipif(len(KINDS) == 1, reason="the kernels are not compiled")
def test_a_long_text_is_indexed_as_it_grows_and_memory_follows_its_length() -> None:
    rng = np.random.default_rng(0)
    # Few distinct tokens, so that suffixes of every length recur; ids of any size.
    tokens = rng.choice(np.array([0, 7, 128_000, 2**31 - 1]), 9_000).astype(np.int32)
    compiled, readable = CompiledNgramIndex(4), NgramIndexReference(4)
    hits = 0
    for end in (1, 500, 1024, 1025, 4000, 9000):
        found = compiled.look_up(tokens[:end], 3, 6)
        assert found == readable.look_up(tokens[:end], 3, 6)
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


@pytest.mark.skipif(len(KINDS) == 1, reason="the kernels are not compiled")
@pytest.mark.parametrize("text", ["crowded", "random", "one token"])
def test_no_text_makes_a_lookup_long(text: str) -> None:
    rng = np.random.default_rng(1)
    tokens = {
        "crowded": lambda: _crowded_text(300, 11),
        "random": lambda: rng.integers(0, 1 << 17, 1200).tolist(),
        "one token": lambda: [5] * 1200,
    }[text]()
    index = CompiledNgramIndex(4)
    expected = NgramIndexReference(4).look_up(_tokens(tokens), 3, 6)
    assert index.look_up(_tokens(tokens), 3, 6) == expected
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


@pytest.mark.skipif(len(KINDS) == 1, reason="the kernels are not compiled")
def test_the_operator_refuses_what_does_not_fit() -> None:
    def call(tokens: int = 4, links: int = 8, heads: int = 16, indexed: int = 0) -> int:
        return torch.ops.specplug.ngram_lookup.default(
            torch.zeros(tokens, dtype=torch.int32),
            torch.zeros((3, links), dtype=torch.int32),
            torch.zeros((3, heads), dtype=torch.int32),
            indexed,
            4,
            torch.zeros(2, dtype=torch.int32),
            torch.zeros((2, 5), dtype=torch.int32),
        )

    assert call() == 1
    for wrong in ({"links": 3}, {"heads": 8}, {"heads": 24}, {"indexed": 5}, {"indexed": -1}):
        with pytest.raises(RuntimeError, match="ngram_lookup"):
            call(**wrong)


def test_the_compiled_index_is_used_where_there_is_one() -> None:
    assert type(make_ngram_index(4)) is KINDS[-1]
