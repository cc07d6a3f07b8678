# SPDX-License-Identifier: Apache-2.0
"""Trees over a cache in vLLM's CPU layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tests.kernels.tree_problem import TreeProblem
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


def write_slots(
    layout: CpuKvLayout, cache: torch.Tensor, slots: Any, key: torch.Tensor, value: torch.Tensor
) -> None:
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
def num_threads(count: int) -> Iterator[None]:
    """Threads of the calls inside. Only for the kernel under test: the oracle's many small
    operations crawl on several threads of a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class PagedTrees(TreeProblem):
    """Trees over a cache of a `CpuKvLayout`."""

    def __init__(
        self, layout: CpuKvLayout, kv_heads: int, group: int, specs: list[Any], **options: Any
    ) -> None:
        self.layout = layout
        sizes = {"head_dim": layout.head_size, "page": layout.block_size, "dtype": layout.dtype}
        super().__init__(specs, kv_heads=kv_heads, group=group, **sizes, **options)

    def make_cache(self, blocks: int) -> None:
        shape = blocks, self.kv_heads, self.page, 2 * self.head_dim
        self.cache = torch.full(shape, float("nan"), dtype=self.dtype)

    def store(self, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        write_slots(self.layout, self.cache, slots, key, value)

    def forget_blocks(self, blocks: torch.Tensor) -> None:
        self.cache[blocks] = float("nan")

    @property
    def words(self) -> torch.Tensor:
        """The ancestor words passed to the kernel."""
        if self.told_mask == "tree":
            return ancestor_words(self.parents)
        return (causal_words if self.told_mask == "causal" else full_words)(self.rows)

    def metadata(self) -> TreeAttnMetadata:
        requests = range(1, len(self.rows) + 1)
        return TreeAttnMetadata.build(
            requests, self.starts, self.rows, self.contexts, self.words, self.block_table
        )

    def run(
        self,
        output: torch.Tensor,
        *,
        kernel: Callable[..., None] = tree_attn,
        splits: int = 1,
        skipped: int = 0,
        features: AttnFeatures | None = None,
    ) -> None:
        """
        Args:
            kernel: takes `query, key_cache, value_cache, output, meta, scale, layout`, and by name
                the tails and features.
            splits: threads, among which contexts are split.
            skipped: ignored, because no trees are without rows here.
        """
        more: dict[str, Any] = dict(self.tail)
        told = features or self.features
        if not told.is_plain:
            more["features"] = told
        views = self.layout.views(self.cache)
        with num_threads(splits):
            kernel(self.query, *views, output, self.metadata(), self.scale, self.layout, **more)


def paged_trees(
    specs: list[Any], cache: tuple[torch.dtype, str] = (torch.float32, "vec"), *,
    page: int = 32, head: int = 32, kv_heads: int = 2, group: int = 2, **options: Any,
) -> PagedTrees:  # fmt: skip
    """`PagedTrees` over a cache of a dtype and a kind of layout."""
    layout = layout_of(cache[1], cache[0], page, head)
    return PagedTrees(layout, kv_heads, group, specs, **options)
