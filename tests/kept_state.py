# SPDX-License-Identifier: Apache-2.0
"""Where the plugin keeps something under a request's name, found without knowing where to look.

Everything that can be reached from an engine's runner, scheduler and logits processors through
containers, closures and objects of the plugin's own classes is looked at, and the globals of the
plugin's modules. A container that is added later is found as well.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

_PACKAGES = ("vllm_specplug", "tests.e2e.oracle")
_LEAVES = (str, bytes, int, float, complex, type(None), np.ndarray, np.generic, torch.Tensor,
           torch.nn.Module, ModuleType, type)  # fmt: skip


# vLLM's own, replaced at every step that drafts.
_VLLMS = ("_draft_token_req_ids",)


def _is_plugin_module(module: str | None) -> bool:
    return (module or "").startswith(_PACKAGES)


def _attributes(value: object) -> Iterator[tuple[str, Any]]:
    yield from (
        item for item in list(getattr(value, "__dict__", {}).items()) if item[0] not in _VLLMS
    )
    for cls in type(value).__mro__:
        names = cls.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if hasattr(value, name):
                yield name, getattr(value, name)


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in list(value.items()):
            yield "{key}", key
            yield f"[{key!r}]", item
    elif isinstance(value, list | tuple | set | frozenset) or (
        isinstance(value, Iterable) and type(value).__module__ == "collections"
    ):
        for item in list(value):
            yield "[]", item
    elif isinstance(value, MethodType):
        yield ".__self__", value.__self__
        yield "", value.__func__
    elif isinstance(value, FunctionType):
        if _is_plugin_module(value.__module__):
            for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
                try:
                    yield f"<{name}>", cell.cell_contents
                except ValueError:  # not bound yet
                    continue
    elif _is_plugin_module(type(value).__module__):
        for name, item in _attributes(value):
            yield f".{name}", item


def places_of(roots: dict[str, Any], req_ids: Iterable[str]) -> list[str]:
    """The paths below `roots` at which one of `req_ids` is kept.

    Roots are opened whatever their class; other objects only when their class is the plugin's.
    """
    wanted = set(req_ids)
    found: list[str] = []
    seen: set[int] = set()
    alive: list[Any] = []  # ids of objects that are gone would be given out again
    stack: list[tuple[str, Any]] = [
        (f"{name}.{attribute}", value)
        for name, root in roots.items()
        for attribute, value in _attributes(root)
    ]
    while stack:
        path, value = stack.pop()
        if isinstance(value, str):
            if value in wanted:
                found.append(path)
            continue
        if isinstance(value, _LEAVES) or id(value) in seen:
            continue
        seen.add(id(value))
        alive.append(value)
        stack += ((path + step, item) for step, item in _children(value))
    return sorted(found)


def engine_roots(core: Any, runner: Any) -> dict[str, Any]:
    """Where the plugin can keep something in an engine of this process."""
    scheduler = core.scheduler
    roots = {
        "runner": runner,
        "scheduler": scheduler,
        "grammars": scheduler.structured_output_manager,
        "sampler": runner.sampler,
        "speculator": runner.speculator,
        "req_states": runner.req_states,
    }
    for processor in runner.sampler.logits_processors:
        roots[type(processor).__name__] = processor
    for name, module in list(sys.modules.items()):
        if _is_plugin_module(name):
            roots[name] = module
    return roots


class RequestNames:
    """The names of all requests that an engine's scheduler has seen."""

    def __init__(self, scheduler: Any) -> None:
        self.seen: set[str] = set()
        original = scheduler.add_request

        def add_request(request: Any) -> None:
            self.seen.add(request.request_id)
            original(request)

        scheduler.add_request = add_request
