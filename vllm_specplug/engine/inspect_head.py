# SPDX-License-Identifier: Apache-2.0
"""The report of `specplug inspect` about a draft head.

It reads configs and tensor headers, and weights only from a released pickle. To learn whether a
head can be served, it builds the engine's config with the head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from vllm_specplug.drafting.head_files import HeadFiles, read_head_files
from vllm_specplug.drafting.head_path import resolve_head_path
from vllm_specplug.drafting.method import Method
from vllm_specplug.options import check_target
from vllm_specplug.registry import BY_HEAD, get_method, head_owners, misfit, recognise_head


def inspect_head(
    model: str, target: str | None = None, method: str | None = None
) -> dict[str, Any]:
    """Returns what a head is, what it needs, and whether this machine can serve it.

    Args:
        model: a folder, or a hub id in the local cache.
        target: the model to draft for; None skips the engine's check.
        method: the method to use instead of the one that recognises the head.

    Returns:
        A JSON object; "served" is None if no target was given and no problem was found.

    Raises:
        ValueError: if there is no such head, or its files cannot be read.
    """
    path = resolve_head_path(model, method or BY_HEAD)
    head = read_head_files(path)
    report: dict[str, Any] = {"head": str(path), "files": _files(head)}
    kinds = head_owners(head)
    report["kind"] = {kind.name: kind.summary for kind in kinds}
    made_for = _made_for(head.config)
    if made_for:
        report["made_for"] = made_for
    try:
        chosen = recognise_head(path) if method is None else get_method(method)
    except ValueError as error:
        return {**report, "served": False, "reason": str(error)}
    owner = misfit(chosen, head)
    if owner is not None and (target is None or not chosen.needs_head):
        reason = (
            f"method {chosen.name!r} does not draft with this head, which is one of method "
            f"{owner.name!r}: {owner.summary}"
        )
        return {**report, "served": False, "reason": reason}
    report["needs"] = sorted(chosen.needs)
    config = {"method": chosen.name, "model": str(path)}
    report["speculative_config"] = config
    if target is None:
        reason = "give --target to check the head against a target, where it may need more"
        return {**report, "served": None, "reason": reason}
    # Last, so that the needs of this head replace those of its method.
    return {**report, "target": target, **_served(target, config, chosen)}


def _files(head: HeadFiles) -> dict[str, Any]:
    sizes = [math.prod(shape) for shape in head.tensors.values()]
    return {
        "architectures": list(head.architectures),
        "model_type": head.config.get("model_type"),
        "speculators_model_type": head.speculators_type,
        "tensors": len(head.tensors),
        "parameters": sum(sizes),
        "dtypes": sorted(head.dtypes),
    }


def _made_for(config: Mapping[str, Any]) -> str | None:
    """Returns the target that the head's own config names; None if it names none."""
    value: Any = config
    for name in ("speculators_config", "verifier", "name_or_path"):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value if isinstance(value, str) else None


def _served(target: str, config: dict[str, Any], method: Method) -> dict[str, Any]:
    """Returns whether an engine on `target` accepts the head, and the settings it would use."""
    from vllm_specplug.engine import install

    install()
    from vllm.engine.arg_utils import EngineArgs

    from vllm_specplug.engine.spec_config import tree_config

    try:
        check_target(target)
        # A copy, because vLLM changes the dict.
        engine = EngineArgs(model=target, speculative_config=dict(config)).create_engine_config()
    except Exception as error:
        return {"served": False, "reason": first_message(error)}
    spec = tree_config(engine)
    assert spec is not None and spec.plan is not None
    return {
        "needs": sorted(method.needs | spec.plan.needs),
        "served": True,
        "reason": None,
        "depth": spec.draft_depth,
        "target_layers": list(spec.plan.hidden_layers),
    }


def first_message(error: Exception) -> str:
    """Returns the text of a config error without pydantic's frame."""
    errors = getattr(error, "errors", None)
    if callable(errors):
        return "; ".join(entry["msg"].removeprefix("Value error, ") for entry in errors())
    return f"{error}" if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
