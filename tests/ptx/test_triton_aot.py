# SPDX-License-Identifier: Apache-2.0
"""Every Triton kernel, compiled for devices that are not here: no spills, the right instructions.

The variants are those that the wrappers launch at the sizes of served models.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("vllm")

from tests.kernels.step_trees import request_states
from tests.kernels.triton_launches import DEVICES, Launches
from tests.ptx.triton_compile import Compiled, compile_variants
from vllm_specplug.drafting.ngram import NgramBranches
from vllm_specplug.kernels import AttnFeatures, StateTrees, TreeAttnMetadata, tree_attn_triton
from vllm_specplug.kernels import delta_tree_triton as delta
from vllm_specplug.kernels import row_ops_triton as row_ops
from vllm_specplug.kernels.cuda_contract import TOKEN_SCALE_BYTES, numbers_and_scales
from vllm_specplug.kernels.features import PLAIN
from vllm_specplug.kernels.finite_values_triton import (
    isolate_nonfinite_triton,
    isolate_token_scales_triton,
    store_isolated_triton,
)
from vllm_specplug.kernels.gru_step_triton import gru_step_triton
from vllm_specplug.kernels.kv_compact_triton import LayerCaches, compact_paths_triton
from vllm_specplug.kernels.latent_attn_triton import latent_attn_triton
from vllm_specplug.kernels.top_candidates_triton import top_candidates_triton
from vllm_specplug.kernels.tree_builder_triton import warm_up_builder
from vllm_specplug.tree import step_trees
from vllm_specplug.vllm_v2 import draft_inputs, host_step
from vllm_specplug.vllm_v2.device_ngrams import DeviceNgrams
from vllm_specplug.vllm_v2.graph_trees import GraphTrees
from vllm_specplug.vllm_worker.cuda_kernels import StepLimits
from vllm_specplug.vllm_worker.device_self_draft import DevicePartialCache

pytestmark = pytest.mark.usefixtures("interpreter")

CPU = torch.device("cpu")
BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
# Query heads over KV heads of an 8B model, the longest context, nodes of the largest trees.
HEADS, KV_HEADS, CONTEXT, NODES = 32, 8, 4096, 256
MATRIX_INSTRUCTION = {80: "mma.sync", 90: "wgmma.mma", 100: "tcgen05.mma"}


def cache(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Pages [4, page, heads, width] in vLLM's memory order."""
    return torch.empty(4, *shape, dtype=dtype)


