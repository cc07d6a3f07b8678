# SPDX-License-Identifier: Apache-2.0
"""Reads and writes the files of a draft checkpoint. Files are untrusted input.

No length, name or number in a file is trusted. Every refusal is a ValueError that names the file.
No file makes a reader allocate more memory than its own size justifies.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeGuard, TypeVar

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from vllm_specplug.drafting.fp8_weights import (
    INPUT_SCALES,
    SCALE_SUFFIXES,
    Block,
    dequantise,
    scale_shapes,
    stated_blocks,
)
from vllm_specplug.options import is_integer

# A config has some kilobytes, an index of shards some hundred.
MAX_JSON_BYTES = 16 << 20
# Far larger than in any head; torch can still represent a product of two of them.
MAX_SIZE = 1 << 24
WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
# Problems of one kind that a message lists.
_MAX_LISTED = 10
_INTEGER_TENSORS = {
    "d2t": ("I64", "I32"),
    "t2d": ("BOOL", "U8", "I64", "I32"),
    "masked_embedding.token_ordering": ("I64", "I32"),
}
_WEIGHT_DTYPES = ("BF16", "F16", "F32", "F64")
_SCALE_DTYPES = ("BF16", "F16", "F32", "F8_E8M0")
Module = TypeVar("Module", bound=torch.nn.Module)


def is_size(value: object) -> TypeGuard[int]:
    """Returns whether a config's value is an integer from 1 to `MAX_SIZE`."""
    return is_integer(value) and 1 <= value <= MAX_SIZE


