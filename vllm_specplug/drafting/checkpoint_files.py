# SPDX-License-Identifier: Apache-2.0
"""Files of a draft checkpoint, read as untrusted input.

Nothing here trusts a length, a name or a number in a file. Every refusal is a ValueError that
names the file; nothing is allocated by a claim that the file's own size does not cover.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

# A config is some kilobytes, an index of shards some hundred.
MAX_JSON_BYTES = 16 << 20
# Eight bytes before the header of a safetensors file say how long it is; some hundred bytes
# per tensor are usual.
MAX_HEADER_BYTES = 16 << 20
# Far beyond any head; a product of two of them is still a size that torch can state.
MAX_SIZE = 1 << 24
WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
_INTEGER_TENSORS = {"d2t": ("I64", "I32"), "t2d": ("BOOL", "U8", "I64", "I32")}
_WEIGHT_DTYPES = ("BF16", "F16", "F32", "F64")


def is_size(value: object) -> bool:
    """Whether a config's value is an integer from 1 to `MAX_SIZE`."""
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_SIZE


def is_positive(value: object) -> bool:
    """Whether a config's value is a finite number above zero, as a float too."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    # An integer may be larger than any float.
    return 0 < value <= sys.float_info.max


@contextmanager
def open_config(
    directory: str | Path, kind: str = "head", weights: str = WEIGHTS_NAME
) -> Iterator[dict[str, Any]]:
    """Yields the object in `directory/config.json`; errors that its values raise name the file.

    Raises:
        ValueError: when there is no such file, or no JSON object in it.
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
    """Turns what a value of an unforeseen type raises into a ValueError that names the file."""
    try:
        yield
    except (TypeError, AttributeError, KeyError, ArithmeticError) as error:
        raise ValueError(
            f"{path} holds a value of a type that no head has ({str(error)[:200]}); fetch the head "
            "again"
        ) from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    for name, count in Counter(name for name, _ in pairs).items():
        if count > 1:
            raise ValueError(f"{name[:100]!r} is given twice")
    return dict(pairs)


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is not a number of JSON")


