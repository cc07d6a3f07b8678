# SPDX-License-Identifier: Apache-2.0
"""Trees over a paged cache, with an oracle that knows neither masks nor pages."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch

from vllm_specplug.kernels import AttnFeatures

# Context length, and the nodes of a random tree or the parents of one.
Spec = tuple[int, int | np.ndarray]


def random_parents(nodes: int, rng: np.random.Generator) -> np.ndarray:
    return np.array([rng.integers(-1, i) if i else -1 for i in range(nodes)], dtype=np.int32)


def path_of(parents: np.ndarray, row: int) -> list[int]:
    """Rows from the root (row 0) to `row`, both included."""
    path = [row]
    while path[-1] > 0:
        path.append(int(parents[path[-1] - 1]) + 1)
    return path[::-1]


def chain_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    features: AttnFeatures | None = None,
) -> torch.Tensor:
    """Dense attention, in float64, of one query [Hq, Dh] over all of key and value [L, Hkv, Dh]: a
    chain, of which it is the last token."""
    features = features or AttnFeatures()
    group_size = query.shape[0] // key.shape[1]
    if features.window:
        key, value = key[-features.window :], value[-features.window :]
    k = key.double().repeat_interleave(group_size, dim=1)
    v = value.double().repeat_interleave(group_size, dim=1)
    scores = torch.einsum("hd,lhd->hl", query.double(), k) * scale
    if features.soft_cap:
        scores = features.soft_cap * torch.tanh(scores / features.soft_cap)
    if features.alibi_slopes is not None:
        behind = torch.arange(len(key)).flip(0)
        scores -= features.alibi_slopes.double()[:, None] * behind
    if features.sinks is not None:
        scores = torch.cat([scores, features.sinks.double()[:, None]], dim=1)
    return torch.einsum("hl,lhd->hd", scores.softmax(-1)[:, : len(key)], v)


class TreeProblem:
    """A step: trees among rows of other requests. Unowned slots of the cache are NaN.

    A subclass has a cache of some layout (`make_cache`, `store`, `forget_blocks`) and a kernel
    (`run`).
    """

    # Of a tree's largest number, by dtype.
    limits: ClassVar[dict[torch.dtype, float]] = {
        torch.float64: 1e-5, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2,
    }  # fmt: skip

    def __init__(
        self,
        specs: list[Any],  # of `Spec`
        *,
        dtype: torch.dtype,
        kv_heads: int,
        group: int,
        head_dim: int,
        page: int,
        dense: bool = False,
        mask: str = "tree",
        features: AttnFeatures | None = None,
        seed: int = 0,
        gap: int = 2,
    ) -> None:
        """
        Args:
            dense: whether the trees' own keys and values are in no cache.
            mask: the rows of its own tree that a row attends: "tree" (its ancestors), "causal" or
                "full".
            gap: rows of other requests before each tree.
        """
        rng = np.random.default_rng(seed)
        draw = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=draw).to(dtype)

        self.dtype, self.page, self.scale = dtype, page, head_dim**-0.5
        self.kv_heads, self.group, self.head_dim = kv_heads, group, head_dim
        self.mask = self.told_mask = mask
        self.features = features or AttnFeatures()
        self.contexts = [context for context, _ in specs]
        self.parents = [random_parents(t, rng) if isinstance(t, int) else t for _, t in specs]
        self.rows = [len(parents) + 1 for parents in self.parents]
        blocks = max(-(-(c + n) // page) for c, n in zip(self.contexts, self.rows, strict=True))
        shuffled = torch.randperm(len(specs) * blocks + 1, generator=draw)[: len(specs) * blocks]
        # Request numbers are not tree numbers: the table has a row of rubbish first.
        rubbish = torch.full((1, blocks), 10**9)
        self.block_table = torch.cat([rubbish, shuffled.view(-1, blocks)]).int()
        self.make_cache(len(specs) * blocks + 1)
        self.starts: list[int] = []
        # Of each tree: [context + rows, Hkv, Dh]
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        start = 0
        for r, (context, n) in enumerate(zip(self.contexts, self.rows, strict=True)):
            start += gap
            self.starts.append(start)
            start += n
            self.keys.append(normal(context + n, kv_heads, head_dim))
            self.values.append(normal(context + n, kv_heads, head_dim))
            self.fill(r, context if dense else context + n)
        # A slice of a joined projection: rows are not contiguous.
        self.query = normal(start + gap, kv_heads * group + 3, head_dim)[:, : kv_heads * group]
        if self.features.window:
            self._lose_what_left_the_window()
        self.tail: dict[str, torch.Tensor] = {}
        if dense:
            for name, parts in (("tail_key", self.keys), ("tail_value", self.values)):
                tails = [p[-n:] for p, n in zip(parts, self.rows, strict=True)]
                self.tail[name] = torch.cat(tails).to(dtype)

    # -- the cache ---------------------------------------------------------------------------

    def make_cache(self, blocks: int) -> None:
        raise NotImplementedError

    def store(self, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Puts key and value [L, Hkv, Dh] at slots of the cache."""
        raise NotImplementedError

    def forget_blocks(self, blocks: torch.Tensor) -> None:
        """Makes all that blocks of the cache hold NaN."""
        raise NotImplementedError

    def fill(self, r: int, count: int) -> None:
        """Stores the first tokens of a tree's request."""
        self.store(self.slots(r, count), self.keys[r][:count], self.values[r][:count])

    def slots(self, r: int, count: int) -> torch.Tensor:
        positions = torch.arange(count)
        blocks = self.block_table[r + 1].long()[positions // self.page]
        return blocks * self.page + positions % self.page

    def _lose_what_left_the_window(self) -> None:
        """Pages that no row attends are somebody else's: NaN here, and out of the table."""
        for r, context in enumerate(self.contexts):
            gone = max(0, context - self.features.window + 1) // self.page
            self.forget_blocks(self.block_table[r + 1, :gone].long())
            self.block_table[r + 1, :gone] = 10**9

    def share_pages(self, count: int) -> None:
        """Lets the second tree begin with the first one's pages."""
        self.block_table[2, :count] = self.block_table[1, :count]
        shared = count * self.page
        for numbers in (self.keys, self.values):
            numbers[1][:shared] = numbers[0][:shared]

    def take_pages(self, other: Any) -> None:
        """Takes the pages of the same trees with other features."""
        self.block_table, self.cache = other.block_table, other.cache

    # -- the oracle --------------------------------------------------------------------------

    def tell_chains(self) -> None:
        """The kernel gets parents in which every row follows the one before it."""
        self.told_mask = "causal"

    def seen(self, r: int, row: int) -> list[int]:
        """Rows of its own tree that a row attends."""
        if self.mask == "tree":
            return path_of(self.parents[r], row)
        return list(range(row + 1 if self.mask == "causal" else self.rows[r]))

    def expected(self) -> list[torch.Tensor]:
        """The rows of each tree, every branch as a chain of its own."""
        out = []
        for r, context in enumerate(self.contexts):
            rows = []
            for row in range(self.rows[r]):
                chain = [*range(context), *(context + j for j in self.seen(r, row))]
                query = self.query[self.starts[r] + row]
                key, value = self.keys[r][chain], self.values[r][chain]
                rows.append(chain_attention(query, key, value, self.scale, self.features))
            out.append(torch.stack(rows))
        return out

    # -- the kernel --------------------------------------------------------------------------

    def run(self, output: torch.Tensor, **options: Any) -> Any:
        """Runs the kernel. `splits`: parts of contexts; `skipped`: more trees, of no rows;
        `features` are told to it only."""
        raise NotImplementedError

    def answer(self, **options: Any) -> torch.Tensor:
        """What the kernel gives [T, Hq, Dv], 7 in rows of no tree; see `run`."""
        return self._answer(options)[0]

    def check(self, **options: Any) -> Any:
        """Compares `answer` with the oracle; returns what `run` returns."""
        output, result = self._answer(options)
        self.assert_expected(output)
        return result

    def _answer(self, options: dict[str, Any]) -> tuple[torch.Tensor, Any]:
        shape = (*self.query.shape[:2], self.values[0].shape[2])
        output = torch.full(shape, 7.0, dtype=self.dtype)
        return output, self.run(output, **options)

    def tree_rows(self, output: torch.Tensor) -> list[torch.Tensor]:
        """The rows of each tree."""
        return [output[s : s + n] for s, n in zip(self.starts, self.rows, strict=True)]

    def assert_expected(self, output: torch.Tensor) -> None:
        """Raises unless the rows of trees are the oracle's and all others still hold 7."""
        output = output.clone()
        for rows, expected in zip(self.tree_rows(output), self.expected(), strict=True):
            actual = rows.double()
            assert not actual.isnan().any(), "an unused slot was read"
            error = float((actual - expected).abs().max())
            limit = self.limits[self.dtype] * float(expected.abs().max())
            assert error <= limit, f"off by {error}"
            rows.fill_(7.0)
        assert bool((output == 7.0).all()), "a row of no tree was written"
