# SPDX-License-Identifier: Apache-2.0
"""Where a draft head lies: a folder, or a hub id that is in the local cache."""

from __future__ import annotations

from pathlib import Path

from vllm_specplug.options import option_error


def resolve_head_path(model: str | None, method: str) -> Path:
    """Folder of the draft head: a local path, or a hub id that is in the local cache.

    Nothing is downloaded while serving.

    Raises:
        ValueError: when there is no such folder and no cached copy.
    """
    if not model:
        raise option_error(
            "model",
            model,
            f"method {method!r} needs a draft head",
            'Give its folder, e.g. "model": "/path/to/head"',
        )
    path = Path(model).expanduser()
    if path.is_dir():
        return path.resolve()
    remedy = "Give the folder that holds config.json and model.safetensors"
    if model.count("/") == 1 and not path.is_absolute():
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        try:
            return Path(snapshot_download(model, local_files_only=True))
        except (LocalEntryNotFoundError, ValueError, OSError):
            remedy = f"Download it first: hf download {model}"
    raise option_error("model", model, "there is no such folder", remedy)
