# SPDX-License-Identifier: Apache-2.0
"""Compiles the Triton kernels for a GPU that need not be there.

`python -m tests.ptx.triton_aot ARCH [all]` prints one JSON object per kernel; `all` takes more
shapes of the attention, some minutes of compilation over three architectures. A process of its
own: where kernels run in the interpreter they cannot be compiled.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

import triton

from tests.ptx.triton_compile import Compiled, compile_kernel
from tests.ptx.triton_rows import candidate_kernels, row_kernels

# Features of a layer, and the arguments that come with them.
FEATURES: dict[str, tuple[str, ...]] = {
    "window": (),
    "soft cap": (),
    "sinks": ("sinks",),
    "alibi": ("alibi_slopes",),
    "fp8": ("key_scale", "value_scale"),
    "fp8 query": ("query_scale",),
    # Scales of each token behind its numbers, of keys and of values.
    "fp8 tokens": ("key_scale", "value_scale"),
    "int8 tokens": ("key_scale", "value_scale"),
}
# The KV heads of their pages.
KV_HEADS = 8


def tree_attention(
    arch: int, packed_rows: int, *, head_dim: int = 128, page: int = 16, dense: bool = False,
    dtype: str = "bf16", prefix: bool = False, small: bool = False, full: bool = False,
    features: tuple[str, ...] = (),
) -> Compiled:  # fmt: skip
    """The attention kernel with the tiles its wrapper chooses; split, unless `dense` or behind
    another kernel's `prefix`, there with `small` tiles or not; `full` attends all rows of a block.
    `features` are names of `FEATURES`."""
    import triton.language as tl

    from vllm_specplug.kernels.features import FeatureKind
    from vllm_specplug.kernels.tree_attn_triton import (
        MIN_TILES,
        SMALL_TAIL,
        TreeAttnConfig,
        _tree_attn_kernel,
    )

    shared = {80: 163, 90: 227, 100: 227}[arch] * 1024
    itemsize = 4 if dtype == "fp32" else 2
    kind = FeatureKind(
        window=128 * ("window" in features),
        soft_cap=50.0 * ("soft cap" in features),
        sinks="sinks" in features,
        alibi="alibi" in features,
        quantised_cache=bool({"fp8", "fp8 tokens", "int8 tokens"} & {*features}),
        quantised_query="fp8 query" in features,
        token_scales=bool({"fp8 tokens", "int8 tokens"} & {*features}),
        int8_cache="int8 tokens" in features,
    )
    config = TreeAttnConfig.choose(packed_rows, head_dim, itemsize, shared, arch // 10, dense, kind)
    if small:
        config = SMALL_TAIL
    cache = "*i8" if kind.int8_cache else "*fp8e4nv" if kind.quantised_cache else f"*{dtype}"
    # In units of a scale's bytes: a slot of one head has the numbers and the scales of both halves.
    slot = 2 * (head_dim // 4 + 1) * kind.token_scales
    asked = "*fp8e4nv" if "fp8 query" in features else f"*{dtype}"
    scales = {n: "*fp32" for f in features for n in FEATURES[f]}
    absent = {n: None for names in FEATURES.values() for n in names if n not in scales}
    element = f"*{dtype}"
    pointers = ("query", "key_cache", "value_cache", "tail_key", "tail_value", "prefix")
    strides = (
        "query_row", "query_head", "output_row", "output_head", "key_block",
        "key_token", "key_head", "value_block", "value_token", "value_head", "tail_key_row",
        "tail_key_head", "tail_value_row", "tail_value_head", "prefix_row", "prefix_head",
    )  # fmt: skip
    numbers = (
        "num_trees", "forced_parts", "resident_ctas", "extra", "part_rows", "plan_stride",
        "words_stride", "table_stride", "lse_row", "lse_head", "prefix_lse_head",
    )  # fmt: skip
    compiled = compile_kernel(
        f"tree_attn rows {packed_rows} dim {head_dim} page {page} {dtype}{' dense' * dense}"
        f"{' prefix' * prefix}{' small' * small}{' full' * full}"
        f"{''.join(f' {f}' for f in features)}",
        _tree_attn_kernel,
        arch,
        {
            **dict.fromkeys(pointers, element),
            **dict.fromkeys(("key_cache", "value_cache"), cache),
            "query": asked,
            **scales,
            "output": element,
            **dict.fromkeys(("lse", "part_out", "part_lse"), "*fp32"),
            "part_record": "*i32",
            "prefix_lse": "*fp32",
            "plan": "*i32",
            "words": "*i64",
            "block_table": "*i32",
            "scale_log2": "fp32",
            **dict.fromkeys((*strides, *numbers), "i32"),
        },
        {
            **absent,
            "QUERY_SCALE_HEAD": 0,
            **dict.fromkeys(("KEY_SCALE_HEAD", "VALUE_SCALE_HEAD"), slot * page),
            "SCALE_BLOCK": slot * page * KV_HEADS,
            "SCALE_TOKEN": slot,
            "VALUE_AT": 2 * slot,
            "WINDOW": kind.window,
            "SOFT_CAP": kind.soft_cap,
            "NEEDS_POSITIONS": bool(kind.window or kind.alibi),
            "COMPUTE": getattr(tl, {"bf16": "bfloat16", "fp16": "float16"}.get(dtype, "float32")),
            "key_dim": 1,
            "value_dim": 1,
            "GROUP": 4,
            "HEAD_DIM": head_dim,
            "PADDED_DIM": triton.next_power_of_2(head_dim),
            "PAGE": page,
            "SPLIT": not dense and not prefix,
            "MIN_TILES": MIN_TILES,
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "DENSE_TAIL": dense,
            "FULL_TAIL": full,
            "HAS_PREFIX": prefix,
            "STORE_LSE": False,
            "PRECISION": "ieee" if dtype == "fp32" else "tf32",
        },
        # Behind a scale neither a slot nor its value starts at a multiple of 16 bytes.
        aligned=tuple(
            {*pointers, "output", "part_out", *strides}
            - ({"key_token", "value_token", "value_cache"} if kind.token_scales else set())
        ),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    assert compiled.shared_memory <= shared, compiled
    return compiled


def latent_attention(arch: int, rows: int, heads: int, dtype: str = "bf16") -> Compiled:
    """The kernel over latent rows of DeepSeek's targets, split, with the tiles its wrapper
    chooses."""
    from vllm_specplug.kernels.latent_attn_triton import _latent_attn_kernel, choose_config
    from vllm_specplug.kernels.tree_attn_triton import MIN_TILES

    config = choose_config(rows * heads, 4 if dtype == "fp32" else 2)
    pointers = ("q_latent", "q_rotary", "cache", "output")
    strides = (
        "latent_row", "latent_head", "rotary_row", "rotary_head", "output_row", "output_head",
        "cache_block", "cache_token",
    )  # fmt: skip
    numbers = (
        "num_trees", "forced_parts", "resident_ctas", "extra", "part_rows", "plan_stride",
        "words_stride", "table_stride",
    )  # fmt: skip
    compiled = compile_kernel(
        f"latent_attn rows {rows} heads {heads} {dtype}",
        _latent_attn_kernel,
        arch,
        {
            **dict.fromkeys(pointers, f"*{dtype}"),
            **dict.fromkeys(("part_out", "part_lse"), "*fp32"),
            **dict.fromkeys(("part_record", "plan", "block_table"), "*i32"),
            "words": "*i64",
            "scale_log2": "fp32",
            **dict.fromkeys((*strides, *numbers), "i32"),
        },
        {
            "HEADS": heads,
            "LATENT": 512,
            "PADDED_LATENT": 512,
            "ROTARY": 64,
            "PADDED_ROTARY": 64,
            "PAGE": 64,
            "SPLIT": True,
            "MIN_PART_TILES": MIN_TILES,
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "PRECISION": "ieee" if dtype == "fp32" else "tf32",
        },
        aligned=(*pointers, "part_out", *strides),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    assert compiled.shared_memory <= {80: 163, 90: 227, 100: 227}[arch] * 1024, compiled
    return compiled


def small_kernels(arch: int) -> list[Compiled]:
    """Everything but the attention, for trees of 256 nodes."""
    import triton.language as tl

    from vllm_specplug.kernels.finite_values_triton import (
        _ROWS,
        _isolate_nonfinite_kernel,
        _isolate_token_scales_kernel,
        _store_isolated_kernel,
    )
    from vllm_specplug.kernels.gru_step_triton import _gru_step_kernel
    from vllm_specplug.kernels.kv_compact_triton import _compact_paths_kernel
    from vllm_specplug.kernels.lse_merge_triton import _merge_parts_kernel
    from vllm_specplug.kernels.ngram_lookup_triton import PIECE, _branches_kernel, _scan_kernel
    from vllm_specplug.kernels.step_tables_triton import (
        _COLUMNS,
        _REQUESTS,
        _draft_inputs_kernel,
        _step_table_kernel,
        _trees_table_kernel,
    )
    from vllm_specplug.kernels.step_trees_triton import (
        _COMMITTED,
        MOST_ENDS,
        _attach_kernel,
        _commit_kernel,
        _plan_kernel,
        _positions_kernel,
        _put_kernel,
        _walk_kernel,
    )
    from vllm_specplug.kernels.tree_builder_triton import _build_best_first_kernel
    from vllm_specplug.kernels.tree_merge_triton import _merge_kernel
    from vllm_specplug.kernels.tree_words_triton import _tree_words_kernel

    def ints(*names: str) -> dict[str, str]:
        return dict.fromkeys(names, "i32")

    def pointers(kind: str, *names: str) -> dict[str, str]:
        return dict.fromkeys(names, f"*{kind}")

    return [
        compile_kernel(
            "merge_parts", _merge_parts_kernel, arch,
            {**pointers("fp32", "part_out", "part_lse", "merged_lse"), "output": "*bf16",
             **pointers("i32", "part_record", "plan"),
             **ints("plan_stride", "part_rows", "output_row", "output_head", "merged_row",
                    "merged_head")},
            {"HEAD_DIM": 128, "PADDED_DIM": 128, "STORE_LSE": False},
            num_warps=2,
        ),
        compile_kernel(
            "isolate_nonfinite", _isolate_nonfinite_kernel, arch,
            {**pointers("bf16", "key", "value"), **ints("num_rows", "key_row", "value_row")},
            {"HEAD_DIM": 128, "PADDED_DIM": 128, "ROWS": _ROWS},
        ),
        compile_kernel(
            "store_isolated", _store_isolated_kernel, arch,
            {**pointers("bf16", "key", "value", "keys", "values"), "slots": "*i64",
             **ints("num_rows", "key_row", "value_row", "block", "token", "head")},
            {"PAGE": 16, "KEY_DIM": 128, "PADDED_KEY": 128, "HEAD_DIM": 128, "PADDED_DIM": 128,
             "ROWS": _ROWS},
        ),
        compile_kernel(
            "isolate_token_scales", _isolate_token_scales_kernel, arch,
            {"values": "*u8", **pointers("fp32", "key_scales", "value_scales"), "slots": "*i64",
             **ints("num_rows", "value_block", "value_token", "value_head", "scale_block",
                    "scale_token", "scale_head")},
            {"PAGE": 16, "HEAD_DIM": 128, "PADDED_DIM": 128, "FLOATS": True, "ROWS": _ROWS},
        ),
        compile_kernel(
            "tree_words", _tree_words_kernel, arch,
            {**pointers("i32", "plan", "parent_rows"), "words": "*i64",
             **ints("plan_stride", "words_stride")},
            {"WORDS": 5, "PADDED_WORDS": 8, "BLOCK": 64},
            num_warps=2,
        ),
        compile_kernel(
            "compact_paths", _compact_paths_kernel, arch,
            {"addresses": "*i64", **pointers("i32", "paths", "lengths", "context_lens",
                                             "req_indices", "block_table"),
             **ints("paths_stride", "table_stride", "num_layers", "num_heads", "key_block",
                    "key_token", "key_head", "value_block", "value_token", "value_head")},
            {"key_dim": 1, "value_dim": 1, "PAGE": 16, "HEAD_DIM": 128, "BLOCK": 1024,
             "ELEMENT": tl.int16},
        ),
        compile_kernel(
            "build_best_first", _build_best_first_kernel, arch,
            {**pointers("i64", "top_ids", "token_ids"), **pointers("fp32", "top_log_probs",
                                                                   "scores"),
             **pointers("i32", "budgets", "depths", "parents", "node_depths", "counts"),
             **ints("num_depths", "width", "max_width", "num_nodes")},
            {"HEAP_SIZE": 512},
            num_warps=1,
        ),
        compile_kernel(
            "ngram_scan", _scan_kernel, arch,
            {**pointers("i32", "tokens", "lengths", "ends"), "slots": "*i64",
             **ints("stride", "num_pieces")},
            {"LEVELS": 4, "PIECE_SIZE": PIECE},
        ),
        compile_kernel(
            "ngram_branches", _branches_kernel, arch,
            {**pointers("i32", "tokens", "lengths", "depths", "ends", "sizes", "branches"),
             "slots": "*i64", **ints("stride", "num_pieces", "count", "longest")},
            {"LEVELS": 4, "PIECE_SIZE": PIECE, "ENDS": 256, "CANDIDATES": 16, "LENGTH": 64},
            num_warps=1,
        ),
        compile_kernel(
            "merge_branches", _merge_kernel, arch,
            {**pointers("i64", "head_tokens", "token_ids"),
             **pointers("i32", "head_parents", "head_depths", "head_counts", "sizes", "branches",
                        "budgets", "parents", "node_depths", "counts"),
             **pointers("fp32", "head_scores", "table", "scores"),
             **ints("num_nodes", "num_branches", "length", "num_ranks")},
            {"HAS_HEAD": True, "NODES": 512},
            num_warps=2,
        ),
        compile_kernel(
            "walk", _walk_kernel, arch,
            {**pointers("i64", "samples", "slots", "ends", "emitted", "path_rows"),
             **pointers("i32", "token_ids", "parent_rows", "starts", "nodes", "lengths"),
             **ints("max_rows", "num_ends")},
            {"ROWS": 512, "ENDS": MOST_ENDS},
            num_warps=1,
        ),
        compile_kernel(
            "commit", _commit_kernel, arch,
            {**pointers("i32", "starts", "contexts", "lengths"),
             **pointers("i64", "query_rows", "path_rows", "slot_mapping", "positions",
                        "computed_rows", "slots", "linear", "last_rows"),
             **ints("max_rows", "num_reqs", "num_rows")},
            {"BLOCK": _COMMITTED},
        ),
        compile_kernel(
            "put", _put_kernel, arch,
            {**pointers("i64", "slots", "token_ids", "legal_ids"),
             **pointers("i32", "root_positions", "parents", "counts", "room", "kept_parents",
                        "kept_depths", "kept_roots"),
             **pointers("fp32", "scores", "kept_scores"),
             **ints("num_nodes", "vocab_size", "token_stride", "parent_stride", "score_stride")},
            {"NODES": 256, "ROUNDS": 8, "OTHERS": 16},
        ),
        compile_kernel(
            "attach", _attach_kernel, arch,
            {**pointers("i32", "kept_parents", "kept_depths", "kept_roots", "starts", "contexts",
                        "parent_rows", "depths"),
             **pointers("i64", "slots", "above"), **ints("num_nodes")},
            {"ROWS": 512},
        ),
        compile_kernel(
            "positions", _positions_kernel, arch,
            {**pointers("i32", "starts", "contexts", "depths"),
             **pointers("i64", "query_rows", "positions")},
            {"ROWS": 512},
        ),
        compile_kernel(
            "plan", _plan_kernel, arch,
            {**pointers("i32", "query_starts", "seq_lens", "tree_starts", "plan", "starts",
                        "parents"), "above": "*i64",
             **ints("num_requests", "num_trees", "num_rows")},
            {"BLOCK": 512},
        ),
        compile_kernel(
            "step_table", _step_table_kernel, arch,
            {**pointers("i64", "slots", "path_rows"),
             **pointers("i32", "seq_lens", "totals", "computed", "sampled", "token_ids", "lengths",
                        "table"),
             **ints("token_stride", "width", "num_paths")},
            {"BLOCK": _COLUMNS},
        ),
        compile_kernel(
            "trees_table", _trees_table_kernel, arch,
            {**pointers("i64", "token_ids", "alone_ids"),
             **pointers("i32", "room", "parents", "depths", "counts", "alone_parents",
                        "alone_depths", "alone_counts", "sizes", "branches", "table"),
             **pointers("fp32", "scores", "alone_scores"),
             **ints("num_nodes", "token_stride", "parent_stride", "depth_stride", "score_stride",
                    "num_lookup", "num_branches", "num_tokens")},
            {"BLOCK": _COLUMNS},
        ),
        compile_kernel(
            "draft_inputs", _draft_inputs_kernel, arch,
            {**pointers("i64", "slots", "last_sampled", "anchors"),
             **pointers("i32", "totals", "sampled", "limits", "numbers"),
             **ints("num_reqs", "last_stride", "stride")},
            {"BLOCK": _REQUESTS},
        ),
        compile_kernel(
            "gru_step", _gru_step_kernel, arch,
            {"tokens": "*i64", "parents": "*i32",
             **pointers("bf16", "states", "gates", "weight", "output"),
             **ints("num_nodes", "size")},
            {"NODES": 32, "COLUMNS": 32, "DEPTH": 64},
            aligned=("states", "gates", "weight", "output", "size"),
        ),
    ]  # fmt: skip


def partial_cache_kernels(arch: int) -> list[Compiled]:
    """Partial caches of `KV_HEADS` heads of 128 in pages of 16, four query heads to each."""
    import triton.language as tl

    from vllm_specplug.kernels import partial_cache_triton as kernels

    pages = ("page_block", "page_token", "page_head")
    pool = ("pool_block", "pool_token", "pool_head")
    types = {
        **dict.fromkeys(("query", "pages"), "*bf16"),
        **dict.fromkeys(("columns", "block_table"), "*i32"),
        **dict.fromkeys(("lens", "positions", "covered", "tails", "addresses"), "*i64"),
        "scores": "*fp32",
        **dict.fromkeys(
            (*pages, *pool, "query_row", "query_head", "columns_stride", "table_stride", "width",
             "num_heads", "num_layers", "budget", "sink", "blocks", "recent", "count"), "i32",
        ),
    }  # fmt: skip
    bits = dict.fromkeys(("pages", "pool"), "*i16")
    cases: list[tuple[str, Any, dict[str, Any], dict[str, str], int]] = [
        (
            "score_keys",
            kernels._score_keys_kernel,
            {
                "GROUP": 4,
                "HEAD_DIM": 128,
                "PADDED_DIM": 128,
                "PAGE": 16,
                "TOKENS": kernels._SCORED,
                "NEWEST": kernels.NEWEST,
                "OLDER": kernels.OLDER,
            },
            {},
            4,
        ),
        (
            "gather_chosen",
            kernels._gather_chosen_kernel,
            {"WIDTH": 256, "PADDED_WIDTH": 256, "PAGE": 16, "ENTRIES": kernels._GATHERED},
            bits,
            4,
        ),
        (
            "append_to_tail",
            kernels._append_to_tail_kernel,
            {"WIDTH": 256, "PAGE": 16, "BLOCK": 1024, "ELEMENT": tl.int16},
            {},
            4,
        ),
        (
            "count_tokens",
            kernels._count_tokens_kernel,
            {"REGIONS": kernels._COUNTED},
            {},
            2,
        ),
    ]
    strides = (*pages, *pool, "query_head", "pages", "pool", "scores", "positions")
    return [
        compile_kernel(
            name, kernel, arch,
            {n: (types | more)[n] for n in kernel.arg_names if n not in constants}, constants,
            aligned=tuple(n for n in kernel.arg_names if n in strides), num_warps=warps,
        )
        for name, kernel, constants, more, warps in cases
    ]  # fmt: skip


def state_kernels(arch: int) -> list[Compiled]:
    """Gated DeltaNet layers of 16 key and 32 value heads of 128, over states in bfloat16 as vLLM
    lays them out on CUDA."""
    from vllm_specplug.kernels import delta_tree_triton as kernels

    floats = dict.fromkeys(
        ("query", "key", "value", "decays", "strengths", "within", "entering", "output", "updates",
         "keys"), "*fp32",
    )  # fmt: skip
    integers = dict.fromkeys(
        ("starts", "parents", "slots", "last_rows", "targets", "windows", "rows"), "*i64"
    ) | dict.fromkeys(
        ("num_rows", "width", "key_heads", "heads", "state_slot", "state_head", "state_value",
         "channels", "num_trees", "conv_slot", "conv_step", "row_stride_a", "row_stride_b"), "i32",
    )  # fmt: skip
    layer = dict.fromkeys(
        ("inputs", "conv_states", "weight", "bias", "mixed", "a", "b", "dt_bias"), "*bf16"
    )
    types = floats | integers | layer
    types |= {"states": "*bf16", "a_log": "*fp32", "scale": "fp32", "eps": "fp32"}
    sizes = {"KEY_SIZE": 128, "VALUE_SIZE": 128, "COLUMNS": kernels._COLUMNS}
    cases: dict[str, tuple[Any, dict[str, Any], dict[str, str], int]] = {
        "tree_conv": (
            kernels._tree_conv_kernel,
            {
                "WIDTH": 4,
                "HAS_BIAS": False,
                "SILU": True,
                "BLOCK": kernels._CHANNELS,
                "conv_channel": 1,
            },
            {"output": "*bf16"},
            4,
        ),
        "tree_inputs": (
            kernels._tree_inputs_kernel,
            {"KEY_SIZE": 128, "VALUE_SIZE": 128, "KEYS": 128, "VALUES": 128, "GROUP": 2},
            {"value": "*bf16"},
            1,
        ),
        "tree_products": (kernels._tree_products_kernel, {"ROWS": 64}, {}, 2),
        "tree_solve": (
            kernels._tree_solve_kernel,
            {**sizes, "BLOCK": kernels._BLOCK, "DEPTH": kernels._DEPTH, "state_key": 1},
            {},
            4,
        ),
        "commit_states": (
            kernels._commit_states_kernel,
            {**sizes, "KEYS": kernels._COMMIT_KEYS, "BLOCKS": 4, "state_key": 1},
            {},
            4,
        ),
        "commit_conv": (
            kernels._commit_conv_kernel,
            {"KEPT": 3, "BLOCK": kernels._CHANNELS, "conv_channel": 1},
            {},
            4,
        ),
    }
    compiled = []
    for name, (kernel, constants, others, warps) in cases.items():
        used = {
            n: t for n, t in (types | others).items() if n in {*kernel.arg_names} - {*constants}
        }
        aligned = tuple(n for n, t in used.items() if t[0] == "*" or n.startswith("state_"))
        compiled.append(
            compile_kernel(name, kernel, arch, used, constants, aligned=aligned, num_warps=warps)
        )
    return compiled


def main(arch: int, all_shapes: bool) -> None:
    kernels = [tree_attention(arch, 64 * 4), tree_attention(arch, 16 * 4, dense=True)]
    kernels += small_kernels(arch) + partial_cache_kernels(arch) + state_kernels(arch)
    kernels += candidate_kernels(arch) + row_kernels(arch)
    kernels += [tree_attention(arch, 4, dense=True)]
    # Blocks of published DFlash2 heads.
    kernels += [tree_attention(arch, 8 * 4, dense=True, full=True, features=("window",))]
    kernels += [tree_attention(arch, 64 * 4, prefix=True, small=s) for s in (False, True)]
    kernels += [tree_attention(arch, 64 * 4, head_dim=256, dense=d) for d in (False, True)]
    # Gemma 4's without a window.
    kernels += [tree_attention(arch, 64 * 4, head_dim=512, dense=d) for d in (False, True)]
    kernels += [tree_attention(arch, 64 * 4, head_dim=512, features=("window", "soft cap"))]
    # What layers of Gemma, gpt-oss and BLOOM have; e4m3 needs compute capability 8.9.
    kernels += [
        tree_attention(arch, 64 * 4, head_dim=256, features=("window", "soft cap")),
        tree_attention(arch, 64 * 4, head_dim=64, features=("window", "sinks")),
        tree_attention(arch, 64 * 4, prefix=True, features=("soft cap", "sinks")),
        tree_attention(arch, 64 * 4, features=("alibi",)),
    ]
    if arch >= 89:
        kernels.append(tree_attention(arch, 64 * 4, features=("fp8", "fp8 query")))
        kernels.append(tree_attention(arch, 16 * 4, dense=True, features=("fp8",)))
        kernels.append(tree_attention(arch, 64 * 4, features=("fp8 tokens",)))
    kernels.append(tree_attention(arch, 64 * 4, features=("int8 tokens",)))
    if arch == 90 or all_shapes:
        # Roots alone, large pages, another head size.
        kernels.append(tree_attention(arch, 4, page=128))
        kernels.append(tree_attention(arch, 64 * 4, head_dim=96, page=64))
    # DeepSeek-V3 over eight ranks and over one, a single row and a tree.
    kernels += [latent_attention(arch, 1, 16), latent_attention(arch, 16, 128)]
    kernels += [latent_attention(arch, 16, 16, dtype="fp32")]
    # float32 is what outputs are compared in first, on small models with heads of 64.
    kernels += [tree_attention(arch, 64 * 4, dtype="fp16")]
    kernels += [tree_attention(arch, 16 * 4, dtype="fp16", dense=True)]
    kernels += [
        tree_attention(arch, 64 * 4, head_dim=dim, dtype="fp32", dense=dense)
        for dim in (64, 128)
        for dense in (False, True)
    ]
    kernels += [tree_attention(arch, 4, head_dim=64, dtype="fp32", dense=d) for d in (False, True)]
    if all_shapes:
        kernels += [tree_attention(arch, rows, head_dim=64, page=32) for rows in (4, 64, 256)]
        kernels += [
            tree_attention(arch, 64 * 4, head_dim=dim, dtype="fp32", features=("window", feature))
            for dim, feature in ((64, "sinks"), (128, "soft cap"), (128, "alibi"))
        ]
        kernels += [tree_attention(arch, 64 * 4, head_dim=d, dtype="fp32") for d in (16, 32, 96)]
    for kernel in kernels:
        print(json.dumps(asdict(kernel)), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:] == ["all"])
