# SPDX-License-Identifier: Apache-2.0
"""Matrix products of the target on a CPU, and of draft heads on any device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm.logger import init_logger
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.fused_moe import fused_experts
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
)
from vllm.platforms import current_platform

from vllm_specplug.drafting.drafter import ExpertProducts, LinearFactory
from vllm_specplug.kernels import multiply_experts
from vllm_specplug.kernels.fp8_linear import FP8_CAPABILITY, Fp8Linear
from vllm_specplug.kernels.packed_linear import (
    PackedInt8Linear,
    can_pack,
    has_packed_int4_products,
    has_packed_int8_products,
    has_packed_products,
    pack_int8,
    pack_linear,
    packs_target,
)
from vllm_specplug.kernels.packed_linear import packed_linear as multiply_packed
from vllm_specplug.options import DraftWeightsName, TargetProductsName, option_error
from vllm_specplug.seams.listing_runner import CPU_PRODUCTS

logger = init_logger("vllm.specplug.worker")

# For smaller matrices, rounding the inputs takes the time that the product saves (on an H100).
_MIN_FP8_ELEMENTS = 2**23

# Number of row counts for which oneDNN keeps a compiled product of each matrix.
_KEPT_SHAPES = 128
_ROUNDED_ROWS = 4096


def draft_linear(weights: DraftWeightsName, dtype: torch.dtype) -> LinearFactory:
    """Returns the factory of a draft head's linear layers, by option `draft_weights`.

    Raises:
        ValueError: for "int8" or "fp8" if this machine does not support it.
    """
    if weights == "full":
        return packed_linear
    if not current_platform.is_cpu():
        capability = current_platform.get_device_capability()
        has_fp8 = (
            dtype == torch.bfloat16
            and capability is not None
            and capability >= FP8_CAPABILITY
            and ops.cutlass_scaled_mm_supports_fp8(capability.to_int())
        )
        # Only measured on Hopper.
        is_measured = capability is not None and capability.major == FP8_CAPABILITY[0]
        if has_fp8 and (weights == "fp8" or is_measured):
            logger.info("Draft weights: e4m3, by row (draft_weights=%r)", weights)
            min_elements = 0 if weights == "fp8" else _MIN_FP8_ELEMENTS
            return functools.partial(fp8_linear, min_elements=min_elements)
        if weights == "auto":
            return packed_linear
        raise option_error(
            "draft_weights",
            weights,
            "e4m3 products need a target in bfloat16, a GPU of compute capability 9.0 and a vLLM "
            f"that is built for it; this engine has {dtype} and {capability}",
            'Use "auto"',
        )
    is_built = hasattr(torch.ops._C, "create_onednn_scaled_mm_handler")
    # Without VNNI, oneDNN adds pairs of products in 16 bits, where they overflow.
    if weights == "int8" and not (is_built and torch.cpu._is_vnni_supported()):
        raise option_error(
            "draft_weights",
            weights,
            "int8 products need a CPU with VNNI and a vLLM that is built for it",
            'Use "auto"',
        )
    is_faster = dtype != torch.float32 and torch.cpu._is_vnni_supported()
    if weights == "auto" and not (is_built and is_faster):
        return packed_linear
    logger.info_once("Draft weights: int8, by row (draft_weights=%r)", weights)
    return int8_linear


def expert_products() -> ExpertProducts:
    """Returns the products of a draft head's experts: on a GPU vLLM's, which graphs can capture."""
    if current_platform.is_cpu():
        return multiply_experts
    return lambda x, gate_up, down, weights, expert_ids: fused_experts(
        x, gate_up, down, weights, expert_ids
    )


def int8_linear(
    weight: torch.Tensor, bias: torch.Tensor | None
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns x [..., in] -> [..., out] for weight [out, in], with int8 products.

    Each row of the weight, and each row of x in every call, is divided by its largest magnitude /
    127 and rounded.

    Seam: int8_linear.
    """
    scales = torch.empty(len(weight), dtype=torch.float32)
    rounded = torch.empty(weight.shape, dtype=torch.int8)
    # In parts: a large vocabulary in float32 would be the largest tensor of the start-up.
    for rows in torch.arange(len(weight)).split(_ROUNDED_ROWS):
        part = slice(int(rows[0]), int(rows[-1]) + 1)
        exact = weight[part].float()
        scales[part] = (exact.abs().amax(dim=1) / 127).clamp_(min=torch.finfo(torch.float32).tiny)
        rounded[part] = (exact / scales[part, None]).round_().clamp_(-127, 127).to(torch.int8)
    if weight.dtype == torch.bfloat16 and has_packed_int8_products():
        return PackedInt8Linear(pack_int8(rounded, scales), bias)
    product = ops.create_onednn_scaled_mm(
        rounded.t(), scales, weight.dtype, True, False, _KEPT_SHAPES
    )

    # vLLM keeps a pointer to the scales, which must live as long as the product.
    def multiply(x: torch.Tensor, scales: torch.Tensor = scales) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        inputs, input_scales, _ = ops.onednn_scaled_int8_quant(rows)
        out = torch.empty((len(rows), product.n), dtype=x.dtype)
        ops.onednn_scaled_mm(product, inputs, out, input_scales, None, None, bias)
        return out.unflatten(0, x.shape[:-1]) if x.dim() != 2 else out

    return multiply


