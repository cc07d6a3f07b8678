# SPDX-License-Identifier: Apache-2.0
"""Paged trees for tests, with an oracle that knows neither masks nor pages."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from vllm_specplug.kernels import (
    AttnFeatures,
    ancestor_words,
    causal_words,
    full_words,
    tree_attn,
)
from vllm_specplug.kernels.cpu_layout import CpuKvLayout, make_layout, standard_tables
from vllm_specplug.kernels.metadata import TreeAttnMetadata


def layout_of(kind: str, dtype: torch.dtype, block_size: int, head_size: int) -> CpuKvLayout:
    """A layout of kind vec, vnni or table; "table" is some other permutation."""
    if kind != "table":
        tables = standard_tables(kind, block_size, head_size)
    else:
        generator = torch.Generator().manual_seed(1)
        tables = torch.stack(
            [torch.randperm(block_size * head_size, generator=generator) for _ in range(2)]
        ).view(2, block_size, head_size)
    layout = make_layout(tables.to(torch.int32), kind, dtype)
    assert layout.kind == kind
    return layout


def write_slots(layout: CpuKvLayout, cache: torch.Tensor, slots, key, value) -> None:
    """Puts key and value [L, Hkv, Dh] at the slots of a cache [blocks, Hkv, block, 2 * Dh]."""
    slots = torch.as_tensor(slots, dtype=torch.int64)
    flat = cache.view(cache.shape[0], cache.shape[1], 2, -1)
    # [L, 1, 1] and [1, Hkv, 1] beside the places [L, 1, Dh] of a slot's numbers.
    blocks = (slots // layout.block_size)[:, None, None]
    heads = torch.arange(cache.shape[1])[None, :, None]
    for part, numbers in enumerate((key, value)):
        places = layout.tables[part].long()[slots % layout.block_size][:, None]
        flat[blocks, heads, part, places] = numbers.to(cache.dtype)


@contextmanager
def num_threads(count: int):
    """Threads of the calls inside. Only for the kernel under test: the oracle's many small
    operations crawl on several threads of a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def random_parents(nodes: int, rng: np.random.Generator) -> np.ndarray:
    return np.array([rng.integers(-1, i) if i else -1 for i in range(nodes)], dtype=np.int32)


def path_of(parents: np.ndarray, row: int) -> list[int]:
    """Rows from the root (row 0) to `row`, both included."""
    path = [row]
    while path[-1] > 0:
        path.append(int(parents[path[-1] - 1]) + 1)
    return path[::-1]


def chain_attention(
    query, key, value, scale: float, features: AttnFeatures | None = None, wide=torch.float64
) -> torch.Tensor:
    """Dense attention of one query [Hq, Dh] over all of key and value [L, Hkv, Dh]: a chain, of
    which it is the last token. In dtype `wide`; below float64, weights have the query's dtype.
    """
    features = features or AttnFeatures()
    group_size = query.shape[0] // key.shape[1]
    if features.window:
        key, value = key[-features.window :], value[-features.window :]
    k = key.to(wide).repeat_interleave(group_size, dim=1)
    v = value.to(wide).repeat_interleave(group_size, dim=1)
    scores = torch.einsum("hd,lhd->hl", query.to(wide), k) * scale
    if features.soft_cap:
        scores = features.soft_cap * torch.tanh(scores / features.soft_cap)
    if features.alibi_slopes is not None:
        behind = torch.arange(len(key)).flip(0)
        scores -= features.alibi_slopes.to(wide)[:, None] * behind
    if features.sinks is not None:
        scores = torch.cat([scores, features.sinks.to(wide)[:, None]], dim=1)
    weights = scores.softmax(-1)[:, : len(key)]
    if wide != torch.float64:
        weights = weights.to(query.dtype).to(wide)
    return torch.einsum("hl,lhd->hd", weights, v)