def is_positive(value: object) -> bool:
    """Returns whether a config's value is a positive number that is finite as a float."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    # An integer may be larger than any float.
    return 0 < value <= sys.float_info.max


@contextmanager
def open_config(
    directory: str | Path, kind: str = "head", weights: str = WEIGHTS_NAME
) -> Iterator[dict[str, Any]]:
    """Yields the object in `directory/config.json`; errors about its values name the file.

    Raises:
        ValueError: if there is no such file, or it holds no JSON object.
    """
    path = Path(directory) / "config.json"
    if not path.is_file():
        owner = "draft head" if kind == "head" else kind
        raise ValueError(
            f"{owner} {str(directory)!r} has no config.json; give the folder that holds "
            f"config.json and {weights}"
        )
    raw = read_json_object(path, f"a {kind}'s config")
    with config_values(path):
        yield raw


@contextmanager
def config_values(path: Path) -> Iterator[None]:
    """Turns errors from values of unexpected types into a ValueError that names the file."""
    try:
        yield
    except (TypeError, AttributeError, KeyError, ArithmeticError) as error:
        raise ValueError(
            f"{path} holds a value of an illegal type ({str(error)[:200]}); fetch the head again"
        ) from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    for name, count in Counter(name for name, _ in pairs).items():
        if count > 1:
            raise ValueError(f"{name[:100]!r} is given twice")
    return dict(pairs)


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is not a number of JSON")


def read_json_object(path: Path, what: str) -> dict[str, Any]:
    """Returns the JSON object in a file of bounded size.

    Raises:
        ValueError: if the file is too large, not text, not JSON, nested too deep or not an object,
            or if a key is given twice, because readers disagree on which value counts.
    """
    size = path.stat().st_size
    if size > MAX_JSON_BYTES:
        raise ValueError(
            f"{path} has {size} bytes, legal for {what}: at most {MAX_JSON_BYTES}; "
            "fetch the head again"
        )
    try:
        value = json.loads(
            path.read_bytes().decode("utf-8"),
            object_pairs_hook=_unique_keys,
            parse_constant=_no_number,
        )
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}; fetch the head again") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} is not {what}: legal is a JSON object; fetch the head again")
    return value


def shard_files(index: Path) -> list[Path]:
    """Returns the files that an index names; all must be in its folder.

    Raises:
        ValueError: for names outside the folder, missing files, or an illegal map.
    """
    weight_map = read_json_object(index, "an index of shards").get("weight_map")
    if not isinstance(weight_map, Mapping) or not all(
        isinstance(name, str) for name in weight_map.values()
    ):
        raise ValueError(
            f"{index}: weight_map is missing or maps tensors to something other than file names; "
            "fetch the head again"
        )
    names = sorted(set(weight_map.values()))
    # Only names are checked, because the files of a hub cache are links to another folder.
    for name in names:
        if name != Path(name).name or not name.endswith(".safetensors") or "\0" in name:
            raise ValueError(
                f"{index} names the file {name!r}, legal: names of *.safetensors files in the "
                "same folder. Do not use this checkpoint"
            )
    files = [index.parent / name for name in names]
    absent = [path.name for path in files if not path.is_file()]
    if absent:
        raise ValueError(
            f"draft head {str(index.parent)!r}: {index.name} names missing files {absent}; "
            "fetch them"
        )
    return files


def weight_files(directory: Path) -> list[Path]:
    """Returns the safetensors files of a checkpoint: one file, the shards of an index, or all.

    Raises:
        ValueError: for an illegal index.
    """
    single, index = directory / WEIGHTS_NAME, directory / INDEX_NAME
    if single.is_file():
        return [single]
    if index.is_file():
        return shard_files(index)
    return sorted(path for path in directory.glob("*.safetensors") if path.is_file())


@dataclass(frozen=True)
class _Stored:
    """A tensor in a file."""

    path: Path
    full_name: str
    shape: tuple[int, ...]
    dtype: str


def read_safetensors(
    files: Iterable[Path],
    *,
    headers_only: bool = False,
    prefixes: tuple[str, ...] = ("",),
    dtype: torch.dtype = torch.float32,
) -> dict[str, torch.Tensor]:
    """Returns all tensors of `files` by name, without the optional prefix 'model.'.

    Args:
        headers_only: returns meta tensors, which have shapes but no data.
        prefixes: prefixes (without 'model.') of the names to read; some drafts are shipped inside
            their target.
        dtype: of weights that are stored in fp8. Their scales are not returned.

    Raises:
        ValueError: for files that are not safetensors, dtypes that weights never have, fp8 weights
            without legal scales, and values that are not finite.
    """
    stored: dict[str, _Stored] = {}
    for path in files:
        for full_name, header in safetensors_header(path).items():
            name = full_name.removeprefix("model.")
            if not name.startswith(prefixes):
                continue
            if name in stored:
                raise ValueError(
                    f"{path}: tensor {name!r} is given twice, here or in another file of "
                    "this checkpoint; fetch it again"
                )
            stored[name] = _Stored(path, full_name, *header)
    scales = _take_scales(stored)
    for name, part in stored.items():
        if name not in scales:
            _check_dtype(part, name, _INTEGER_TENSORS.get(name, _WEIGHT_DTYPES))
    if headers_only:
        return {name: torch.empty(part.shape, device="meta") for name, part in stored.items()}
    tensors: dict[str, torch.Tensor] = {}
    with ExitStack() as stack:
        parts = (*stored.values(), *(part for part, _ in scales.values()))
        handles = {path: stack.enter_context(_open(path)) for path in {p.path for p in parts}}
        for name, part in stored.items():
            tensor = handles[part.path].get_tensor(part.full_name)
            if name in scales:
                scale, block = scales[name]
                factors = handles[scale.path].get_tensor(scale.full_name).float()
                check_finite({scale.full_name: factors})
                tensor = dequantise(tensor, factors, block, dtype)
                if not tensor.isfinite().all():
                    raise ValueError(
                        f"{part.path}: numbers of the fp8 tensor {name!r} are not finite in "
                        f"{dtype}; serve the target in bfloat16, or fetch the checkpoint again"
                    )
            tensors[name] = tensor
    check_finite(tensors)
    return tensors


def _take_scales(stored: dict[str, _Stored]) -> dict[str, tuple[_Stored, Block]]:
    """Removes the scales of all fp8 weights from `stored`, and returns the scale and block of each.

    Raises:
        ValueError: for missing scales, and scales of another shape or dtype.
    """
    names = [n for n, part in stored.items() if part.dtype == "F8_E4M3" and len(part.shape) > 1]
    config = stored[names[0]].path.parent / "config.json" if names else None
    if config is None or not config.is_file():
        return {}
    raw = read_json_object(config, "a checkpoint's config")
    with config_values(config):
        blocks = stated_blocks(raw)
    found = {}
    for name in names if blocks else ():
        part, legal = stored[name], scale_shapes(stored[name].shape, blocks)
        scale_name = next((name + end for end in SCALE_SUFFIXES if name + end in stored), "")
        scale = stored.pop(scale_name, None)
        if scale is None or scale.shape not in legal:
            given = f"{scale_name} {list(scale.shape)}" if scale else "none"
            raise ValueError(
                f"{part.path}: the scales of the fp8 tensor {name!r} {list(part.shape)} are "
                f"{given}, legal: {name}_scale_inv or {name}_scale of shape "
                f"{' or '.join(str(list(shape)) for shape in legal)}, by the config's "
                "quantization_config. Use the config and weights of one release"
            )
        _check_dtype(scale, scale_name, _SCALE_DTYPES)
        found[name] = scale, legal[scale.shape]
        for end in INPUT_SCALES:
            stored.pop(name.removesuffix("weight") + end, None)
            stored.pop(f"{name}_{end}", None)
    return found


def safetensors_header(path: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Returns shape and dtype of each tensor of a file.

    Raises:
        ValueError: for files that are not safetensors.
    """
    with _open(path) as handle:
        parts = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118
        return {n: (tuple(p.get_shape()), str(p.get_dtype())) for n, p in parts.items()}


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except Exception as error:
        message = f"{path} cannot be read as safetensors ({error}); fetch it again"
        raise ValueError(message) from None


