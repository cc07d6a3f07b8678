# SPDX-License-Identifier: Apache-2.0
"""Trees over a cache in vLLM's GPU layout, for kernels in an interpreter or an emulator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from tests.kernels.tree_problem import TreeProblem
from vllm_specplug.kernels import AttnFeatures, TreeAttnMetadata
from vllm_specplug.kernels.cuda_contract import TOKEN_SCALE_BYTES, numbers_and_scales
from vllm_specplug.kernels.latent_attn_triton import latent_attn_triton
from vllm_specplug.kernels.tree_attn_triton import tree_attn_triton

FP32, FP16, FP8 = torch.float32, torch.float16, torch.float8_e4m3fn


class DeviceTrees(TreeProblem):
    """Trees over a cache in vLLM's GPU layout.

    With `key_scales` among the features the cache holds 8-bit numbers, with `query_scales` the
    query does as well; the oracle then reads what these stand for. With `token_scales` each token
    and head has scales of its own, behind its numbers, which are added to the features.
    """

    def __init__(
        self,
        specs: list[Any],
        *,
        dtype: torch.dtype = FP32,
        kv_heads: int = 1,
        group: int = 2,
        head_dim: int = 16,
        page: int = 16,
        token_scales: torch.dtype | None = None,  # int8 or e4m3
        **options: Any,
    ) -> None:
        self.token_scales = token_scales
        sizes = {"kv_heads": kv_heads, "group": group, "head_dim": head_dim, "page": page}
        super().__init__(specs, dtype=dtype, **sizes, **options)
        self.asked = self.query
        if self.features.query_scales is not None:
            grouped = self.query.unflatten(1, (kv_heads, group)).transpose(1, 2)
            wide, narrow = _quantised(grouped.flatten(0, 1), self.features.query_scales)
            self.query, self.asked = (
                x.unflatten(0, (-1, group)).transpose(1, 2).flatten(1, 2) for x in (wide, narrow)
            )

    def make_cache(self, blocks: int) -> None:
        quantised = self.features.key_scales is not None
        numbers = self.token_scales or (FP8 if quantised else self.dtype)
        width = self.head_dim + TOKEN_SCALE_BYTES * (self.token_scales is not None)
        shape = (blocks, self.page, self.kv_heads, 2 * width)
        # [num_blocks, Hkv, page, 2 * Dh], in memory page before head
        self.cache = torch.empty(shape, dtype=numbers).transpose(1, 2)
        self.forget_blocks(torch.arange(blocks))
        self.key_cache, self.value_cache = self.cache.transpose(1, 2).split(width, dim=-1)
        if self.token_scales is not None:
            self.key_cache, key_scales = numbers_and_scales(self.key_cache)
            self.value_cache, value_scales = numbers_and_scales(self.value_cache)
            self.features = replace(
                self.features, key_scales=key_scales, value_scales=value_scales,
                int8_cache=self.token_scales == torch.int8,
            )  # fmt: skip

    def store(self, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        at = slots // self.page, slots % self.page
        self.key_cache[at], self.value_cache[at] = key, value

    def forget_blocks(self, blocks: torch.Tensor) -> None:
        """Of 8 bits, what is NaN as e4m3, and four of them as float32."""
        if self.cache.element_size() == 1:
            self.cache.view(torch.uint8)[blocks] = 255
        else:
            self.cache[blocks] = float("nan")

    def fill(self, r: int, count: int) -> None:
        """Of numbers that are quantised, what is left of them takes their place."""
        if self.features.key_scales is None:
            super().fill(r, count)
            return
        slots = self.slots(r, count)
        at, stored = (slots // self.page, slots % self.page), []
        for parts, scales in (
            (self.keys, self.features.key_scales), (self.values, self.features.value_scales),
        ):  # fmt: skip
            if self.token_scales is None:
                parts[r][:count], numbers = _quantised(parts[r][:count], scales)
            else:
                # What is left of them is no number of the model's dtype.
                parts[r] = parts[r].float()
                parts[r][:count], numbers, scales[at] = quantised_by_token(
                    parts[r][:count], self.token_scales
                )
            stored.append(numbers)
        self.store(slots, *stored)

    def take_pages(self, other: Any) -> None:
        super().take_pages(other)
        self.key_cache, self.value_cache = other.key_cache, other.value_cache

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

    def run(
        self,
        output: torch.Tensor,
        *,
        kernel: Callable[..., None] = tree_attn_triton,
        splits: int | None = None,
        skipped: int = 0,
        features: AttnFeatures | None = None,
    ) -> Any:
        """Runs a kernel of `cuda_contract`; `features` are told to it only."""
        parts = {} if splits is None else {"splits": splits}
        kernel(
            self.asked,
            self.key_cache,
            self.value_cache,
            output,
            self.metadata(skipped),
            self.scale,
            features=features or self.features,
            **parts,
            **self.tail,
        )


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