def read_json_object(path: Path, what: str) -> dict[str, Any]:
    """The JSON object in a file of bounded size.

    Raises:
        ValueError: when it is too large, not text, not JSON, nested too deep or not an object, and
            for keys given twice, of which readers take one or the other.
    """
    size = path.stat().st_size
    if size > MAX_JSON_BYTES:
        raise ValueError(
            f"{path} holds {size} bytes, legal for {what}: at most {MAX_JSON_BYTES}; "
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
    """The files that an index names, all of them beside it.

    Raises:
        ValueError: for names that lead elsewhere, files that are missing, a map that is none.
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
    # Only the name is judged: files of a hub cache are links to another folder, and may be.
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
    """The safetensors of a checkpoint: one file, an index and its shards, or all there are.

    Raises:
        ValueError: for an index that does not hold together.
    """
    single, index = directory / WEIGHTS_NAME, directory / INDEX_NAME
    if single.is_file():
        return [single]
    if index.is_file():
        return shard_files(index)
    return sorted(path for path in directory.glob("*.safetensors") if path.is_file())


def read_safetensors(
    files: Iterable[Path], *, headers_only: bool = False, prefixes: tuple[str, ...] = ("",)
) -> dict[str, torch.Tensor]:
    """All tensors of `files` by their name without the optional 'model.' prefix.

    With `headers_only` they are meta tensors: names and shapes, no data. `prefixes`, of names
    without 'model.', leave the others unread: some drafts are shipped inside their target.

    Raises:
        ValueError: for files that are no safetensors, tensors of a dtype that weights never have,
            and values that are not finite.
    """
    tensors: dict[str, torch.Tensor] = {}
    for path in files:
        check_header_length(path)
        try:
            with safe_open(path, framework="pt") as handle:
                for full_name in handle.keys():  # noqa: SIM118 - not a mapping
                    name = full_name.removeprefix("model.")
                    if not name.startswith(prefixes):
                        continue
                    if name in tensors:
                        raise _Refused(
                            f"{path}: tensor {name!r} is given twice, here or in another file of "
                            "this checkpoint; fetch it again"
                        )
                    part = handle.get_slice(full_name)
                    _check_dtype(path, name, str(part.get_dtype()))
                    tensors[name] = (
                        torch.empty(part.get_shape(), device="meta")
                        if headers_only
                        else handle.get_tensor(full_name)
                    )
        except _Refused as error:
            raise ValueError(str(error)) from None
        except Exception as error:
            raise ValueError(
                f"{path} cannot be read as safetensors ({error}); fetch it again"
            ) from None
    if not headers_only:
        check_finite(tensors)
    return tensors


class _Refused(ValueError):
    """This module's own refusal, as opposed to what the reader raises."""


def check_header_length(path: Path) -> None:
    """Raises ValueError for safetensors whose header is longer than any, or than the file."""
    with path.open("rb") as stream:
        claimed = int.from_bytes(stream.read(8), "little")
    if claimed > min(MAX_HEADER_BYTES, path.stat().st_size):
        raise ValueError(
            f"{path} claims a header of {claimed} bytes, legal: at most {MAX_HEADER_BYTES} and "
            "no more than the file holds; fetch it again"
        )


def _check_dtype(path: Path, name: str, dtype: str) -> None:
    legal = _INTEGER_TENSORS.get(name, _WEIGHT_DTYPES)
    if dtype not in legal:
        raise _Refused(
            f"{path}: tensor {name!r} has dtype {dtype}, legal: {', '.join(legal)}; quantised or "
            "damaged weights cannot be served, use the head's original weights"
        )


def check_finite(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises ValueError for a floating-point tensor with NaN or infinities."""
    for name, tensor in tensors.items():
        # The sum of a tensor that holds NaN or infinities is not finite, and needs no mask; where
        # finite values overflow it the exact question is asked.
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
    """Compares names and shapes with what a checkpoint's config calls for.

    Args:
        what: the checkpoint, for the message.
        expected: shape of each tensor by name.
        optional: names of `expected` that may be missing.
        ignored: names that may be there and are never read.

    Raises:
        ValueError: with all that is missing, unexpected or misshapen in one message.
    """
    problems = [
        f"missing {name} {list(shape)}"
        for name, shape in sorted(expected.items())
        if name not in tensors and name not in optional
    ]
    problems += [
        f"unexpected {name} {list(tensor.shape)}"
        for name, tensor in sorted(tensors.items())
        if name not in expected and name not in ignored
    ]
    problems += [
        f"misshapen {name}: config says {list(expected[name])}, checkpoint has {list(tensor.shape)}"
        for name, tensor in sorted(tensors.items())
        if name in expected and tuple(tensor.shape) != expected[name]
    ]
    if problems:
        raise ValueError(
            f"{what} does not fit its config: "
            + "; ".join(problems)
            + ". Use the config and weights of one release"
        )


def module_shapes(make: Callable[[], torch.nn.Module]) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor of the module that `make` builds, by name; allocates none of them."""
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in make().state_dict().items()}


def tensors_to_save(
    tensors: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Contiguous tensors on the CPU in `dtype`, as `write_checkpoint` takes them."""
    return {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in tensors.items()}


def draft_token_ids(d2t: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Target token of each draft id, int64 [V']: id i stands for token i + d2t[i].

    Raises:
        ValueError: for tokens outside the vocabulary, and for one that two ids stand for.
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


def write_checkpoint(
    weights: Path,
    config_file: Path,
    tensors: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """Writes safetensors, then the config that makes them valid; each appears whole or not at all.

    Folders are made. Returns `weights`.
    """
    write_safetensors(weights, tensors, metadata)
    partial = _partial(config_file)
    partial.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    partial.replace(config_file)
    return weights


def write_safetensors(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> Path:
    """Writes one file, its folder too; it appears whole or not at all. Returns `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = _partial(path)
    save_file(dict(tensors), partial, metadata={"format": "pt", **(metadata or {})})
    partial.chmod(0o644)  # safetensors writes files that only their owner reads
    partial.replace(path)
    return path


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}")
