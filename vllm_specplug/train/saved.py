# SPDX-License-Identifier: Apache-2.0
"""Writes and reads what an interrupted run has saved."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

# Parts of a saved state and of its order of sequences.
STATE: dict[str, type] = {
    "head": Mapping, "ema": Mapping, "optimizers": list, "order": Mapping, "step": int,
    "seconds": float, "slots_trained": int, "loss_average": float, "fixed": Mapping,
    "recipes": list,
}  # fmt: skip
_ORDER: dict[str, type] = dict.fromkeys(("epoch", "cursor", "size"), int)


def write_saved(value: Any, path: Path) -> None:
    """Writes a file of torch.save. If that fails, an earlier file is unchanged.

    Raises:
        OSError: if it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".tmp")
    try:
        torch.save(value, partial)
    except RuntimeError as error:  # also raised on a full disk
        raise OSError(f"{path} cannot be written ({str(error).splitlines()[0]})") from error
    partial.replace(path)


def read_saved(path: Path, device: torch.device | str = "cpu") -> Any:
    """Returns the tensors and plain values in a file of torch.save.

    Raises:
        ValueError: for a file that does not exist or is damaged.
    """
    if not path.is_file():
        raise ValueError(
            f"{path} does not exist; start without resuming, or name the folder of a run that has "
            "saved"
        )
    try:
        return torch.load(path, map_location=device, weights_only=True)
    # A damaged file raises anything, even errors of decoding.
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"{path} is damaged ({reason}); restore it from a copy, or start anew in another "
            "output folder"
        ) from error


def read_state(path: Path, device: torch.device) -> dict[str, Any]:
    """Returns a trainer's state.

    Raises:
        ValueError: as `read_saved`, and for a state that another program or version has saved.
    """
    state = read_saved(path, device)
    lacking = _lacking(state, STATE)
    if not lacking:
        lacking = [f"order.{name}" for name in _lacking(state["order"], _ORDER)]
        for part in ("head", "ema"):
            tensors = state[part].values()
            lacking += [part] * (not all(isinstance(tensor, torch.Tensor) for tensor in tensors))
        last = state["recipes"][-1:]
        lacking += ["recipes"] * (not last or not isinstance(last[0], Mapping))
    if lacking:
        raise unreadable(path, lacking)
    return dict(state)


def unreadable(path: Path, lacking: list[str]) -> ValueError:
    """Returns the error for a state whose parts are missing or have another form."""
    return ValueError(
        f"{path} lacks {', '.join(lacking)}, or has it in another form; resume with the version "
        "that saved it (head/provenance.json names it), or start anew in another output folder, "
        "from that head where the command has --init-from"
    )


def _lacking(given: Any, parts: Mapping[str, type]) -> list[str]:
    if not isinstance(given, Mapping):
        return list(parts)
    return [name for name, kind in parts.items() if not isinstance(given.get(name), kind)]
