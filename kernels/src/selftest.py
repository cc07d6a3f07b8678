# SPDX-License-Identifier: Apache-2.0
"""A quick check of the compiled kernels on this machine, for the doctor."""

from __future__ import annotations

import numpy as np
import torch

from . import dispatch, reference
from .cpu_layout import CpuKvLayout, make_layout, standard_tables
from .metadata import tree_metadata

# (context length, nodes): no context, one row past a word, more than one tile.
_TREES = ((0, 0), (33, 8), (300, 70))
_LAYOUTS = (
    (torch.float32, "vec"), (torch.float16, "vec"), (torch.bfloat16, "vec"),
    (torch.bfloat16, "vnni"),
)  # fmt: skip


def self_test(seed: int = 0) -> str:
    """Runs random trees and a compaction through the chosen kernels and the torch reference.

    Returns:
        A line with the comparisons and the largest difference of each dtype.

    Raises:
        RuntimeError: if the kernels disagree with the reference.
    """
    generator = torch.Generator().manual_seed(seed)
    worst: dict[str, float] = {}
    for dtype, kind in _LAYOUTS:
        layout = make_layout(standard_tables(kind, 32, 64), kind, dtype)
        error = _tree_attn_error(layout, generator)
        name = str(dtype).removeprefix("torch.")
        worst[name] = max(worst.get(name, 0.0), error)
        # Inputs are standard normal, so outputs are at most about 4: a few units of rounding.
        limit = 5e-6 if dtype == torch.float32 else 0.05
        if not error <= limit:
            raise RuntimeError(
                f"tree_attn differs from the reference by {error:.2g} ({name}, layout {kind}, "
                f"limit {limit}); set SPECPLUG_CPU_ISA=reference to run without it"
            )
        if not _compaction_agrees(layout, generator):
            raise RuntimeError(
                f"copy_kv differs from the reference ({name}, layout {kind}); set "
                "SPECPLUG_CPU_ISA=reference to run without it"
            )
    differences = ", ".join(f"{name} {error:.1e}" for name, error in worst.items())
    return f"tree_attn and copy_kv agree with the torch reference ({differences})"


def _tree_attn_error(layout: CpuKvLayout, generator: torch.Generator) -> float:
    num_heads, group_size, size = 2, 3, layout.head_size
    rng = np.random.default_rng(generator.initial_seed())
    blocks = max(-(-(c + n + 1) // layout.block_size) for c, n in _TREES)
    block_table = torch.randperm(len(_TREES) * blocks, generator=generator).view(len(_TREES), -1)
    cache = torch.randn(
        block_table.numel(), num_heads, layout.block_size, 2 * size, generator=generator
    ).to(layout.dtype)
    key_cache, value_cache = layout.views(cache)
    parents = [
        np.array([rng.integers(-1, i) if i else -1 for i in range(n)], dtype=np.int32)
        for _, n in _TREES
    ]
    starts = np.cumsum([0, *(n + 1 for _, n in _TREES)])
    meta = tree_metadata(
        range(len(_TREES)), starts[:-1], [c for c, _ in _TREES], parents, block_table.int()
    )
    query = torch.randn(int(starts[-1]), num_heads * group_size, size, generator=generator).to(
        layout.dtype
    )
    output, expected = torch.empty_like(query), torch.empty_like(query)
    args = (meta, size**-0.5, layout)
    dispatch.tree_attn(query, key_cache, value_cache, output, *args)
    reference.tree_attn_reference(query, key_cache, value_cache, expected, *args)
    return float((output.float() - expected.float()).abs().max())


def _compaction_agrees(layout: CpuKvLayout, generator: torch.Generator) -> bool:
    cache = torch.randn(3, 2, layout.block_size, 2 * layout.head_size, generator=generator)
    moved = [cache.to(layout.dtype).clone() for _ in range(2)]
    expected = [c.clone() for c in moved]
    slots = torch.tensor([[[35, 37, 70]]]), torch.tensor([30, 35, 36])
    dispatch.copy_kv(moved, moved, *slots, layout)
    reference.copy_kv_reference(expected, expected, *slots, layout)
    return all(torch.equal(a, b) for a, b in zip(moved, expected, strict=True))