def fp8_linear(
    weight: torch.Tensor, bias: torch.Tensor | None, min_elements: int = 0
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns x [T, in] -> [T, out] for weight [out, in], in e4m3 if its sizes allow it and it has
    at least `min_elements` elements.

    Seam: fp8_linear.
    """
    if Fp8Linear.takes(weight) and weight.numel() >= min_elements:
        # All products of an 8B model's draft by 16 rows take an H100 0.69 ms with vLLM's kernel and
        # 0.82 with torch's, by 512 rows 1.42 and 1.39.
        return Fp8Linear(weight, bias, ops.cutlass_scaled_mm)
    return packed_linear(weight, bias)


def packed_linear(
    weight: torch.Tensor, bias: torch.Tensor | None
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns x [T, in] -> [T, out] for weight [out, in], in vLLM's fastest form for the device."""
    if not current_platform.is_cpu():
        return lambda x: torch.nn.functional.linear(x, weight, bias)
    layer: Any = torch.nn.Module()
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    layer.bias = None if bias is None else torch.nn.Parameter(bias, requires_grad=False)
    utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    return lambda x: layer.cpu_linear(x, layer.weight, layer.bias)


def target_products(products: TargetProductsName) -> AbstractContextManager[None]:
    """Returns a context in which loaded weights are packed by option `target_products`.

    Raises:
        ValueError: for "packed" if this CPU does not support it.
    """
    if not packs_target(products):
        if products == "packed":
            raise option_error(
                "target_products",
                products,
                "packed products need a CPU with AVX2 and the compiled kernels",
                'Use "auto"',
            )
        return nullcontext()
    logger.info_once("Products of bfloat16 weights: packed (target_products=%r)", products)
    return CPU_PRODUCTS.applied()


def takes_plain_rows(products: TargetProductsName, model: Any) -> bool:
    """Returns whether the tree kernel also attends rows without drafts: if the target's products
    are the package's (option `target_products`). A row's result is then the same with and without
    drafts in the step."""
    is_packed = model.quantization is None or (has_packed_products() and has_packed_int4_products())
    return model.dtype == torch.bfloat16 and packs_target(products) and is_packed


def packing_dispatch(stock: Callable[..., None]) -> Callable[..., None]:
    """Wraps vLLM's dispatch: packs a layer's weight for the package's products, or leaves it to
    vLLM.

    The placeholder for a packed weight is vLLM's, because code reads the dtype of weights.
    Embeddings keep their rows and are packed on the first product, which only an LM head computes.
    Seam: cpu_products.
    """

    def dispatch_cpu_unquantized_gemm(layer: Any, remove_weight: bool) -> None:
        weight, bias = layer.weight, getattr(layer, "bias", None)
        has_other_bias = bias is not None and bias.dtype != weight.dtype
        if weight.is_meta or has_other_bias or not can_pack(weight):
            stock(layer, remove_weight)
            return
        columns, rows = len(weight), weight.detach()
        if not (remove_weight or isinstance(layer, ParallelLMHead)):
            packed_once = functools.cache(lambda: pack_linear(rows))
            layer.cpu_linear = lambda x, w, bias: multiply_packed(x, packed_once(), columns, bias)
            return
        packed = pack_linear(rows)
        layer.cpu_linear = lambda x, w, bias: multiply_packed(x, packed, columns, bias)
        if remove_weight:
            layer.weight = torch.nn.Parameter(weight.new_empty(0), requires_grad=False)

    return dispatch_cpu_unquantized_gemm


def repack_tables(model: torch.nn.Module) -> None:
    """Packs the embedding and the LM head from their current weights. vLLM reloads a weight that
    two layers share only for the first one, so that the other one's packed copy would be stale."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedEmbeddingMethod):
            method.process_weights_after_loading(module)
