# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch

from tests.kernels.paged import layout_of, write_slots
from vllm_specplug.kernels.cpu_layout import (
    make_layout,
    measure_layout,
    probe_cpu_layout,
    standard_tables,
)

FP32, BF16 = torch.float32, torch.bfloat16


def writer(tables: torch.Tensor):
    """A cache op with the given offset tables."""

    def write(key, value, key_cache, value_cache, slots):
        size = tables.shape[1]
        for i, slot in enumerate(slots.tolist()):
            block, offset = divmod(slot, size)
            for cache, table, values in (
                (key_cache, tables[0], key),
                (value_cache, tables[1], value),
            ):
                for head in range(values.shape[1]):
                    cache[block, head].view(-1)[table[offset].long()] = values[i, head]

    return write


@pytest.mark.parametrize("kind", ["vec", "vnni", "table"])
def test_a_written_layout_is_found_again(kind):
    layout = layout_of(kind, BF16, 32, 64)
    tables = measure_layout(writer(layout.tables), BF16, 32, 64)
    assert torch.equal(tables, layout.tables)
    assert make_layout(tables, "some", BF16).kind == kind


def test_positions_past_the_exact_integers_of_bf16():
    """A block of 512 has more tokens than bf16 has exact integers."""
    tables = standard_tables("vec", 512, 16)
    assert torch.equal(measure_layout(writer(tables), BF16, 512, 16), tables)


@pytest.mark.parametrize("spoil", ["repeat", "swap_halves", "other_block", "nothing"])
def test_what_is_no_permutation_is_refused(spoil):
    good = writer(standard_tables("vec", 32, 16))

    def write(key, value, key_cache, value_cache, slots):
        if spoil == "repeat":
            good(key[:1].expand_as(key), value, key_cache, value_cache, slots)
        elif spoil == "swap_halves":
            good(key, value, value_cache, key_cache, slots)
        elif spoil == "other_block":
            good(key, value, key_cache, value_cache, slots + 32)

    with pytest.raises(RuntimeError, match="cannot read|outside the block"):
        measure_layout(write, FP32, 32, 16)


@pytest.mark.usefixtures("vllm_cpu_ops")
class TestVllm:
    @pytest.mark.parametrize(
        ("isa", "dtype", "block_size", "head_size", "kind"),
        [
            ("vec", FP32, 32, 64, "vec"),
            ("vec", FP32, 128, 128, "vec"),
            ("vec", torch.float16, 64, 96, "vec"),
            ("vec", BF16, 64, 96, "vec"),
            ("amx", BF16, 32, 64, "vnni"),
            ("amx", BF16, 128, 128, "vnni"),
            ("vec16", FP32, 16, 80, "vec"),
            ("vec16", BF16, 16, 112, "vec"),
        ],
    )
    def test_known_layouts(self, isa, dtype, block_size, head_size, kind):
        if isa == "amx" and not torch.cpu._is_amx_tile_supported():
            pytest.skip("needs AMX")
        layout = probe_cpu_layout(isa, dtype, block_size, head_size)
        assert (layout.kind, layout.isa, layout.block_size) == (kind, isa, block_size)
        assert probe_cpu_layout(isa, dtype, block_size, head_size) is layout

    @pytest.mark.parametrize(("isa", "dtype"), [("vec", FP32), ("vec", BF16), ("amx", BF16)])
    def test_gather_returns_what_vllm_wrote(self, isa, dtype):
        if isa == "amx" and not torch.cpu._is_amx_tile_supported():
            pytest.skip("needs AMX")
        layout = probe_cpu_layout(isa, dtype, 32, 64)
        cache = torch.zeros(4, 3, 32, 128, dtype=dtype)
        key, value = torch.randn(2, 50, 3, 64).to(dtype)
        slots = torch.randperm(128)[:50]
        views = layout.views(cache)
        torch.ops._C.cpu_attn_reshape_and_cache(key, value, *views, slots, isa, 1.0, 1.0, "auto")
        k, v = layout.gather(*views, slots)
        assert torch.equal(k, key)
        assert torch.equal(v, value)
        other = torch.zeros_like(cache)
        write_slots(layout, other, slots, key, value)
        assert torch.equal(cache, other)
