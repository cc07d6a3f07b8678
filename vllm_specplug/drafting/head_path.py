# SPDX-License-Identifier: Apache-2.0
"""Finds the folder of a draft head: a path, or a hub id in the local cache."""

from __future__ import annotations

from pathlib import Path

from vllm_specplug.options import option_error


def check_model_value(model: object) -> None:
    """Raises ValueError for a "model" that is neither None nor a string."""
    if model is not None and not isinstance(model, str):
        value = model if isinstance(model, bool | int | float) else repr(model)[:200]
        raise option_error(
            "model",
            value,
            "legal: a string with a folder, or with a hub id in the local cache",
            'Give the head\'s folder in quotes, e.g. "model": "/path/to/head"',
        )


def resolve_head_path(model: str | None, method: str) -> Path:
    """Returns the folder of the draft head `model`: a path, or a hub id in the local cache.

    Nothing is downloaded while serving.

    Raises:
        ValueError: if there is no such folder and no cached copy.
    """
    if model is None or model == "":
        raise option_error(
            "model",
            model,
            f"method {method!r} needs a draft head",
            'Give its folder, e.g. "model": "/path/to/head"',
        )
    check_model_value(model)
    remedy = "Give the folder that holds config.json and model.safetensors"
    try:
        path = Path(model).expanduser()
        if path.is_dir():
            return path.resolve()
    except (OSError, RuntimeError, ValueError) as error:
        # A name that is too long, an unknown user, a circular link, a folder without permission.
        reason = f"it cannot be looked up ({type(error).__name__}: {str(error)[:100]})"
        raise option_error("model", model[:200], reason, remedy) from None
    if model.count("/") == 1 and not path.is_absolute():
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        try:
            return Path(snapshot_download(model, local_files_only=True))
        except (LocalEntryNotFoundError, ValueError, OSError):
            remedy = f"Download it first: hf download {model}"
    raise option_error("model", model, "there is no such folder", remedy)
