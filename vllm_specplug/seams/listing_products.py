# SPDX-License-Identifier: Apache-2.0
"""The part of the list that concerns matrix products on a CPU; `listing` has the whole."""

from __future__ import annotations

from vllm_specplug.seams.reasons import uses
from vllm_specplug.seams.seam import Seam, Wrap

CPU_PRODUCTS = Wrap(
    "cpu_products",
    "vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm",
    "vLLM's products of a dozen bfloat16 rows take half as long again as those of one row on a "
    "CPU with AVX-512 BF16, and nine times as long without AVX-512; in place while a worker "
    "loads its weights",
    "vLLM's take as long for a tree as for one row",
    make="vllm_specplug.vllm_worker.target.linear:packing_dispatch",
)

PRODUCT_USES: tuple[Seam, ...] = (
    *uses(
        "packed_linear",
        "unpacked bf16 products on CPU reorder their weights at every call",
        "torch packs weights by itself",
        "vllm.model_executor.layers:utils",
    ),
    *uses(
        "cpu_products",
        "an LM head is multiplied and an embedding mostly not, and vLLM hands both over alike",
        "vLLM's take as long for a tree as for one row",
        "vllm.model_executor.layers.vocab_parallel_embedding:ParallelLMHead",
    ),
    *uses(
        "int8_linear",
        "a draft's products with half the bytes and nearly twice the speed",
        'draft_weights "full" is made the only choice',
        "vllm._custom_ops:create_onednn_scaled_mm",
        "vllm._custom_ops:onednn_scaled_int8_quant",
        "vllm._custom_ops:onednn_scaled_mm",
    ),
    *uses(
        "fp8_linear",
        "a draft's products on a GPU with half the bytes, by a kernel tuned for few rows",
        "torch's product is as fast for few rows",
        "vllm._custom_ops:cutlass_scaled_mm",
        "vllm._custom_ops:cutlass_scaled_mm_supports_fp8",
    ),
)
