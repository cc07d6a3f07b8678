# SPDX-License-Identifier: Apache-2.0
"""Reads and writes block head checkpoints (safetensors only), with strict checks."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch

from vllm_specplug.drafting.checkpoint_files import (
    WEIGHTS_NAME,
    HeadTables,
    check_tensors,
    load_module,
    module_shapes,
    read_safetensors,
    save_head,
    weight_files,
)
from vllm_specplug.drafting.head_config import (
    OTHER_TARGET,
    check_target,
    check_target_layers,
    config_field,
)
from vllm_specplug.methods.block.config import BlockHeadConfig
from vllm_specplug.methods.block.head import BlockHead
from vllm_specplug.methods.block.speculators_format import (
    HeadTarget,
    smaller_vocabulary,
    token_mask,
)

logger = logging.getLogger(__name__)

Config = TypeVar("Config", bound=BlockHeadConfig)
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True)
class BlockHeadExtras(HeadTables):
    """Tensors of a checkpoint other than those of the layers.

    `extra` holds `config.extra_tensors`.
    `mask_from_embedding` says that the caller must copy the embedding row of
    `config.mask_token_id` into `head.mask_embedding`.
    """

    mask_from_embedding: bool = False
    extra: Mapping[str, torch.Tensor] = field(default_factory=dict)


def load_block_head(
    directory: str | Path,
    target_config: Any,
    kind: type[BlockHeadConfig] = BlockHeadConfig,
) -> tuple[BlockHead, BlockHeadExtras]:
    """Reads a z-lab/JetSpec or speculators head and checks it against its target.

    Args:
        directory: folder with config.json and safetensors (one file, or an index and its shards).
        target_config: the target's text config; a mapping or an object with `hidden_size`,
            `vocab_size`, `num_hidden_layers`.
        kind: class of the method's configs.

    Raises:
        ValueError: for another target's head, missing, unexpected or misshapen tensors (all of
            them in one message), pickled weights, missing files.
    """
    directory = Path(directory)
    # Headers first: weights of a checkpoint that does not fit are not read.
    config = inspect_block_head(directory, target_config, kind)
    tensors = read_tensors(directory, renamed=config.renamed_tensors)
    if "d2t" not in tensors and config.draft_vocab_size < config.vocab_size:
        raise ValueError(
            f"draft head {str(directory)!r}: draft_vocab_size = {config.draft_vocab_size} is "
            f"smaller than vocab_size = {config.vocab_size} but the tensor 'd2t' is missing; use a "
            "checkpoint that ships the map"
        )
    embed_tokens = tensors.get("embed_tokens.weight")
    mask_from_embedding = False
    if "mask_embedding" not in tensors:
        assert config.mask_token_id is not None
        row = torch.zeros(config.hidden_size, dtype=tensors["norm.weight"].dtype)
        if embed_tokens is not None:
            row = embed_tokens[config.mask_token_id].to(row.dtype)
        tensors["mask_embedding"], mask_from_embedding = row, embed_tokens is None
    head = load_module(lambda: BlockHead(config), tensors)
    return head, BlockHeadExtras.of(
        tensors,
        config.vocab_size,
        mask_from_embedding=mask_from_embedding,
        extra={name: tensors[name] for name in config.extra_tensors},
    )


def inspect_block_head(
    directory: str | Path,
    target_config: Any,
    kind: type[Config] = BlockHeadConfig,  # type: ignore[assignment]
) -> Config:
    """Checks a head against its target from its config and tensor headers, without the weights.

    Arguments and errors are those of `load_block_head`.
    """
    directory = Path(directory)
    layers = int(config_field(target_config, "num_hidden_layers"))
    config = kind.from_pretrained(directory, num_target_layers=layers)
    shapes = read_tensors(directory, headers_only=True, renamed=config.renamed_tensors)
    _check_target(config, target_config, shapes)
    _check_tensors(directory, config, shapes)
    return config


def log_unused_parts(directory: Path, config: BlockHeadConfig) -> None:
    """Logs the folders of a JetSpec++ checkpoint that are not used."""
    if config.causal and all((directory / name).is_dir() for name in ("adapter", "calibration")):
        logger.info(
            "%s: adapter/ and calibration/ are not used. The block head drafts as a JetSpec head, "
            "so JetSpec++'s published acceptance does not apply",
            directory,
        )


def save_block_head(
    directory: str | Path,
    head: BlockHead,
    *,
    config: BlockHeadConfig | None = None,
    extra: Mapping[str, torch.Tensor] = MappingProxyType({}),
    target: HeadTarget | None = None,
    target_ids: torch.Tensor | None = None,
    lm_head: torch.Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Path:
    """Writes a head with z-lab's key names plus `mask_embedding` and `d2t`; see `save_head`.

    Args:
        config: of the method's heads, with the tensors `extra`.
        target: write the format of speculators, with the LM head [V', H] `lm_head` if the draft
            vocabulary is reduced.
    """
    config = config or head.config
    tensors = {**head.state_dict(), **extra}
    if target is None:
        fields = config.to_dict()
    else:
        fields = config.to_speculators(target)
        del tensors["mask_embedding"]  # the target's row
        target_ids = smaller_vocabulary(target_ids, config.vocab_size)
        if target_ids is not None:
            assert lm_head is not None
            # Release 0.9.0 leaves an LM head that is missing uninitialised.
            tensors["lm_head.weight"] = lm_head
            tensors["t2d"] = token_mask(target_ids, config.vocab_size)
    return save_head(directory, tensors, fields, target_ids=target_ids, dtype=dtype)


def read_tensors(
    directory: Path,
    headers_only: bool = False,
    prefixes: tuple[str, ...] = ("",),
    renamed: Mapping[str, str] = MappingProxyType({}),
    dtype: torch.dtype = torch.float32,
) -> dict[str, torch.Tensor]:
    """Returns all tensors of a folder by name, without an optional prefix 'model.'.

    With `headers_only` they are meta tensors: names and shapes, no data. `renamed` replaces names.
    See `read_safetensors` for `prefixes` and `dtype`.
    """
    files = weight_files(directory)
    pickles = sorted(p.name for p in directory.iterdir() if p.suffix in _PICKLE_SUFFIXES)
    if not files:
        if pickles:
            raise ValueError(
                f"draft head {str(directory)!r} holds pickled weights {pickles}; legal: "
                "safetensors. "
                "Pickles can run code when loaded; convert them once where you trust them with "
                "torch.load(..., weights_only=True) and safetensors.torch.save_file"
            )
        raise ValueError(
            f"draft head {str(directory)!r} has no *.safetensors file; fetch {WEIGHTS_NAME}"
        )
    if "mask_embedding.pt" in pickles:
        raise ValueError(
            f"draft head {str(directory)!r} ships 'mask_embedding.pt', a pickle; legal: a tensor "
            "'mask_embedding' [H] in the safetensors file. Convert it once where you trust it with "
            "torch.load(..., weights_only=True)"
        )
    tensors = read_safetensors(files, headers_only=headers_only, prefixes=prefixes, dtype=dtype)
    for name, renamed_to in renamed.items():
        if name in tensors and renamed_to in tensors:
            raise ValueError(
                f"draft head {str(directory)!r}: tensor {name!r} is given twice, also as "
                f"{renamed_to!r}; fetch the head again"
            )
    return {renamed.get(name, name): tensor for name, tensor in tensors.items()}


def _check_target(
    config: BlockHeadConfig, target: Any, tensors: Mapping[str, torch.Tensor]
) -> None:
    check_target(config, target)
    check_target_layers(config.target_layer_ids, target)
    own_tables = "lm_head.weight" in tensors and "embed_tokens.weight" in tensors
    if config.hidden_size != config.target_hidden_size and not own_tables:
        raise ValueError(
            f"draft head config: hidden_size = {config.hidden_size}, legal: "
            f"{config.target_hidden_size} (the target's, whose embedding and LM head are shared) "
            f"unless the checkpoint ships embed_tokens and lm_head; {OTHER_TARGET}"
        )
    mask = config.mask_token_id
    if "mask_embedding" not in tensors and (mask is None or not 0 <= mask < config.vocab_size):
        raise ValueError(
            f"draft head config: mask_token_id = {mask}, legal: 0..{config.vocab_size - 1}, or a "
            f"tensor 'mask_embedding' [{config.hidden_size}] in the checkpoint; {OTHER_TARGET}"
        )


def _check_tensors(
    directory: Path, config: BlockHeadConfig, tensors: Mapping[str, torch.Tensor]
) -> None:
    expected = {**module_shapes(lambda: BlockHead(config)), **config.extra_tensors}
    optional = {
        "mask_embedding": (config.hidden_size,),
        "d2t": (config.draft_vocab_size,),
        "t2d": (config.vocab_size,),
        "lm_head.weight": (config.draft_vocab_size, config.hidden_size),
        "embed_tokens.weight": (config.vocab_size, config.hidden_size),
    }
    what = f"draft head {str(directory)!r}"
    check_tensors(what, {**expected, **optional}, tensors, optional=optional)