def _check_dtype(part: _Stored, name: str, legal: tuple[str, ...]) -> None:
    if part.dtype not in legal:
        raise ValueError(
            f"{part.path}: tensor {name!r} has dtype {part.dtype}, legal: {', '.join(legal)}; "
            'matrices in F8_E4M3 need a quantization_config with quant_method "fp8", or with 8-bit '
            "floats of compressed-tensors; other quantised or damaged weights cannot be served: "
            "use the head's original weights, and for a target's own module set model to a folder "
            "with the unquantised target"
        )


def check_finite(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises ValueError for a floating-point tensor with NaN or infinities."""
    for name, tensor in tensors.items():
        # A tensor with NaN or infinities has no finite sum, which needs no mask. Finite values may
        # overflow it, so a sum that is not finite is followed by the exact check.
        if tensor.is_floating_point() and not torch.isfinite(tensor.sum(dtype=torch.float32)):
            bad = tensor.numel() - int(torch.isfinite(tensor).sum())
            if bad:
                raise ValueError(
                    f"draft head: tensor {name!r} holds {bad} values that are not finite (NaN or "
                    "infinite); the checkpoint is damaged, fetch it again"
                )


def check_tensors(
    what: str,
    expected: Mapping[str, tuple[int, ...]],
    tensors: Mapping[str, torch.Tensor],
    *,
    optional: Container[str] = (),
    ignored: Container[str] = (),
) -> None:
    """Compares the names and shapes of tensors with those that a checkpoint's config requires.

    Args:
        what: the checkpoint, for the message.
        expected: shape of each tensor by name.
        optional: names of `expected` that may be missing.
        ignored: names that may be present but are never read.

    Raises:
        ValueError: listing missing, unexpected and misshapen tensors, the first ones of each kind.
    """
    missing = [
        f"missing {name} {list(shape)}"
        for name, shape in sorted(expected.items())
        if name not in tensors and name not in optional
    ]
    unexpected = [
        f"unexpected {name} {list(tensor.shape)}"
        for name, tensor in sorted(tensors.items())
        if name not in expected and name not in ignored
    ]
    misshapen = [
        f"misshapen {name}: config says {list(expected[name])}, checkpoint has {list(tensor.shape)}"
        for name, tensor in sorted(tensors.items())
        if name in expected and tuple(tensor.shape) != expected[name]
    ]
    problems = []
    for kind in (missing, unexpected, misshapen):
        problems += kind[:_MAX_LISTED]
        if len(kind) > _MAX_LISTED:
            problems.append(f"and {len(kind) - _MAX_LISTED} more")
    if problems:
        raise ValueError(
            f"{what} does not fit its config: "
            + "; ".join(problems)
            + ". Use the config and weights of one release"
        )


def module_shapes(make: Callable[[], torch.nn.Module]) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each tensor of the module that `make` builds, without allocating it."""
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in make().state_dict().items()}


