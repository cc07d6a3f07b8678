# SPDX-License-Identifier: Apache-2.0
"""Tensors in huge pages: equal, one behind the other, and gone when nobody holds them."""

from __future__ import annotations

import gc
import mmap
import weakref
from typing import Any

import pytest
import torch

from vllm_specplug.kernels import huge_pages
from vllm_specplug.kernels.huge_pages import HugePages, in_huge_pages


def test_copies_lie_one_behind_the_other() -> None:
    mapped: list[int] = []

    def map_bytes(size: int) -> torch.Tensor:
        mapped.append(size)
        return torch.zeros(size, dtype=torch.uint8)

    pages = HugePages(map_bytes)
    tensors = [
        torch.randn(3, 5).bfloat16(),
        torch.arange(17, dtype=torch.int8),
        torch.randn(4, 2, 8).transpose(0, 1),
        torch.arange(100, dtype=torch.int32),
    ]
    copies = [pages.copy(tensor) for tensor in tensors]
    for tensor, copy in zip(tensors, copies, strict=True):
        assert copy.dtype == tensor.dtype and copy.is_contiguous()
        assert torch.equal(copy, tensor)
    starts = [copy.data_ptr() - copies[0].data_ptr() for copy in copies]
    assert starts == [0, 64, 128, 384]
    assert len(mapped) == 1
    # Larger than a region, and larger than what is left of one.
    large = torch.zeros(mapped[0] + 1, dtype=torch.int8)
    assert torch.equal(pages.copy(large), large)
    assert mapped[1] >= large.nbytes and len(mapped) == 2


def test_a_region_goes_with_its_last_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    regions: list[weakref.ref[mmap.mmap]] = []
    stock = mmap.mmap

    def map_region(*args: Any, **kwargs: Any) -> mmap.mmap:
        region = stock(*args, **kwargs)
        regions.append(weakref.ref(region))
        return region

    monkeypatch.setattr(huge_pages.mmap, "mmap", map_region)
    pages = HugePages(huge_pages._map_bytes)
    first, second = (pages.copy(torch.full((5,), number)) for number in (1, 2))
    del pages, first
    gc.collect()
    assert len(regions) == 1 and regions[0]() is not None
    assert torch.equal(second, torch.full((5,), 2))
    del second
    gc.collect()
    assert regions[0]() is None


def test_mapped_memory_begins_with_a_page() -> None:
    tensor = torch.randn(1000, 700)
    copy = in_huge_pages(tensor)
    assert torch.equal(copy, tensor) and copy.data_ptr() % 64 == 0
    empty = torch.empty(0, 4)
    assert in_huge_pages(empty) is empty
    pages = huge_pages.huge_pages()
    if pages is not None:
        assert HugePages(pages._map_bytes).copy(tensor).data_ptr() % (2 << 20) == 0


def test_without_huge_pages_tensors_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "huge_pages", lambda: None)
    tensor = torch.ones(5)
    assert in_huge_pages(tensor) is tensor


def test_a_kernel_without_huge_pages_gives_others(monkeypatch: pytest.MonkeyPatch) -> None:
    class Region(mmap.mmap):
        def madvise(self, *args: int) -> None:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(huge_pages.mmap, "mmap", Region)
    tensor = torch.randn(100)
    assert torch.equal(HugePages(huge_pages._map_bytes).copy(tensor), tensor)
