# SPDX-License-Identifier: Apache-2.0
"""Trees over a cache in vLLM's GPU layout, for kernels in an interpreter or an emulator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from tests.kernels.paged import chain_attention, path_of, random_parents
from vllm_specplug.kernels import AttnFeatures, TreeAttnMetadata
from vllm_specplug.kernels.cuda_contract import TOKEN_SCALE_BYTES, numbers_and_scales
from vllm_specplug.kernels.latent_attn_triton import latent_attn_triton
from vllm_specplug.kernels.tree_attn_triton import tree_attn_triton

FP32, FP16, FP8 = torch.float32, torch.float16, torch.float8_e4m3fn


class DeviceTrees:
    """Trees over a cache in vLLM's GPU layout; unowned slots are NaN.

    With `key_scales` among the features the cache holds 8-bit numbers, with `query_scales` the
    query does as well; the oracle then reads what these stand for. With `token_scales` each token
    and head has scales of its own, behind its numbers, which are added to the features.
    """

    limits = {FP32: 1e-5, FP16: 4e-3, torch.bfloat16: 1.6e-2}

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
        features: AttnFeatures | None = None,
        token_scales: torch.dtype | None = None,  # int8 or e4m3
        seed: int = 0,
    ) -> None:
        rng = np.random.default_rng(seed)
        draw = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=draw).to(dtype)

        self.mask = self.told_mask = mask
        self.dtype, self.scale = dtype, head_dim**-0.5
        self.features = features or AttnFeatures()
        self.contexts = [c for c, _ in specs]
        self.parents = [random_parents(n, rng) for _, n in specs]
        self.rows = [n + 1 for _, n in specs]
        blocks = max(-(-(c + n) // page) for c, n in zip(self.contexts, self.rows, strict=True))
        shuffled = torch.randperm(len(specs) * blocks + 1, generator=draw)[: len(specs) * blocks]
        # Request numbers are not tree numbers: the table has a row of rubbish first.
        rubbish = torch.full((1, blocks), 10**9)
        self.block_table = torch.cat([rubbish, shuffled.view(-1, blocks)]).int()
        quantised = self.features.key_scales is not None
        numbers = token_scales or (FP8 if quantised else dtype)
        width = head_dim + TOKEN_SCALE_BYTES * (token_scales is not None)
        shape = (len(specs) * blocks + 1, page, kv_heads, 2 * width)
        # [num_blocks, Hkv, page, 2 * Dh], in memory page before head
        self.cache = torch.empty(shape, dtype=numbers).transpose(1, 2)
        self.fill_with_nan(slice(None))
        self.key_cache, self.value_cache = self.cache.transpose(1, 2).split(width, dim=-1)
        if token_scales is not None:
            self.key_cache, key_scales = numbers_and_scales(self.key_cache)
            self.value_cache, value_scales = numbers_and_scales(self.value_cache)
            self.features = replace(
                self.features, key_scales=key_scales, value_scales=value_scales,
                int8_cache=token_scales == torch.int8,
            )  # fmt: skip
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
            cached = context if dense else context + n
            if token_scales is not None:
                # What is left of them is no number of the model's dtype.
                key, value = key.float(), value.float()
                key[:cached], keys, of_keys = quantised_by_token(key[:cached], token_scales)
                value[:cached], values, of_values = quantised_by_token(value[:cached], token_scales)
            elif quantised:
                key[:cached], keys = _quantised(key[:cached], self.features.key_scales)
                value[:cached], values = _quantised(value[:cached], self.features.value_scales)
            else:
                keys, values = key, value
            for position in range(cached):
                block = int(self.block_table[r + 1, position // page])
                self.key_cache[block, position % page] = keys[position]
                self.value_cache[block, position % page] = values[position]
                if token_scales is not None:
                    key_scales[block, position % page] = of_keys[position]
                    value_scales[block, position % page] = of_values[position]
            self.keys.append(key)
            self.values.append(value)
        # A slice of a joined projection: rows are not contiguous.
        self.query = normal(start + 2, kv_heads * group + 3, head_dim)[:, : kv_heads * group]
        self.asked = self.query
        if self.features.query_scales is not None:
            grouped = self.query.unflatten(1, (kv_heads, group)).transpose(1, 2)
            wide, narrow = _quantised(grouped.flatten(0, 1), self.features.query_scales)
            self.query, self.asked = (
                x.unflatten(0, (-1, group)).transpose(1, 2).flatten(1, 2) for x in (wide, narrow)
            )
        if self.features.window:
            self._lose_what_left_the_window(page)
        self.tail = {}
        if dense:
            for name, parts in (("tail_key", self.keys), ("tail_value", self.values)):
                tails = [p[-n:] for p, n in zip(parts, self.rows, strict=True)]
                self.tail[name] = torch.cat(tails).to(dtype)

    def _lose_what_left_the_window(self, page: int) -> None:
        """Pages that no row attends are somebody else's: NaN here, and out of the table."""
        for r, context in enumerate(self.contexts):
            gone = max(0, context - self.features.window + 1) // page
            self.fill_with_nan(self.block_table[r + 1, :gone].long())
            self.block_table[r + 1, :gone] = 10**9

    def fill_with_nan(self, blocks: slice | torch.Tensor) -> None:
        """Of 8 bits, what is NaN as e4m3, and four of them as float32."""
        if self.cache.element_size() == 1:
            self.cache.view(torch.uint8)[blocks] = 255
        else:
            self.cache[blocks] = float("nan")

    def share_pages(self, count: int) -> None:
        """Lets the second tree begin with the first one's pages."""
        self.block_table[2, :count] = self.block_table[1, :count]
        shared = count * self.key_cache.shape[1]
        for numbers in (self.keys, self.values):
            numbers[1][:shared] = numbers[0][:shared]

    def take_pages(self, other: DeviceTrees) -> None:
        """Takes the pages of the same trees with other features."""
        self.block_table, self.cache = other.block_table, other.cache
        self.key_cache, self.value_cache = other.key_cache, other.value_cache

    def tell_chains(self) -> None:
        """The kernel is told that every row hangs below the one before it."""
        self.told_mask = "causal"

    def parent_rows(self) -> torch.Tensor:
        if self.told_mask == "causal":
            parts = [np.arange(-1, n - 1) for n in self.rows]
        else:
            parts = [np.concatenate([[-1], p + 1]) for p in self.parents]
        return torch.from_numpy(np.concatenate(parts).astype(np.int32))

    def metadata(self, skipped: int = 0) -> TreeAttnMetadata:
        """`skipped` more trees of no rows, as a graph for a larger batch has them."""
        firsts = np.cumsum([0, *self.rows[:-1]]).tolist()
        columns = [
            [r + 1, self.starts[r], rows, self.contexts[r], firsts[r]]
            for r, rows in enumerate(self.rows)
        ]
        columns += [[10**6, 10**6, 0, 10**6, 10**6]] * skipped
        return TreeAttnMetadata(
            plan=torch.tensor(columns, dtype=torch.int32).t().contiguous(),
            parent_rows=self.parent_rows(),
            block_table=self.block_table,
            max_rows=max(self.rows),
            max_context=max(self.contexts),
            mask_kind="full" if self.mask == "full" else "tree",
        )

    def seen(self, r: int, row: int) -> list[int]:
        """Rows of its own tree that a row attends."""
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
                key, value = self.keys[r][chain], self.values[r][chain]
                rows.append(chain_attention(query, key, value, self.scale, self.features))
            out.append(torch.stack(rows))
        return out

    def run(
        self,
        output: torch.Tensor,
        *,
        splits: int | None = None,
        skipped: int = 0,
        features: AttnFeatures | None = None,
    ) -> Any:
        """Runs the kernel; `features` are told to it only."""
        tree_attn_triton(
            self.asked,
            self.key_cache,
            self.value_cache,
            output,
            self.metadata(skipped),
            self.scale,
            features=features or self.features,
            splits=splits,
            **self.tail,
        )

    def answer(self, **options: Any) -> torch.Tensor:
        """What the kernel gives [T, Hq, Dv], 7 in rows of no tree; see `run`."""
        return self._answer(options)[0]

    def check(self, **options: Any) -> Any:
        """Compares `answer` with the oracle; returns what `run` returns."""
        output, result = self._answer(options)
        self.assert_expected(output, self.limits[self.dtype])
        return result

    def _answer(self, options: dict[str, Any]) -> tuple[torch.Tensor, Any]:
        shape = (*self.query.shape[:2], self.values[0].shape[2])
        output = torch.full(shape, 7.0, dtype=self.dtype)
        return output, self.run(output, **options)

    def assert_expected(self, output: torch.Tensor, limit: float) -> None:
        """Raises unless the rows of trees are the oracle's and all others still hold 7."""
        output = output.clone()
        for start, n, expected in zip(self.starts, self.rows, self.expected(), strict=True):
            actual = output[start : start + n].double()
            assert not actual.isnan().any(), "an unused slot was read"
            error = (actual - expected).abs().max().item()
            assert error <= limit, f"off by {error}"
            output[start : start + n] = 7.0
        assert bool((output == 7.0).all()), "a row of no tree was written"