def trees(rows: int, count: int = 1, *, full: bool = False) -> TreeAttnMetadata:
    return TreeAttnMetadata(
        plan=torch.zeros((5, count), dtype=torch.int32),
        block_table=torch.zeros((count, CONTEXT // 16), dtype=torch.int32),
        max_rows=rows,
        max_context=CONTEXT,
        parent_rows=torch.zeros(count * rows, dtype=torch.int32),
        mask_kind="full" if full else "tree",
    )


def attention(
    rows: int, *, count: int = 1, head_dim: int = 128, page: int = 16, dense: bool = False,
    prefix: bool = False, full: bool = False, dtype: torch.dtype = BF16,
    scales: torch.dtype | None = None, features: AttnFeatures = PLAIN,
) -> None:  # fmt: skip
    """`scales`: dtype of the numbers of a cache with a scale per token."""
    kept = FP8 if features.key_scales is not None else dtype
    halves = cache(page, KV_HEADS, 2 * head_dim, dtype=kept).chunk(2, dim=3)
    if scales is not None:
        width = 2 * (head_dim + TOKEN_SCALE_BYTES)
        numbers = cache(page, KV_HEADS, width, dtype=scales).chunk(2, dim=3)
        (keys, of_keys), (values, of_values) = map(numbers_and_scales, numbers)
        halves = keys, values
        features = AttnFeatures(
            key_scales=of_keys, value_scales=of_values, int8_cache=scales == torch.int8
        )
    query = torch.empty(count * rows, HEADS, head_dim, dtype=dtype)
    asked = query if features.query_scales is None else query.to(FP8)
    tail = query[:, :KV_HEADS].contiguous() if dense else None
    before = query.clone(), torch.empty(HEADS, count * rows)
    tree_attn_triton.tree_attn_triton(
        asked, *halves, torch.empty_like(query), trees(rows, count, full=full), 0.1, tail, tail,
        features=features, prefix=before if prefix else None,
    )  # fmt: skip


def latent(rows: int, heads: int, dtype: torch.dtype = BF16) -> None:
    query = torch.empty(rows, heads, 576, dtype=dtype)
    latent_attn_triton(
        query[..., :512], query[..., 512:], cache(64, 576, dtype=dtype),
        torch.empty(rows, heads, 512, dtype=dtype), trees(rows), 0.1,
    )  # fmt: skip


def values_and_moves() -> None:
    rows = torch.empty(64, (HEADS + 2 * KV_HEADS) * 128, dtype=BF16)
    key, value = rows[:, HEADS * 128 :].view(64, 2, KV_HEADS, 128).unbind(1)
    slots = torch.zeros(64, dtype=torch.int64)
    isolate_nonfinite_triton(key, value)
    halves = cache(16, KV_HEADS, 256).chunk(2, dim=3)
    store_isolated_triton(key, value, *halves, slots)
    bytes_ = cache(16, KV_HEADS, 2 * (128 + TOKEN_SCALE_BYTES), dtype=torch.uint8)
    (_, of_keys), (values, of_values) = map(numbers_and_scales, bytes_.chunk(2, dim=3))
    isolate_token_scales_triton(values, of_keys, of_values, slots, floats=True)
    one = torch.zeros(1, dtype=torch.int32)
    paths = torch.zeros((1, NODES), dtype=torch.int32)
    compact_paths_triton(LayerCaches.of([halves]), paths, one, one, one.long(), paths)


def steps() -> None:
    """Trees of a step, their tables, lookups, and partial caches."""
    warm_up_builder(NODES, CPU)
    step_trees.warm_up(NODES, CPU)
    GraphTrees(StepLimits(8, 8 * (NODES + 1), NODES + 1, CONTEXT), CPU).warm_up()
    states = request_states(np.random.default_rng(0), CONTEXT)
    host_step.warm_up(states, NODES)
    draft_inputs.warm_up(states)
    history = torch.zeros((8, CONTEXT), dtype=torch.int32)
    DeviceNgrams(NgramBranches(3, 16), 3, CONTEXT, CPU).warm_up(history, NODES)
    pages = [torch.zeros(4, KV_HEADS, 16, 256, dtype=BF16)]
    DevicePartialCache(pages, 40, 4, 8).warm_up(HEADS, BF16)


def recurrent_states() -> None:
    """Gated DeltaNet of 16 key and 32 value heads of 128, in pages."""
    key_heads, heads, size, rows = 16, 32, 128, NODES
    channels = 2 * key_heads * size + heads * size
    parents = torch.arange(rows) - 1
    slots = torch.zeros(1, dtype=torch.int64)
    made = StateTrees(torch.tensor([0, rows]), parents, slots)
    conv_states, states = torch.empty(2, 3, channels, dtype=BF16), torch.empty(2, heads, size, size)
    inputs = torch.empty(rows, channels, dtype=BF16)
    mixed = delta.tree_conv_triton(
        inputs, conv_states, slots, made.windows(4), inputs[:4].t().contiguous(), None, silu=True
    )
    gates, of_heads = torch.empty(rows, heads, dtype=BF16), torch.empty(heads)
    query, key, value, decays, strengths = delta.tree_inputs_triton(
        mixed, gates, gates, parents, of_heads, of_heads, key_heads=key_heads, key_size=size,
        value_size=size, eps=1e-6,
    )  # fmt: skip
    _, updates = delta.tree_delta_rule_triton(
        query, key, value, decays, strengths, states, made.starts, parents, slots,
        max_rows=rows, scale=0.1,
    )  # fmt: skip
    delta.commit_states_triton(states, key, updates, decays, parents, slots, slots)
    delta.commit_conv_triton(conv_states, inputs, parents, slots, slots)


def rows_one_by_one() -> None:
    """Between the products of a draft layer of 4,096 numbers, and candidates of 151,936 logits."""
    x, weight = torch.empty(64, 4096, dtype=BF16), torch.empty(4096, dtype=BF16)
    row_ops.norm_rows_triton(x, x, weight, 1e-6, 4096)
    heads, table = x.view(64, HEADS, 128), torch.empty(CONTEXT, 128, dtype=BF16)
    positions = torch.zeros(64, dtype=torch.int64)
    row_ops.norm_rotate_triton(heads, weight.view(HEADS, 128), table, table, positions, 1e-6)
    row_ops.gated_silu_triton(torch.empty(64, 2 * 12288, dtype=BF16))
    top_candidates_triton(torch.empty(8, 151936, dtype=BF16), 16)
    gru = torch.empty(3 * 512, 512, dtype=BF16)
    gates, before = gru.view(512, 3 * 512), x[:, :512].contiguous()
    gru_step_triton(positions, positions.int(), before, gates, gru)


SINKS = AttnFeatures(window=128, sinks=torch.zeros(HEADS))
CAPPED = AttnFeatures(window=128, soft_cap=50.0)
SLOPES = AttnFeatures(alibi_slopes=torch.zeros(HEADS))
ONE = torch.ones(())
QUANTISED = AttnFeatures(key_scales=ONE, value_scales=ONE)

# One of each kernel.
CASES: dict[str, Callable[[], None]] = {
    "a tree of 64 rows": partial(attention, 64),
    "latent rows, 16 heads": partial(latent, 1, 16),
    "values and moves": values_and_moves,
    "steps": steps,
    "recurrent states": recurrent_states,
    "rows one by one": rows_one_by_one,
}
# e4m3 needs compute capability 8.9.
ROUNDED: dict[str, Callable[[], None]] = {
    "rounded rows": lambda: row_ops.round_rows_triton(torch.empty(8, 20480, dtype=BF16)) and None,
}
E4M3_CASES: dict[str, Callable[[], None]] = {
    **ROUNDED,
    "e4m3, queries too": partial(
        attention, 64, features=AttnFeatures(key_scales=ONE, value_scales=ONE, query_scales=ONE)
    ),
    "e4m3, dense": partial(attention, 16, dense=True, features=QUANTISED),
    "e4m3 with a scale per token": partial(attention, 64, scales=FP8),
}
MORE_CASES: dict[str, Callable[[], None]] = {
    "roots": partial(attention, 1),
    "roots, pages of 128": partial(attention, 1, page=128),
    "float16": partial(attention, 64, dtype=FP16),
    "dense": partial(attention, 16, dense=True),
    "dense, float16": partial(attention, 16, dense=True, dtype=FP16),
    "dense roots": partial(attention, 1, dense=True),
    "a draft's block": partial(attention, 8, dense=True, full=True, features=SINKS),
    "behind FlashAttention": partial(attention, 64, prefix=True),
    "many behind FlashAttention": partial(attention, 64, count=64, prefix=True),
    "capped behind FlashAttention": partial(
        attention, 64, prefix=True, features=AttnFeatures(soft_cap=50.0, sinks=SINKS.sinks)
    ),
    "heads of 64, window and sinks": partial(attention, 64, head_dim=64, features=SINKS),
    "heads of 96": partial(attention, 64, head_dim=96, page=64),
    "heads of 256": partial(attention, 64, head_dim=256),
    "heads of 256, dense": partial(attention, 64, head_dim=256, dense=True),
    "heads of 256, window and cap": partial(attention, 64, head_dim=256, features=CAPPED),
    "heads of 512": partial(attention, 64, head_dim=512),
    "heads of 512, dense": partial(attention, 64, head_dim=512, dense=True),
    "heads of 512, window and cap": partial(attention, 64, head_dim=512, features=CAPPED),
    "slopes": partial(attention, 64, features=SLOPES),
    "int8 with a scale per token": partial(attention, 64, scales=torch.int8),
    **{
        f"float32, heads of {size}{' dense' * dense}, {rows} rows": partial(
            attention, rows, head_dim=size, dense=dense, dtype=FP32
        )
        for size, rows in ((64, 1), (64, 64), (128, 64))
        for dense in (False, True)
    },
    "latent rows, 128 heads": partial(latent, 16, 128),
    "latent rows, float32": partial(latent, 16, 16, FP32),
}
# Addresses of results, kept from before the loop over the context to behind that over the tree.
SPILLS = {
    (80, "recurrent states"): 16,
    (90, "heads of 256"): 144,
    (90, "heads of 256, window and cap"): 232,
    (90, "dense roots"): 40,
}
LARGE_TILES = {"a tree of 64 rows", "float16", "dense", "dense, float16"}


def compiled(
    cases: dict[str, Callable[[], None]], arch: int, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[str, str, Compiled]]:
    """Returns each variant that the cases launch: its case, kernel and result."""
    monkeypatch.setattr(step_trees, "has_kernels", lambda device: True)
    launches = Launches(monkeypatch, arch)
    made = []
    for name, launch in cases.items():
        launches.taken()
        known = {*launches.variants}
        launch()
        launched = launches.taken()
        assert launched, f"{name} launches nothing"
        made += [(name, launches.variants[key]) for key in sorted(launched - known, key=str)]
    results = compile_variants([variant for _, variant in made], arch)
    return [
        (name, variant.kernel, result)
        for (name, variant), result in zip(made, results, strict=True)
    ]


def check(kernels: list[tuple[str, str, Compiled]], arch: int) -> None:
    spilled: dict[tuple[int, str], int] = {}
    for name, _, made in kernels:
        if made.spilled_bytes:
            spilled[arch, name] = spilled.get((arch, name), 0) + made.spilled_bytes
    assert spilled == {key: spills for key, spills in SPILLS.items() if key in spilled}
    for name, kernel, made in kernels:
        assert 0 < made.registers <= 255 and made.shared_bytes <= DEVICES[arch][1], (name, kernel)
        if kernel == "_tree_attn_kernel" and (name in LARGE_TILES or name.startswith("float32")):
            products = {k for k, n in made.instructions.items() if "mma" in k and n}
            # Matrix products of float32 would round its factors to those of TF32.
            expected = {MATRIX_INSTRUCTION[arch]} if name in LARGE_TILES else set()
            assert products == expected, (name, made)
            assert made.instructions["cp.async."] > 0, (name, made)


@pytest.mark.smoke
def test_every_kernel_compiles_without_spills(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = compiled(CASES | ROUNDED, 90, monkeypatch)
    check(kernels, 90)
    sources = Path(tree_attn_triton.__file__).parent.glob("*_triton*.py")
    defined = {
        name for source in sources
        for name in re.findall(r"^def (_\w+_kernel)\(", source.read_text(), re.MULTILINE)
    }  # fmt: skip
    assert {kernel for _, kernel, _ in kernels} == defined


@pytest.mark.parametrize("arch", DEVICES)
def test_no_variant_spills(arch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = {**CASES, **MORE_CASES, **(E4M3_CASES if arch >= 90 else {})}
    check(compiled(cases, arch, monkeypatch), arch)