def load_module(make: Callable[[], Module], tensors: Mapping[str, torch.Tensor]) -> Module:
    """Returns the module that `make` builds, for inference, with parameters from `tensors`."""
    with torch.device("meta"):
        module = make()
    module.load_state_dict({name: tensors[name] for name in module.state_dict()}, assign=True)
    return module.requires_grad_(False).eval()


def draft_token_ids(d2t: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Returns the target token of each draft id, int64 [V']: id i is token i + d2t[i].

    Raises:
        ValueError: for tokens outside the vocabulary, and for a token of two ids.
    """
    ids = d2t.to(torch.int64) + torch.arange(d2t.shape[0])
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"draft head: d2t maps to target ids {low}..{high}, legal: "
            f"0..{vocab_size - 1}; the map belongs to another tokenizer"
        )
    if len(set(ids.tolist())) != ids.numel():
        raise ValueError(
            "draft head: d2t maps two draft ids to one target id; legal: distinct "
            "target ids, since siblings of a tree never repeat a token"
        )
    return ids


@dataclass(frozen=True)
class HeadTables:
    """Tables of a checkpoint beside its layers. None stands for the target's table, or the whole
    vocabulary."""

    # int64 [V'], the target token of each draft id
    target_ids: torch.Tensor | None = None
    # [V', H]
    lm_head: torch.Tensor | None = None
    # [V, H]
    embed_tokens: torch.Tensor | None = None

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], vocab_size: int, **more: Any) -> Self:
        """Returns the tables among the tensors of a checkpoint; `more` are fields of subclasses.

        Raises:
            ValueError: see `draft_token_ids`.
        """
        d2t = tensors.get("d2t")
        return cls(
            None if d2t is None else draft_token_ids(d2t, vocab_size),
            tensors.get("lm_head.weight"),
            tensors.get("embed_tokens.weight"),
            **more,
        )


def target_ids_or_all(target_ids: torch.Tensor | None, vocab_size: int) -> torch.Tensor:
    """Returns `target_ids`, or the whole vocabulary for None."""
    return torch.arange(vocab_size) if target_ids is None else target_ids


def save_head(
    directory: str | Path,
    tensors: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    *,
    target_ids: torch.Tensor | None,
    dtype: torch.dtype,
) -> Path:
    """Writes `config.json` and `model.safetensors`, each replaced atomically.

    Args:
        tensors: floating-point ones are stored in `dtype`.
        config: with the target's `vocab_size`.
        target_ids: [V'] target token of each draft id, stored as `d2t`.

    Returns:
        The path of the weights.
    """
    directory = Path(directory)
    stored = {
        name: tensor.detach().to("cpu", dtype if tensor.is_floating_point() else tensor.dtype)
        for name, tensor in tensors.items()
    }
    if target_ids is not None:
        stored["d2t"] = target_ids.to("cpu", torch.int64) - torch.arange(len(target_ids))
        draft_token_ids(stored["d2t"], config.get("transformer_layer_config", config)["vocab_size"])
    weights = write_safetensors(directory / WEIGHTS_NAME, stored)
    config_file = directory / "config.json"
    partial = _partial(config_file)
    partial.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    partial.replace(config_file)
    return weights


def write_safetensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    """Writes one file atomically, creating its folder; returns `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = _partial(path)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, partial, metadata={"format": "pt"})
    partial.chmod(0o644)  # safetensors writes files that only their owner can read
    partial.replace(path)
    return path


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}")
