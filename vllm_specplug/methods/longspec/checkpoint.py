# SPDX-License-Identifier: Apache-2.0
"""Reads and writes LongSpec draft layers (safetensors only), with strict checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from vllm_specplug.drafting.checkpoint_files import (
    HeadTables,
    check_tensors,
    load_module,
    module_shapes,
    save_head,
)
from vllm_specplug.methods.block.checkpoint import read_tensors
from vllm_specplug.methods.longspec.config import LongSpecConfig
from vllm_specplug.methods.longspec.head import LongSpecHead

# The published code creates these tensors and never uses them.
_UNUSED = (
    "cross_attn.k_proj.weight",
    "cross_attn.k_proj.bias",
    "cross_attn.v_proj.weight",
    "cross_attn.v_proj.bias",
)


def load_longspec_head(
    directory: str | Path, target_config: Any
) -> tuple[LongSpecHead, torch.Tensor | None]:
    """Reads a draft layer and checks it against its target.

    It reads published layouts and this project's own: the tensors of one layer, with or without a
    prefix `model.`, `layers.0.` or `model.layers.0.`; `norm.weight` and `d2t` are optional.

    Returns:
        The layer, and the target token of each draft id int64 [V']; None for the full vocabulary.

    Raises:
        ValueError: for another target's head, missing, unexpected or misshapen tensors (all in one
            message), pickled weights, missing files.
    """
    config, tensors = _inspect(Path(directory), target_config, headers_only=False)
    head = load_module(lambda: LongSpecHead(config), tensors)
    return head, HeadTables.of(tensors, config.vocab_size).target_ids


def inspect_longspec_head(directory: str | Path, target_config: Any) -> LongSpecConfig:
    """Checks a head from its config and tensor headers; raises as `load_longspec_head`."""
    return _inspect(Path(directory), target_config, headers_only=True)[0]


def save_longspec_head(
    directory: str | Path,
    head: LongSpecHead,
    *,
    target_ids: torch.Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Path:
    """Writes a draft layer; see `save_head`."""
    return save_head(
        directory, head.state_dict(), head.config.to_dict(), target_ids=target_ids, dtype=dtype
    )


def _inspect(
    directory: Path, target_config: Any, headers_only: bool
) -> tuple[LongSpecConfig, dict[str, torch.Tensor]]:
    config = LongSpecConfig.from_pretrained(directory)
    tensors = {
        name.removeprefix("layers.0."): tensor
        for name, tensor in read_tensors(directory, headers_only=headers_only).items()
    }
    # The tensors decide what a config may leave out.
    config = replace(
        config,
        final_norm="norm.weight" in tensors,
        attention_bias="self_attn.q_proj.bias" in tensors,
    ).on_target(target_config)
    _check_tensors(directory, config, tensors)
    return config, tensors


def _check_tensors(
    directory: Path, config: LongSpecConfig, tensors: Mapping[str, torch.Tensor]
) -> None:
    expected = module_shapes(lambda: LongSpecHead(config))
    if config.draft_vocab_size < config.vocab_size:
        expected["d2t"] = (config.draft_vocab_size,)
    check_tensors(f"draft head {str(directory)!r}", expected, tensors, ignored=_UNUSED)