class LatentTrees(DeviceTrees):
    """Trees over a cache of latent rows: a row is the key, and its first numbers are the value."""

    def __init__(
        self, specs: list[tuple[int, int]], *, heads: int = 3, latent: int = 32, rotary: int = 16,
        **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(specs, group=heads, head_dim=latent + rotary, **options)
        self.latent = latent
        self.values = [key[..., :latent] for key in self.keys]
        self.value_cache = self.key_cache[..., :latent]

    def run(self, output: torch.Tensor, *, splits: int | None = None, skipped: int = 0) -> None:
        query = self.query[..., : self.latent], self.query[..., self.latent :]
        rows = self.key_cache.squeeze(2)
        meta = self.metadata(skipped)
        latent_attn_triton(*query, rows, output, meta, self.scale, splits=splits)


def _quantised(
    # [n, Hkv, Dh]
    numbers: torch.Tensor,
    # one value, or [Hkv]
    scale: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What is left of `numbers` in their dtype, and the 8-bit numbers that stand for it."""
    by_head = scale.reshape(-1, 1)
    narrow = (numbers.float() / by_head).to(FP8)
    return (narrow.float() * by_head).to(numbers.dtype), narrow


def quantised_by_token(
    # [n, Hkv, Dh]
    numbers: torch.Tensor,
    kind: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What is left of `numbers` in float32, the int8 or e4m3 that stand for it, and what these are
    multiplied by [n, Hkv]."""
    most = 127.0 if kind == torch.int8 else torch.finfo(kind).max
    scales = (numbers.float().abs().amax(-1) / most).clamp(min=1e-6)
    narrow = numbers.float() / scales.unsqueeze(-1)
    narrow = (narrow.round() if kind == torch.int8 else narrow).clamp(-most, most).to(kind)
    return narrow.float() * scales.unsqueeze(-1), narrow, scales


def other_scales(scales: torch.Tensor, values: torch.Tensor | float) -> torch.Tensor:
    """Scales of each slot that hold something else, in memory as `scales` are."""
    return torch.empty_strided(scales.shape, scales.stride(), device=scales.device).copy_(
        torch.as_tensor(values, dtype=torch.float32).expand(scales.shape)
    )
