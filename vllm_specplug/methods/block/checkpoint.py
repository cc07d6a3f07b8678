# SPDX-License-Identifier: Apache-2.0
"""Reading and writing block head checkpoints (safetensors only), with strict checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from vllm_specplug.drafting.checkpoint_files import (
    WEIGHTS_NAME,
    check_tensors,
    draft_token_ids,
    module_shapes,
    read_safetensors,
    tensors_to_save,
    weight_files,
    write_checkpoint,
)
from vllm_specplug.drafting.head_config import config_field
from vllm_specplug.methods.block.config import BlockHeadConfig
from vllm_specplug.methods.block.head import BlockHead

_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True)
class BlockHeadExtras:
    """What a checkpoint ships beside the layers.

    `d2t` int64 [draft_vocab]: target id of draft id i is i + d2t[i]; None for the full vocabulary.
    `lm_head` [draft_vocab, H] and `embed_tokens` [V, H] are None where the target's are used.
    `beside` holds what the method asked for beyond a block head.
    `mask_from_embedding` says that the caller must copy the embedding row of
    `config.mask_token_id` into `head.mask_embedding`.
    """

    d2t: torch.Tensor | None = None
    lm_head: torch.Tensor | None = None
    embed_tokens: torch.Tensor | None = None
    mask_from_embedding: bool = False
    beside: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def target_ids(self, draft_vocab_size: int) -> torch.Tensor:
        """Target token id of every draft id, int64 [draft_vocab]."""
        ids = torch.arange(draft_vocab_size, dtype=torch.int64)
        return ids if self.d2t is None else ids + self.d2t


def load_block_head(
    directory: str | Path,
    target_config: Any,
    *,
    causal: bool | None = None,
    dtype: torch.dtype | None = None,
    config: BlockHeadConfig | None = None,
    beside: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
    renamed: Mapping[str, str] = MappingProxyType({}),
) -> tuple[BlockHead, BlockHeadExtras]:
    """Reads a z-lab/JetSpec or speculators head and checks it against its target.

    Args:
        directory: folder with config.json and safetensors (one file, or an index and its shards).
        target_config: the target's text config; a mapping or an object with `hidden_size`,
            `vocab_size`, `num_hidden_layers`.
        causal: overrides the mask inside a block that the config states.
        dtype: of the returned parameters; the checkpoint's own if None.
        config: what a method that reads config.json by itself made of it.
        beside: shapes of the tensors that such a method has beside the block head's.
        renamed: names that some trainers give to tensors, and the names they are read by.

    Raises:
        ValueError: for a head that is not this target's, tensors that are missing, unexpected or
            misshapen (all of them in one message), pickled weights, missing files.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise ValueError(
            f"draft head {str(directory)!r} is not a folder; give the path of a folder "
            "with config.json and model.safetensors"
        )
    # Headers first: nothing is read of a checkpoint that does not fit.
    config = inspect_block_head(
        directory, target_config, causal=causal, config=config, beside=beside, renamed=renamed
    )
    with torch.device("meta"):
        head = BlockHead(config)
    tensors = read_tensors(directory, renamed=renamed)

    d2t = tensors.get("d2t")
    if d2t is not None:
        draft_token_ids(d2t, config.vocab_size)
        d2t = d2t.to(torch.int64).contiguous()
    elif config.draft_vocab_size < config.vocab_size:
        raise ValueError(
            f"draft head {str(directory)!r}: draft_vocab_size = {config.draft_vocab_size} is "
            f"smaller than vocab_size = {config.vocab_size} but the tensor 'd2t' is missing; use a "
            "checkpoint that ships the map"
        )
    extras = BlockHeadExtras(
        d2t=d2t,
        lm_head=_cast(tensors.get("lm_head.weight"), dtype),
        embed_tokens=_cast(tensors.get("embed_tokens.weight"), dtype),
        mask_from_embedding="mask_embedding" not in tensors,
        beside={name: tensors[name] for name in beside if name in tensors},
    )
    state = {name: tensors[name] for name in head.state_dict() if name in tensors}
    if "mask_embedding" not in state:
        assert config.mask_token_id is not None
        row = torch.zeros(config.hidden_size, dtype=state["norm.weight"].dtype)
        if extras.embed_tokens is not None:
            row = extras.embed_tokens[config.mask_token_id].to(row.dtype)
            extras = replace(extras, mask_from_embedding=False)
        state["mask_embedding"] = row
    state = {name: tensor if dtype is None else tensor.to(dtype) for name, tensor in state.items()}
    head.load_state_dict(state, assign=True)
    head.requires_grad_(False)
    return head.eval(), extras


