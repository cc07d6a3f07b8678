# SPDX-License-Identifier: Apache-2.0
"""Reads and writes EAGLE-3 heads in every layout of their trainers, with strict checks."""

from __future__ import annotations

import re
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
from vllm_specplug.drafting.head_config import (
    OTHER_TARGET,
    check_target,
    check_target_layers,
    config_field,
)
from vllm_specplug.methods.block.checkpoint import read_tensors
from vllm_specplug.methods.block.speculators_format import (
    HeadTarget,
    smaller_vocabulary,
    token_mask,
)
from vllm_specplug.methods.eagle3_tree.config import (
    AUX_LAYERS_KEY,
    MASK_TOKEN,
    NAME_LAYERS,
    Eagle3Config,
)
from vllm_specplug.methods.eagle3_tree.head import Eagle3Head
from vllm_specplug.methods.eagle3_tree.released import IGNORED, is_pickled, read_pickled

# Some trainers save the other biases without this one.
_OUTPUT_BIAS = "layers.0.self_attn.o_proj.bias"


def load_eagle3_head(directory: str | Path, target_config: Any) -> tuple[Eagle3Head, HeadTables]:
    """Reads a head and checks it against its target.

    Args:
        directory: folder with config.json and safetensors, or pytorch_model.bin, which is read in
            weights-only mode.
        target_config: the target's text config.

    Raises:
        ValueError: for another target's head or another kind of head, missing, unexpected or
            misshapen tensors (all in one message), missing files.
    """
    directory = Path(directory)
    # Headers first: weights of a checkpoint that does not fit are not read.
    config = inspect_eagle3_head(directory, target_config)
    tensors = _read(directory, headers_only=False)
    if config.attention_bias and _OUTPUT_BIAS not in tensors:
        tensors[_OUTPUT_BIAS] = torch.zeros_like(tensors["norm.weight"])
    head = load_module(lambda: Eagle3Head(config), tensors)
    return head, HeadTables.of(tensors, config.vocab_size)


def inspect_eagle3_head(directory: str | Path, target_config: Any) -> Eagle3Config:
    """Checks a head from its config and tensor headers, without the weights.

    Arguments and errors are those of `load_eagle3_head`.
    """
    directory = Path(directory)
    layers = int(config_field(target_config, "num_hidden_layers"))
    config = Eagle3Config.from_pretrained(directory, num_target_layers=layers)
    tensors = _read(directory, headers_only=True)
    if "mask_hidden" in tensors and config.mask_token_id is None:
        raise ValueError(
            f"draft head {str(directory)!r} holds the tensor 'mask_hidden' of P-EAGLE heads, and "
            f"its config names no mask token: set mask_token_id in config.json to {MASK_TOKEN}"
        )
    # The tensors tell what a config does not.
    config = replace(
        config,
        qk_norm="layers.0.self_attn.q_norm.weight" in tensors,
        attention_bias="layers.0.self_attn.q_proj.bias" in tensors,
    )
    check_target(config, target_config)
    check_target_layers(config.target_layer_ids, target_config, f"{OTHER_TARGET}, or {NAME_LAYERS}")
    _check_columns(directory, config, tensors)
    _check_tensors(directory, config, tensors)
    return config


def save_eagle3_head(
    directory: str | Path,
    head: Eagle3Head,
    *,
    target_ids: torch.Tensor | None = None,
    lm_head: torch.Tensor | None = None,
    embed_tokens: torch.Tensor | None = None,
    target: HeadTarget | None = None,
    depth: int = 1,
    dtype: torch.dtype = torch.bfloat16,
) -> Path:
    """Writes a head with the names of the public trainers; see `save_head`.

    With `lm_head` [V', H], vLLM's own method can read it too.

    Args:
        target: write the format of speculators, which needs `lm_head` and `embed_tokens`.
        depth: for that format, tokens that the head was trained to draft in a row.
    """
    config = head.config
    if target is None:
        fields, prefix = config.to_dict(), "midlayer."
    else:
        fields, prefix = config.to_speculators(target, depth), "layers.0."
        target_ids = smaller_vocabulary(target_ids, config.vocab_size)
    tensors = {
        re.sub(r"^layers\.0\.", prefix, name): tensor for name, tensor in head.state_dict().items()
    }
    if lm_head is not None:
        tensors["lm_head.weight"] = lm_head
    if embed_tokens is not None:
        tensors["embed_tokens.weight"] = embed_tokens
    if target_ids is not None:
        tensors["t2d"] = token_mask(target_ids, config.vocab_size)
    return save_head(directory, tensors, fields, target_ids=target_ids, dtype=dtype)


def _read(directory: Path, headers_only: bool) -> dict[str, torch.Tensor]:
    """Returns all tensors under the names of `Eagle3Head`; without data with `headers_only`."""
    read = read_pickled if is_pickled(directory) else read_tensors
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in read(directory, headers_only=headers_only).items():
        plain_name = re.sub(r"^midlayer\.", "layers.0.", name)
        if plain_name in tensors:
            raise ValueError(
                f"draft head {str(directory)!r}: tensor {name!r} is given twice, as 'midlayer.' "
                "and as 'layers.0.'; fetch the head again"
            )
        # Trainers disagree on its leading dimensions of size 1.
        tensors[plain_name] = tensor.flatten() if name == "mask_hidden" else tensor
    return tensors


def _check_columns(
    directory: Path, config: Eagle3Config, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Refuses a config that states another number of layers than the head reads."""
    shape = tensors["fc.weight"].shape if "fc.weight" in tensors else ()
    if len(shape) != 2 or shape[1] == config.feature_size or shape[1] % config.target_hidden_size:
        return
    reads = shape[1] // config.target_hidden_size
    raise ValueError(
        f"draft head {str(directory)!r} reads {reads} layers of the target ('fc.weight' has "
        f"{shape[1]} columns), and its config states {len(config.target_layer_ids)}: "
        f"{AUX_LAYERS_KEY}; {NAME_LAYERS}"
    )


def _check_tensors(
    directory: Path, config: Eagle3Config, tensors: Mapping[str, torch.Tensor]
) -> None:
    expected = module_shapes(lambda: Eagle3Head(config))
    optional: dict[str, tuple[int, ...]] = {
        "lm_head.weight": (config.draft_vocab_size, config.hidden_size),
        "embed_tokens.weight": (config.vocab_size, config.hidden_size),
    }
    reduced = config.draft_vocab_size < config.vocab_size
    (expected if reduced else optional)["d2t"] = (config.draft_vocab_size,)
    if config.hidden_size != config.target_hidden_size:
        # The target's tables do not fit.
        expected.update(optional)
        optional = {}
    check_tensors(
        f"draft head {str(directory)!r}",
        {**expected, **optional},
        tensors,
        optional=(*optional, _OUTPUT_BIAS),
        ignored=[name for name in tensors if IGNORED.fullmatch(name)],
    )
