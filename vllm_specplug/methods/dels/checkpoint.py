# SPDX-License-Identifier: Apache-2.0
"""Reads and writes local heads: folders of this project and files released with DeLS-Spec.

A folder holds `config.json` and `model.safetensors`. A released `.pt` file is a pickle. The reader
loads it in weights-only mode and checks it. A `<name>.json` beside it may set the fusion weights.
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch

from vllm_specplug.drafting.checkpoint_files import (
    WEIGHTS_NAME,
    HeadTables,
    check_finite,
    check_tensors,
    load_module,
    module_shapes,
    read_json_object,
    read_safetensors,
    save_head,
)
from vllm_specplug.drafting.head_config import config_field
from vllm_specplug.drafting.pickle_files import check_plain, load_pickle
from vllm_specplug.methods.local.head import LocalHead, LocalHeadConfig

CONFIG_NAME = "config.json"
RELEASED_NAMES = (
    "local_head.pt",
    "merged_rnn_local_head.pt",
    "merged_markov_local_head.pt",
    "markov_local_head.pt",
)
FORMAT = "specplug_local_head"
# Classes in "args" of training scripts' checkpoints. They have no behaviour.
_SAFE_GLOBALS = [argparse.Namespace, pathlib.PosixPath, pathlib.PurePosixPath]
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
# Fields of the config that tensors do not tell.
_FUSION = ("alpha", "beta", "anchor_input")
# Tensor names of released files, and this package's names.
_RENAMED = {
    "embedding_weight": "embed_tokens.weight",
    "lm_head_weight": "low_rank_lm_head.weight",
    "down_proj": "input_proj.weight",
    "down_proj.weight": "input_proj.weight",
    "up_proj": "rank_to_hidden.weight",
    "up_proj.weight": "rank_to_hidden.weight",
}


def load_local_head(path: str | Path, target_config: Any) -> tuple[LocalHead, torch.Tensor | None]:
    """Reads a local head and checks it against its target.

    Args:
        path: a folder of this package, a `.safetensors` file with its JSON file, a released `.pt`
            file, or a folder with one.
        target_config: the target's text config; a mapping or an object with `hidden_size` and
            `vocab_size`.

    Returns:
        The head, and the target id of each row of its output table int64 [V']; None for the whole
        vocabulary in order.

    Raises:
        ValueError: for another target's head, a missing, unexpected or misshapen tensor, and
            files that cannot be read safely.
    """
    config, tensors = _read(path, target_config, headers_only=False)
    head = load_module(lambda: LocalHead(config), tensors)
    return head, HeadTables.of(tensors, config.vocab_size).target_ids


def inspect_local_head(path: str | Path, target_config: Any) -> LocalHeadConfig:
    """Checks a local head from its config and tensor headers, with the errors of `load_local_head`.

    It also reads the values of a released `.pt` file.
    """
    return _read(path, target_config, headers_only=True)[0]


def save_local_head(
    directory: str | Path,
    head: LocalHead,
    *,
    target_ids: torch.Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Path:
    """Writes a head, which `load_local_head` reads back; see `save_head`.

    `target_ids` int64 [V'] is required if the head scores a part of the vocabulary.
    """
    config = head.config
    assert (target_ids is not None) == (config.draft_vocab_size < config.vocab_size)
    return save_head(
        directory,
        head.state_dict(),
        {"format": FORMAT, **asdict(config)},
        target_ids=target_ids,
        dtype=dtype,
    )


def check_kind(kind: object, slot_size: object = 0) -> None:
    """Raises ValueError for a local head that only exists as a part of a block head."""
    for name, value, legal in (("kind", kind, ("gru", "markov")), ("slot_size", slot_size, (0,))):
        if value not in legal:
            raise ValueError(
                f"local head config: {name} = {repr(value)[:200]}, legal: one of {legal}; other "
                "local heads are parts of a block head, serve the block head with method "
                "dspark_tree"
            )


def resolve_local_head(path: str | Path) -> Path:
    """Returns the weights file of `path`.

    Raises:
        ValueError: if there is none, or more than one.
    """
    path = Path(path).expanduser()
    if path.is_file():
        if path.suffix not in (".safetensors", ".pt"):
            raise ValueError(
                f"local head {str(path)!r} is neither .safetensors nor .pt; give the folder of a "
                "trained local head or a released local_head.pt"
            )
        return path
    if not path.is_dir():
        raise ValueError(
            f"local head {str(path)!r}: there is no such file or folder; give the folder of a "
            "trained local head or a released local_head.pt"
        )
    if (path / WEIGHTS_NAME).is_file():
        return path / WEIGHTS_NAME
    released = [path / name for name in RELEASED_NAMES if (path / name).is_file()]
    if len(released) == 1:
        return released[0]
    found = sorted(p.name for p in path.iterdir())
    raise ValueError(
        f"local head {str(path)!r} holds {found}, legal: {WEIGHTS_NAME} with {CONFIG_NAME}, or one "
        f"of {', '.join(RELEASED_NAMES)}; name the file to be used"
    )


def _read(
    path: str | Path, target: Any, *, headers_only: bool
) -> tuple[LocalHeadConfig, dict[str, torch.Tensor]]:
    file = resolve_local_head(path)
    if file.suffix == ".pt":
        return _released(file, target)
    beside = file.parent / CONFIG_NAME
    config_file = beside if file.name == WEIGHTS_NAME else file.with_suffix(".json")
    config = _read_config(config_file)
    tensors = read_safetensors([file], headers_only=headers_only)
    _check(file, config, tensors, target)
    return config, tensors


def _read_config(file: Path) -> LocalHeadConfig:
    if not file.is_file():
        raise ValueError(f"local head: {str(file)!r} is missing; it belongs with the weights")
    raw = read_json_object(file, "a config")
    if raw.get("format") != FORMAT:
        raise ValueError(
            f"{file} does not describe a local head (format = "
            f"{raw.get('format')!r}, legal: {FORMAT!r}); "
            "give a folder written by `specplug train dels` or a released local_head.pt"
        )
    names = {field.name for field in fields(LocalHeadConfig)}
    unknown = sorted(set(raw) - names - {"format"})
    missing = sorted({"kind", "vocab_size", "target_hidden_size", "rank"} - set(raw))
    if unknown or missing:
        raise ValueError(
            f"{file}: unknown keys {unknown}, missing keys {missing}; the file was written by "
            "another version; train the head again, or name the released .pt file"
        )
    check_kind(raw["kind"], raw.get("slot_size", 0))
    return LocalHeadConfig(**{name: raw[name] for name in names if name in raw})


def _released(file: Path, target: Any) -> tuple[LocalHeadConfig, dict[str, torch.Tensor]]:
    """Returns the head in a released pickle."""
    raw = load_pickle(file, f"local head {str(file)!r}", _SAFE_GLOBALS)
    config, tensors = _from_released(file, raw, target)
    beside = file.with_suffix(".json")
    if beside.is_file():
        stated = read_json_object(beside, "a config")
        config = replace(config, **{name: stated[name] for name in _FUSION if name in stated})
    _check(file, config, tensors, target)
    check_finite(tensors)
    return config, tensors


def _from_released(
    file: Path, raw: Mapping[str, Any], target: Any
) -> tuple[LocalHeadConfig, dict[str, torch.Tensor]]:
    """Returns config and tensors of a released file; the tensors tell most of the config."""
    state = raw.get("model_state_dict")
    loose = {name: value for name, value in raw.items() if isinstance(value, torch.Tensor)}
    stated = {**(state if isinstance(state, Mapping) else {}), **loose}
    _check_matrices(file, stated)
    if "position_gates" in stated:
        raise ValueError(
            f"local head {str(file)!r} is a joint checkpoint with position gates; legal: only a "
            "local head. Save its local_head_model.* tensors, and write the gates as alpha and "
            f"beta into {file.with_suffix('.json').name} beside them"
        )
    said = raw.get("model_config") or {}
    said = said if isinstance(said, Mapping) else {}
    hidden = int(config_field(target, "hidden_size"))
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in stated.items():
        name = _RENAMED.get(name, name)
        if name == "input_proj.weight" and tensor.shape[0] == hidden != tensor.shape[1]:
            tensor = tensor.t()
        if name == "rank_to_hidden.weight" and tensor.shape[1] == hidden != tensor.shape[0]:
            tensor = tensor.t()
        tensors[name] = tensor.contiguous()
    output = tensors.get("low_rank_lm_head.weight", tensors.get("rank_to_hidden.weight"))
    if output is None:
        raise ValueError(
            f"local head {str(file)!r} has the tensors {sorted(stated)}, legal: an output of low "
            "rank ('low_rank_lm_head.weight', 'rank_to_hidden.weight', 'lm_head_weight' or "
            "'up_proj'); this is not a local head"
        )
    direct = "embed_tokens.weight" in tensors
    low_rank = "low_rank_lm_head.weight" in tensors
    gru = tensors.get("prefix_gru.weight_hh_l0")
    recurrent = tensors.get("prefix_gru.weight_ih_l0")
    for source in (said, raw):
        for name in ("vocab_size", "target_hidden_size", "embed_dim"):
            value = source.get(name)
            if not (value is None or isinstance(value, int)):
                raise ValueError(
                    f"local head {str(file)!r}: {name} = {repr(value)[:100]}, legal: an integer; "
                    "the file is damaged or no local head"
                )
    vocab = said.get("vocab_size") or raw.get("vocab_size")
    if vocab is None and (low_rank or direct):
        vocab = tensors["low_rank_lm_head.weight"] if low_rank else tensors["embed_tokens.weight"]
        vocab = vocab.shape[0]
    stated_hidden = said.get("target_hidden_size")
    if stated_hidden is None and not direct:
        stated_hidden = said.get("embed_dim")
    return (
        LocalHeadConfig(
            kind="markov" if gru is None else "gru",
            vocab_size=int(vocab or config_field(target, "vocab_size")),
            target_hidden_size=int(stated_hidden or hidden),
            rank=output.shape[1],
            hidden_size=0 if gru is None else gru.shape[1],
            input_size=output.shape[1] if recurrent is None else recurrent.shape[1],
            draft_vocab_size=output.shape[0] if low_rank else 0,
            parameterization="direct_vocab" if direct else "target_factorized",
            lm_head_mode="low_rank" if low_rank else "target_lm_head",
            rank_activation=said.get("rank_activation") or "silu",
        ),
        tensors,
    )


def _check_matrices(file: Path, stated: Mapping[str, Any]) -> None:
    """Raises ValueError unless every tensor is a floating-point matrix."""
    what = f"local head {str(file)!r}"
    check_plain(file, what, stated)
    for name, tensor in stated.items():
        if tensor.dim() != 2 or tensor.dtype not in _DTYPES:
            raise ValueError(
                f"{what}: tensor {name!r} is {tensor.dtype} {list(tensor.shape)}, legal: a matrix "
                "of bfloat16, float16, float32 or float64; this is not a local head"
            )


def _check(
    file: Path, config: LocalHeadConfig, tensors: Mapping[str, torch.Tensor], target: Any
) -> None:
    remedy = "this local head was trained for another target; use one made for this model"
    vocab, hidden = (int(config_field(target, name)) for name in ("vocab_size", "hidden_size"))
    if config.vocab_size != vocab:
        raise ValueError(
            f"local head {str(file)!r}: vocab_size = {config.vocab_size}, legal: {vocab} (the "
            f"target's); {remedy}"
        )
    uses_target = (
        config.parameterization == "target_factorized" or config.lm_head_mode == "target_lm_head"
    )
    if uses_target and config.target_hidden_size != hidden:
        raise ValueError(
            f"local head {str(file)!r}: target_hidden_size = {config.target_hidden_size}, legal: "
            f"{hidden} (the size of the target's embeddings, which it reads); {remedy}"
        )
    expected = module_shapes(lambda: LocalHead(config))
    if config.draft_vocab_size < config.vocab_size:
        expected["d2t"] = (config.draft_vocab_size,)
    check_tensors(f"local head {str(file)!r}", expected, tensors)