def inspect_block_head(
    directory: str | Path,
    target_config: Any,
    *,
    causal: bool | None = None,
    config: BlockHeadConfig | None = None,
    beside: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
    renamed: Mapping[str, str] = MappingProxyType({}),
) -> BlockHeadConfig:
    """Checks a head against its target from its config and tensor headers, reading no weights.

    Takes the arguments and raises the errors of `load_block_head`, before anything is started.
    """
    directory = Path(directory)
    if config is None:
        config = BlockHeadConfig.from_pretrained(
            directory,
            num_target_layers=int(config_field(target_config, "num_hidden_layers")),
            causal=causal,
        )
    shapes = read_tensors(directory, headers_only=True, renamed=renamed)
    _check_target(config, target_config, shapes)
    _check_tensors(directory, config, shapes, beside)
    return config


def save_block_head(
    directory: str | Path,
    head: BlockHead,
    *,
    d2t: torch.Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """Writes config.json and model.safetensors (z-lab key names plus `mask_embedding`, `d2t`).

    Both files are replaced atomically, so a reader never sees half a checkpoint. Returns the
    weights' path.
    """
    directory = Path(directory)
    tensors = tensors_to_save(head.state_dict(), dtype)
    if d2t is not None:
        draft_token_ids(d2t.cpu(), head.config.vocab_size)
        tensors["d2t"] = d2t.to("cpu", torch.int64).contiguous()
    return write_checkpoint(
        directory / WEIGHTS_NAME,
        directory / "config.json",
        tensors,
        head.config.to_dict(),
        metadata,
    )


def _cast(tensor: torch.Tensor | None, dtype: torch.dtype | None) -> torch.Tensor | None:
    return tensor if tensor is None or dtype is None else tensor.to(dtype)


def read_tensors(
    directory: Path,
    headers_only: bool = False,
    prefixes: tuple[str, ...] = ("",),
    renamed: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, torch.Tensor]:
    """All tensors of the folder by their name without the optional 'model.' prefix.

    With `headers_only` they are meta tensors: names and shapes, no data. `prefixes`: see
    `read_safetensors`; `renamed`: see `load_block_head`.
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
    tensors = read_safetensors(files, headers_only=headers_only, prefixes=prefixes)
    twice = sorted(name for name, to in renamed.items() if name in tensors and to in tensors)
    if twice:
        raise ValueError(
            f"draft head {str(directory)!r}: tensor {twice[0]!r} is given twice, also as "
            f"{renamed[twice[0]]!r}; fetch the head again"
        )
    return {renamed.get(name, name): tensor for name, tensor in tensors.items()}


def _check_target(
    config: BlockHeadConfig, target: Any, tensors: Mapping[str, torch.Tensor]
) -> None:
    remedy = "this head was trained for another target; use the head made for this model"
    hidden, vocab, layers = (
        int(config_field(target, name))
        for name in ("hidden_size", "vocab_size", "num_hidden_layers")
    )
    if config.target_hidden_size != hidden:
        raise ValueError(
            f"draft head config: target_hidden_size = {config.target_hidden_size}, "
            f"legal: {hidden} (the target's hidden_size); {remedy}"
        )
    own_tables = "lm_head.weight" in tensors and "embed_tokens.weight" in tensors
    if config.hidden_size != hidden and not own_tables:
        raise ValueError(
            f"draft head config: hidden_size = {config.hidden_size}, legal: {hidden} "
            "(the target's, whose embedding and LM head are shared) unless the "
            f"checkpoint ships embed_tokens and lm_head; {remedy}"
        )
    if config.vocab_size != vocab:
        raise ValueError(
            f"draft head config: vocab_size = {config.vocab_size}, legal: {vocab} "
            f"(the target's); {remedy}"
        )
    outside = [i for i in config.target_layer_ids if not 0 <= i < layers]
    if outside:
        raise ValueError(
            f"draft head config: target_layer_ids = {list(config.target_layer_ids)}, "
            f"{outside} outside the legal 0..{layers - 1} (zero-based layers of the "
            f"target); {remedy}"
        )
    mask = config.mask_token_id
    if "mask_embedding" not in tensors and (mask is None or not 0 <= mask < vocab):
        raise ValueError(
            f"draft head config: mask_token_id = {mask}, legal: 0..{vocab - 1}, or a "
            f"tensor 'mask_embedding' [{config.hidden_size}] in the checkpoint; {remedy}"
        )


def _check_tensors(
    directory: Path,
    config: BlockHeadConfig,
    tensors: Mapping[str, torch.Tensor],
    beside: Mapping[str, tuple[int, ...]],
) -> None:
    expected = {**module_shapes(lambda: BlockHead(config)), **beside}
    optional = {
        "mask_embedding": (config.hidden_size,),
        "d2t": (config.draft_vocab_size,),
        "t2d": (config.vocab_size,),
        "lm_head.weight": (config.draft_vocab_size, config.hidden_size),
        "embed_tokens.weight": (config.vocab_size, config.hidden_size),
    }
    what = f"draft head {str(directory)!r}"
    check_tensors(what, {**expected, **optional}, tensors, optional=optional)
