# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels in Triton's interpreter, against an oracle that knows neither masks nor pages.

Shapes are small: the interpreter takes about a second for a handful of tiles.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.kernels.paged import chain_attention, path_of, random_parents
from vllm_specplug.kernels.cuda_contract import CudaTreeMetadata

pytest.importorskip("triton")

from vllm_specplug.kernels.hybrid_attn_triton import hybrid_attn_triton, prefix_attn_triton
from vllm_specplug.kernels.tree_attn_triton import (
    TreeAttnConfig,
    choose_splits,
    tree_attn_triton,
    tree_words,
)

pytestmark = pytest.mark.usefixtures("interpreter")

FP32, FP16 = torch.float32, torch.float16


class DeviceTrees:
    """Trees over a cache in vLLM's GPU layout; slots that nobody owns are NaN."""

    def __init__(
        self,
        specs: list[tuple[int, int]],  # (context, nodes)
        *,
        dtype: torch.dtype = FP32,
        kv_heads: int = 1,
        group: int = 2,
        head_dim: int = 16,
        page: int = 16,
        dense: bool = False,
        mask: str = "tree",
        seed: int = 0,
    ) -> None:
        rng = np.random.default_rng(seed)
        draw = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=draw).to(dtype)

        self.mask, self.dtype, self.scale = mask, dtype, head_dim**-0.5
        self.contexts = [c for c, _ in specs]
        self.parents = [random_parents(n, rng) for _, n in specs]
        self.rows = [n + 1 for _, n in specs]
        blocks = max(-(-(c + n) // page) for c, n in zip(self.contexts, self.rows, strict=True))
        shuffled = torch.randperm(len(specs) * blocks + 1, generator=draw)[: len(specs) * blocks]
        # Request numbers are not tree numbers: the table has a row of rubbish first.
        rubbish = torch.full((1, blocks), 10**9)
        self.block_table = torch.cat([rubbish, shuffled.view(-1, blocks)]).int()
        shape = (len(specs) * blocks + 1, page, kv_heads, 2 * head_dim)
        # [num_blocks, Hkv, page, 2 * Dh], in memory page before head
        self.cache = torch.full(shape, float("nan"), dtype=dtype).transpose(1, 2)
        self.key_cache, self.value_cache = self.cache.transpose(1, 2).split(head_dim, dim=-1)
        self.starts, self.keys, self.values = [], [], []
        start = 0
        for r, (context, n) in enumerate(zip(self.contexts, self.rows, strict=True)):
            start += 2  # rows of other requests
            self.starts.append(start)
            start += n
            key, value = (
                normal(context + n, kv_heads, head_dim),
                normal(context + n, kv_heads, head_dim),
            )
            for position in range(context if dense else context + n):
                block = int(self.block_table[r + 1, position // page])
                self.key_cache[block, position % page] = key[position]
                self.value_cache[block, position % page] = value[position]
            self.keys.append(key)
            self.values.append(value)
        # A slice of a joined projection: rows are not contiguous.
        self.query = normal(start + 2, kv_heads * group + 3, head_dim)[:, : kv_heads * group]
        self.tail = {}
        if dense:
            for name, parts in (("tail_key", self.keys), ("tail_value", self.values)):
                tails = [p[-n:] for p, n in zip(parts, self.rows, strict=True)]
                self.tail[name] = torch.cat(tails)

    def parent_rows(self) -> torch.Tensor:
        if self.mask == "causal":
            parts = [np.arange(-1, n - 1) for n in self.rows]
        else:
            parts = [np.concatenate([[-1], p + 1]) for p in self.parents]
        return torch.from_numpy(np.concatenate(parts).astype(np.int32))

    def metadata(self, places: int = 0) -> CudaTreeMetadata:
        """`places` more trees of no rows, as a graph for a larger batch has them."""
        columns = [
            [r + 1, start, rows, context, first]
            for r, (start, rows, context, first) in enumerate(
                zip(
                    self.starts,
                    self.rows,
                    self.contexts,
                    np.cumsum([0, *self.rows[:-1]]).tolist(),
                    strict=True,
                )
            )
        ]
        columns += [[10**6, 10**6, 0, 10**6, 10**6]] * places
        return CudaTreeMetadata(
            plan=torch.tensor(columns, dtype=torch.int32).t().contiguous(),
            parent_rows=self.parent_rows(),
            block_table=self.block_table,
            max_rows=max(self.rows),
            max_context=max(self.contexts),
            mask_kind="full" if self.mask == "full" else "tree",
        )

    def seen(self, r: int, row: int) -> list[int]:
        if self.mask == "tree":
            return path_of(self.parents[r], row)
        return list(range(row + 1 if self.mask == "causal" else self.rows[r]))

    def expected(self) -> list[torch.Tensor]:
        out = []
        for r, context in enumerate(self.contexts):
            rows = []
            for row in range(self.rows[r]):
                chain = [*range(context), *(context + j for j in self.seen(r, row))]
                query = self.query[self.starts[r] + row]
                rows.append(
                    chain_attention(query, self.keys[r][chain], self.values[r][chain], self.scale)
                )
            out.append(torch.stack(rows))
        return out

    def check(self, *, splits: int | None = None, places: int = 0) -> None:
        untouched = torch.full(self.query.shape, 7.0, dtype=self.dtype)
        output = untouched.clone()
        tree_attn_triton(
            self.query,
            self.key_cache,
            self.value_cache,
            output,
            self.metadata(places),
            self.scale,
            splits=splits,
            **self.tail,
        )
        limit = 1e-5 if self.dtype == FP32 else 4e-3
        for start, n, expected in zip(self.starts, self.rows, self.expected(), strict=True):
            actual = output[start : start + n].double()
            assert not actual.isnan().any(), "an unused slot was read"
            error = (actual - expected).abs().max().item()
            assert error <= limit, f"off by {error}"
            output[start : start + n] = 7.0
        assert torch.equal(output, untouched), "a row of no tree was written"


@pytest.mark.parametrize("nodes", [0, 1, 2, 62, 63, 64, 65])
def test_node_counts_around_word_edges(nodes):
    DeviceTrees([(19, nodes), (3, 1)]).check()


def test_largest_tree():
    DeviceTrees([(20, 256)], group=1).check()


@pytest.mark.parametrize("page", [16, 64, 128])
def test_context_lengths_around_block_edges(page):
    DeviceTrees([(c, 3) for c in (0, 1, 15, 16, 17, 63, 64, 65)], page=page, group=1).check()


@pytest.mark.parametrize("splits", [2, 3])
def test_splits_are_merged_and_short_contexts_leave_some_empty(splits):
    DeviceTrees([(530, 5), (3, 2), (0, 9), (257, 0)], group=1).check(splits=splits)


@pytest.mark.parametrize("mask", ["tree", "causal", "full"])
@pytest.mark.parametrize("nodes", [0, 15, 66])
def test_dense_tails(mask, nodes):
    DeviceTrees([(0, nodes), (40, nodes)], dense=True, mask=mask).check()


@pytest.mark.parametrize(("head_dim", "group", "kv_heads"), [(96, 3, 1), (80, 1, 2), (64, 8, 1)])
def test_head_shapes_in_half_precision(head_dim, group, kv_heads):
    DeviceTrees(
        [(33, 9), (0, 12)], dtype=FP16, head_dim=head_dim, group=group, kv_heads=kv_heads
    ).check()


def test_shared_prefix_blocks():
    problem = DeviceTrees([(32, 6), (40, 9)])
    problem.block_table[2, :2] = problem.block_table[1, :2]
    problem.keys[1][:32], problem.values[1][:32] = problem.keys[0][:32], problem.values[0][:32]
    problem.check()


@pytest.mark.parametrize("splits", [1, 2])
def test_places_without_a_tree_are_skipped(splits):
    DeviceTrees([(300, 5), (3, 2)], group=1).check(splits=splits, places=3)


def test_the_check_notices_a_wrong_mask():
    problem = DeviceTrees([(5, 8)])
    problem.parent_rows = lambda: torch.arange(-1, 8).int()
    with pytest.raises(AssertionError, match="off by"):
        problem.check()


def test_words_of_a_damaged_tree_end():
    problem = DeviceTrees([(5, 8)])
    meta = problem.metadata()
    meta.parent_rows[3] = 7
    words = tree_words(meta)
    assert int(words[3, 0]) == 1 << 3


def test_words_match_the_host_builder():
    from vllm_specplug.kernels import ancestor_words

    problem = DeviceTrees([(0, 130), (0, 0), (0, 64)], group=1)
    assert torch.equal(tree_words(problem.metadata()), ancestor_words(problem.parents))


@pytest.mark.parametrize("splits", [1, 3])
def test_two_passes_are_the_single_pass(splits):
    problem = DeviceTrees([(300, 9), (0, 3), (17, 0), (64, 66)], dense=True, group=1)
    meta = problem.metadata()
    output = torch.full_like(problem.query, 7.0)
    hybrid_attn_triton(
        problem.query, problem.key_cache, problem.value_cache, output, meta, problem.scale,
        **problem.tail, splits=splits,
    )  # fmt: skip
    for start, n, expected in zip(problem.starts, problem.rows, problem.expected(), strict=True):
        assert (output[start : start + n].double() - expected).abs().max() < 1e-5
        output[start : start + n] = 7.0
    assert (output == 7.0).all(), "a row of no tree was written"


@pytest.mark.parametrize("splits", [1, 2])
def test_the_prefix_part_sees_the_context_and_nothing_else(splits):
    problem = DeviceTrees([(0, 2), (1, 0), (290, 5)], group=1)
    output = torch.full_like(problem.query, float("nan"))
    lse = torch.full(problem.query.shape[:2], float("nan"))
    prefix_attn_triton(
        problem.query, problem.key_cache, problem.value_cache, output, lse, problem.metadata(),
        problem.scale, splits=splits,
    )  # fmt: skip
    for r, (context, start, n) in enumerate(
        zip(problem.contexts, problem.starts, problem.rows, strict=True)
    ):
        rows = slice(start, start + n)
        scores = torch.einsum(
            "ihd,jd->ihj", problem.query[rows], problem.keys[r][:context, 0]
        ).double() * problem.scale  # fmt: skip
        expected = scores.softmax(-1) @ problem.values[r][:context, 0].double()
        torch.testing.assert_close(output[rows].double(), expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(lse[rows].double(), scores.logsumexp(-1), atol=1e-5, rtol=1e-5)
    assert lse[problem.starts[0]].isneginf().all() and (output[problem.starts[0]] == 0).all()


def test_configurations_fit_their_device():
    hopper, ada = 227 * 1024, 99 * 1024
    for rows in (1, 16, 65, 257 * 8):
        for dim in (64, 96, 128, 256):
            for shared in (hopper, ada):
                config = TreeAttnConfig.choose(rows, dim, 2, shared)
                stage = 2 * config.block_n * dim * 2
                assert config.num_stages * stage + config.block_m * dim * 2 <= shared
                assert 64 % config.block_n == 0
    assert choose_splits(programs=8, max_context=32768, num_sms=132) >= 32
    assert choose_splits(programs=1000, max_context=32768, num_sms=132) == 1
    assert choose_splits(programs=1, max_context=100, num_sms=132) == 1
