# SPDX-License-Identifier: Apache-2.0
"""Seams of matrix products with the target's and drafts' weights."""

from __future__ import annotations

from vllm_specplug.seams.reasons import uses
from vllm_specplug.seams.seam import Seam, Wrap

_FAST_PRODUCTS = "vLLM multiplies the rows of a tree as fast as one row"

CPU_PRODUCTS = Wrap(
    "cpu_products",
    "vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm",
    "vLLM multiplies a dozen bfloat16 rows in 1.5 times the time of one row on a CPU with AVX-512 "
    "BF16, and in 9 times without AVX-512; applied while a worker loads its weights",
    _FAST_PRODUCTS,
    make="vllm_specplug.vllm_worker.target.linear:packing_dispatch",
)

PRODUCT_USES: tuple[Seam, ...] = (
    *uses(
        "packed_linear",
        "unpacked bfloat16 products on a CPU reorder their weights at every call",
        "torch packs the weights",
        "vllm.model_executor.layers:utils",
    ),
    *uses(
        "cpu_products",
        "vLLM passes LM heads and embeddings to the same dispatch; only LM heads are multiplied",
        _FAST_PRODUCTS,
        "vllm.model_executor.layers.vocab_parallel_embedding:ParallelLMHead",
    ),
    *uses(
        "int8_linear",
        "int8 products of drafts read half the bytes at nearly twice the speed",
        'draft_weights "full" becomes the only choice',
        "vllm._custom_ops:create_onednn_scaled_mm",
        "vllm._custom_ops:onednn_scaled_int8_quant",
        "vllm._custom_ops:onednn_scaled_mm",
    ),
    *uses(
        "fp8_linear",
        "fp8 products of drafts on a GPU read half the bytes, by a kernel tuned for few rows",
        "torch's product is as fast for few rows",
        "vllm._custom_ops:cutlass_scaled_mm",
        "vllm._custom_ops:cutlass_scaled_mm_supports_fp8",
    ),
    *uses(
        "draft_experts",
        "the experts of a draft layer must run inside CUDA graphs, in one launch per product",
        "torch's grouped product runs on every GPU",
        "vllm.model_executor.layers.fused_moe:fused_experts",
    ),
)
