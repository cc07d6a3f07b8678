# SPDX-License-Identifier: Apache-2.0
"""Shipped heads and settings of the targets that `specplug target` prepares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_specplug.registry import BY_HEAD, default_method, get_method, methods
from vllm_specplug.targets import get_target, shipped_head

_HEADS = "heads/"


def speculative_config(target: str, method: str, **overrides: Any) -> dict[str, Any]:
    """Returns the --speculative-config of `method` on `target` with the shipped head and settings.

    Raises:
        ValueError: for an unknown target or method, and if nothing is shipped for them.
    """
    return {"method": method, **_preset(target, method), **overrides}


def default_head(target: str) -> str:
    """Returns the folder of the head that the default method ships for `target`."""
    return str(_preset(target, default_method().name)["model"])


def _preset(target: str, method: str) -> Mapping[str, Any]:
    get_target(target)  # reports an unknown target before an unknown head
    declared = default_method() if method == BY_HEAD else get_method(method)
    preset = declared.presets.get(target)
    if preset is None:
        shipped = [name for name, other in methods().items() if target in other.presets]
        raise ValueError(
            f"method={method!r} has no head shipped for target {target!r}; "
            f"shipped: {', '.join(shipped) or 'none'}."
        )
    return {key: _folder(value) for key, value in preset.items()}


def _folder(value: Any) -> Any:
    if isinstance(value, str) and value.startswith(_HEADS):
        return str(shipped_head(value.removeprefix(_HEADS)))
    return value
