# SPDX-License-Identifier: Apache-2.0
"""Reading and writing LongSpec draft layers (safetensors only), with strict checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from vllm_specplug.drafting.checkpoint_files import (
    WEIGHTS_NAME,
    check_tensors,
    draft_token_ids,
    module_shapes,
    tensors_to_save,
    write_checkpoint,
)
from vllm_specplug.methods.block.checkpoint import read_tensors
from vllm_specplug.methods.longspec.config import LongSpecConfig
from vllm_specplug.methods.longspec.head import LongSpecHead

# The published code creates these and never uses them.
_UNUSED = (
    "cross_attn.k_proj.weight",
    "cross_attn.k_proj.bias",
    "cross_attn.v_proj.weight",
    "cross_attn.v_proj.bias",
)


@dataclass(frozen=True)
class LongSpecExtras:
    """`target_ids` int64 [draft_vocab]: target token of each draft id; None for the whole
    vocabulary."""

    target_ids: torch.Tensor | None = None


def load_longspec_head(
    directory: str | Path, target_config: Any, *, dtype: torch.dtype | None = None
) -> tuple[LongSpecHead, LongSpecExtras]:
    """Reads a draft layer and checks it against its target.

    Published layouts and this project's own are read: the tensors of one layer, with or without a
    `model.`, `layers.0.` or `model.layers.0.` prefix; `norm.weight` and `d2t` are optional.

    Raises:
        ValueError: for a head that is not this target's, tensors that are missing, unexpected or
            misshapen (all in one message), pickled weights, missing files.
    """
    config, tensors = _inspect(Path(directory), target_config, headers_only=False)
    with torch.device("meta"):
        head = LongSpecHead(config)
    head.load_state_dict(
        {
            name: tensors[name] if dtype is None else tensors[name].to(dtype)
            for name in head.state_dict()
        },
        assign=True,
    )
    head.requires_grad_(False)
    d2t = tensors.get("d2t")
    if d2t is None:
        return head.eval(), LongSpecExtras()
    return head.eval(), LongSpecExtras(draft_token_ids(d2t, config.vocab_size))


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
    """Writes config.json and model.safetensors, each replaced atomically; returns the latter."""
    directory = Path(directory)
    tensors = tensors_to_save(head.state_dict(), dtype)
    if target_ids is not None:
        d2t = target_ids.to("cpu", torch.int64) - torch.arange(len(target_ids))
        draft_token_ids(d2t, head.config.vocab_size)
        tensors["d2t"] = d2t
    return write_checkpoint(
        directory / WEIGHTS_NAME, directory / "config.json", tensors, head.config.to_dict()
    )


def _inspect(
    directory: Path, target_config: Any, headers_only: bool
) -> tuple[LongSpecConfig, dict[str, torch.Tensor]]:
    if not directory.is_dir():
        raise ValueError(
            f"draft head {str(directory)!r} is not a folder; give the path of a folder with "
            "config.json and model.safetensors"
        )
    config = LongSpecConfig.from_pretrained(directory)
    tensors = {
        name.removeprefix("layers.0."): tensor
        for name, tensor in read_tensors(directory, headers_only=headers_only).items()
    }
    # What the checkpoint holds decides where a config can only guess.
    config = replace(
        config,
        final_norm="norm.weight" in tensors,
        attention_bias="self_attn.q_proj.bias" in tensors,
    )
    config.check_target(target_config)
    _check_tensors(directory, config, tensors)
    return config, tensors


def _check_tensors(
    directory: Path, config: LongSpecConfig, tensors: Mapping[str, torch.Tensor]
) -> None:
    expected = module_shapes(lambda: LongSpecHead(config))
    if config.draft_vocab_size < config.vocab_size:
        expected["d2t"] = (config.draft_vocab_size,)
    check_tensors(f"draft head {str(directory)!r}", expected, tensors, ignored=_UNUSED)
