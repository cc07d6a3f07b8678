# SPDX-License-Identifier: Apache-2.0
"""Quantised copies of a target, rounded to nearest, for vLLM and for llama.cpp."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

GROUP = 32


def quantised_copy(target: Path, out: Path, bits: int) -> Path:
    """Writes a copy of the target in compressed-tensors' format to `out`, if it does not exist, and
    returns it: with 4-bit weights in groups of 32 inputs, or with 8-bit weights and inputs.
    Embedding and LM head keep bfloat16."""
    if out.exists():
        return out
    import torch
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )
    from compressed_tensors.quantization.utils import calculate_qparams
    from transformers import AutoModelForCausalLM, AutoTokenizer

    weights = QuantizationArgs(num_bits=8, strategy="channel", symmetric=True)
    inputs = QuantizationArgs(num_bits=8, strategy="token", symmetric=True, dynamic=True)
    if bits == 4:
        weights = QuantizationArgs(num_bits=4, strategy="group", group_size=GROUP, symmetric=False)
        inputs = None
    scheme = QuantizationScheme(targets=["Linear"], weights=weights, input_activations=inputs)
    model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
    apply_quantization_config(
        model, QuantizationConfig(config_groups={"all": scheme}, ignore=["lm_head"])
    )
    for module in model.modules():
        if not hasattr(module, "weight_scale"):
            continue
        groups = module.weight.data.float().unflatten(
            1, (-1, GROUP if bits == 4 else module.in_features)
        )
        scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), weights)
        module.weight_scale.data.copy_(scale)
        if hasattr(module, "weight_zero_point"):
            module.weight_zero_point.data.copy_(zero)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    unfinished = out.with_suffix(".part")
    AutoTokenizer.from_pretrained(target).save_pretrained(unfinished)
    model.save_pretrained(unfinished)
    compressor.update_config(unfinished)
    return unfinished.rename(out)


def gguf_copy(gguf: Path, out: Path, kind: str) -> Path:
    """Writes a GGUF file's weights as `kind`, "BF16" or "Q4_0", to `out`, if it does not exist, and
    returns it.

    Raises:
        RuntimeError: if llama.cpp fails.
    """
    import llama_cpp

    if not out.exists():
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
        params.allow_requantize = True
        unfinished = out.with_suffix(".part")
        status = llama_cpp.llama_model_quantize(
            str(gguf).encode(), str(unfinished).encode(), ctypes.byref(params)
        )
        if status != 0:
            raise RuntimeError(f"llama.cpp cannot write {unfinished}: status {status}")
        unfinished.rename(out)
    return out