@dataclass
class PagedTrees:
    """A step: some tree requests among other rows, over a cache whose unused slots are NaN."""

    layout: CpuKvLayout
    num_kv_heads: int
    group_size: int
    # (context length, parents) a tree
    trees: list[tuple[int, np.ndarray]]
    seed: int = 0
    dense: bool = False
    # rows of other requests before each tree
    gap: int = 2
    # rows that a row attends: "tree" (its ancestors), "causal" or "full"
    mask: str = "tree"
    features: AttnFeatures = field(default_factory=AttnFeatures)
    cache: torch.Tensor = field(init=False)
    # The words passed to the kernel describe chains.
    is_told_chains: bool = False

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        dtype, size = self.layout.dtype, self.layout.head_size
        block = self.layout.block_size
        self.scale = size**-0.5

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        rows = [len(parents) + 1 for _, parents in self.trees]
        per_request = max(-(-(c + n) // block) for (c, _), n in zip(self.trees, rows, strict=True))
        num_blocks = len(rows) * per_request + 2
        order = torch.randperm(num_blocks, generator=generator)[: len(rows) * per_request]
        # Request numbers are not tree numbers: the table has a row of rubbish first.
        rubbish = torch.full((1, per_request), 10**9)
        self.block_table = torch.cat([rubbish, order.view(len(rows), per_request)]).int()
        self.cache = torch.full(
            (num_blocks, self.num_kv_heads, block, 2 * size), float("nan"), dtype=dtype
        )
        self.row_start = []
        self.keys, self.values = [], []  # of each tree: [context + rows, Hkv, Dh]
        start = 0
        for r, ((context, _), n) in enumerate(zip(self.trees, rows, strict=True)):
            start += self.gap
            self.row_start.append(start)
            start += n
            key = normal(context + n, self.num_kv_heads, size)
            value = normal(context + n, self.num_kv_heads, size)
            cached = context if self.dense else context + n
            write_slots(
                self.layout, self.cache, self.slots(r, cached), key[:cached], value[:cached]
            )
            self.keys.append(key)
            self.values.append(value)
        if self.features.window:
            self._lose_what_left_the_window()
        self.query = normal(start + self.gap, self.num_kv_heads * self.group_size, size)
        self.rows = rows
        if self.dense:
            self.tail_key = torch.cat([k[-n:] for k, n in zip(self.keys, rows, strict=True)])
            self.tail_value = torch.cat([v[-n:] for v, n in zip(self.values, rows, strict=True)])

    def _lose_what_left_the_window(self) -> None:
        """Blocks that no row attends are somebody else's: NaN here, and out of the table."""
        block = self.layout.block_size
        for r, (context, _) in enumerate(self.trees):
            gone = max(0, context - self.features.window + 1) // block
            self.cache[self.block_table[r + 1, :gone].long()] = float("nan")
            self.block_table[r + 1, :gone] = 10**9

    def slots(self, r: int, count: int) -> torch.Tensor:
        positions = torch.arange(count)
        size = self.layout.block_size
        return self.block_table[r + 1].long()[positions // size] * size + positions % size

    def share_pages(self, count: int) -> None:
        """Lets the second tree begin with the first one's pages."""
        self.block_table[2, :count] = self.block_table[1, :count]
        shared = count * self.layout.block_size
        for numbers in (self.keys, self.values):
            numbers[1][:shared] = numbers[0][:shared]

    def take_pages(self, other: PagedTrees) -> None:
        """Takes the pages of the same trees with other features."""
        self.block_table, self.cache = other.block_table, other.cache

    def tell_chains(self) -> None:
        self.is_told_chains = True

    @property
    def words(self) -> torch.Tensor:
        """The ancestor words passed to the kernel."""
        if self.is_told_chains or self.mask == "causal":
            return causal_words(self.rows)
        if self.mask == "full":
            return full_words(self.rows)
        return ancestor_words([parents for _, parents in self.trees])

    def attended(self, r: int, row: int) -> list[int]:
        if self.mask == "causal":
            return list(range(row + 1))
        if self.mask == "full":
            return list(range(self.rows[r]))
        return path_of(self.trees[r][1], row)

    def metadata(self) -> TreeAttnMetadata:
        return TreeAttnMetadata.build(
            [r + 1 for r in range(len(self.trees))],
            self.row_start,
            self.rows,
            [c for c, _ in self.trees],
            self.words,
            self.block_table,
        )

    def expected(self, wide: torch.dtype = torch.float64) -> torch.Tensor:
        """Oracle for the tree rows, [M, Hq, Dh]: every branch as a chain of its own."""
        out = []
        for r, (context, _) in enumerate(self.trees):
            for row in range(self.rows[r]):
                chain = [*range(context), *(context + j for j in self.attended(r, row))]
                query = self.query[self.row_start[r] + row]
                key, value = self.keys[r][chain], self.values[r][chain]
                out.append(chain_attention(query, key, value, self.scale, self.features, wide))
        return torch.stack(out)

    def same_precision(self) -> torch.Tensor:
        """The tree rows by torch's own attention in the cache's dtype, [M, Hq, Dh]; with features
        torch's does not have, by sums in float32."""
        if not self.features.is_plain:
            return self.expected(torch.float32).to(self.layout.dtype)
        out = []
        for r, (context, _) in enumerate(self.trees):
            n = self.rows[r]
            mask = torch.zeros(n, context + n, dtype=torch.bool)
            mask[:, :context] = True
            for row in range(n):
                mask[row, [context + j for j in self.attended(r, row)]] = True
            query = self.query[self.row_start[r] : self.row_start[r] + n]
            key = self.keys[r].repeat_interleave(self.group_size, dim=1)
            value = self.values[r].repeat_interleave(self.group_size, dim=1)
            result = torch.nn.functional.scaled_dot_product_attention(
                query.transpose(0, 1)[None],
                key.transpose(0, 1)[None],
                value.transpose(0, 1)[None],
                attn_mask=mask,
                scale=self.scale,
            )
            out.append(result[0].transpose(0, 1))
        return torch.cat(out)

    def tree_rows(self, output: torch.Tensor) -> torch.Tensor:
        """The rows of all trees, [M, Hq, Dh]."""
        return torch.cat(
            [output[s : s + n] for s, n in zip(self.row_start, self.rows, strict=True)]
        )

    def answer(
        self, run: Any = tree_attn, *, splits: int = 1, features: AttnFeatures | None = None
    ) -> torch.Tensor:
        """What a kernel gives, 7 in rows of no tree.

        Args:
            run: takes `query, key_cache, value_cache, output, meta, scale, layout`, and by name the
                tails and features.
            splits: threads, among which contexts are split.
            features: told to the kernel only.
        """
        more: dict[str, Any] = {}
        if self.dense:
            more = {"tail_key": self.tail_key, "tail_value": self.tail_value}
        told = features or self.features
        if not told.is_plain:
            more["features"] = told
        output = torch.full_like(self.query, 7.0)
        views = self.layout.views(self.cache)
        with num_threads(splits):
            run(self.query, *views, output, self.metadata(), self.scale, self.layout, **more)
        return output

    def check(self, run: Any = tree_attn, *, skipped: int = 0, **options: Any) -> None:
        """Compares `answer` with the oracle; no trees are without rows here, none are skipped."""
        output = self.answer(run, **options)
        expected = self.expected()
        actual = self.tree_rows(output).double()
        assert not actual.isnan().any(), "an unused slot was read"
        error = (actual - expected).abs().max().item()
        torch_error = (self.same_precision().double() - expected).abs().max().item()
        # Besides what torch itself is off, which with few rows can be nearly nothing by chance: one
        # unit of rounding of the largest output, and the random walk of a running sum in float32.
        largest = expected.abs().max().item()
        longest = max(context + n for (context, _), n in zip(self.trees, self.rows, strict=True))
        limit = 2 * torch_error + torch.finfo(self.layout.dtype).eps * largest
        limit += torch.finfo(torch.float32).eps * longest**0.5 * largest
        assert error <= limit, f"off by {error}, torch by {torch_error}"
        for start, n in zip(self.row_start, self.rows, strict=True):
            output[start : start + n] = 7.0
        assert bool((output == 7.0).all()), "a row of no tree was written"


def paged_trees(
    specs: list[tuple[int, int]], cache: tuple[torch.dtype, str] = (torch.float32, "vec"), *,
    page: int = 32, head: int = 32, kv_heads: int = 2, group: int = 2, seed: int = 0,
    **options: Any,
) -> PagedTrees:  # fmt: skip
    """`PagedTrees` of (context, nodes) each."""
    rng = np.random.default_rng(seed)
    trees = [(context, random_parents(n, rng)) for context, n in specs]
    layout = layout_of(cache[1], cache[0], page, head)
    return PagedTrees(layout, kv_heads, group, trees, seed=seed, **options)
