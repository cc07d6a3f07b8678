# SPDX-License-Identifier: Apache-2.0
"""The registry of methods: folders of `methods/`, entry points of other packages, `register`."""

from __future__ import annotations

import difflib
import importlib
import logging
import pkgutil
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_specplug.drafting.head_path import check_model_value
from vllm_specplug.drafting.head_path import resolve_head_path as resolve_head_path
from vllm_specplug.drafting.method import API_VERSION, Method
from vllm_specplug.options import option_error, tree_option_names

if TYPE_CHECKING:
    from vllm_specplug.drafting.head_files import HeadFiles

BY_HEAD = "tree"
"""Value of "method" that selects the method that a head is made for."""
ENTRY_POINT_GROUP = "vllm_specplug.methods"
_logger = logging.getLogger("vllm.specplug")
_registered: dict[str, Method] = {}


def register(method: Method) -> None:
    """Registers a method in this process only.

    Engine core and workers are separate processes unless VLLM_ENABLE_V1_MULTIPROCESSING=0. Packages
    should use the entry point group `vllm_specplug.methods`, which every process reads.

    Raises:
        ValueError: for another contract version, a name that is taken, or an option that every
            method has.
    """
    check_declaration(method, {**_discovered(), **_registered})
    _registered[method.name] = method


def check_declaration(method: Method, known: dict[str, Method]) -> None:
    """Raises ValueError unless `method` can be registered beside the `known` ones."""
    if method.api_version != API_VERSION:
        raise ValueError(
            f"method {method.name!r} is written for version {method.api_version} of the contract, "
            f"this vllm-specplug has version {API_VERSION}. Install matching releases."
        )
    if method.name == BY_HEAD:
        raise ValueError(
            f"method name {BY_HEAD!r} is reserved for the method of a head. Choose another name."
        )
    if known.get(method.name, method) != method:
        raise ValueError(
            f"method name {method.name!r} is taken by {known[method.name].drafter}; "
            f"known: {', '.join(known)}. Choose another name."
        )
    clash = sorted(set(method.option_names()) & {*tree_option_names(), "method", "model"})
    if clash:
        raise ValueError(
            f"method {method.name!r} declares option {clash[0]!r}, which every method has. "
            "Choose another name for it."
        )


def methods() -> dict[str, Method]:
    """Returns all methods of this process by name, this package's methods first."""
    return {**_discovered(), **_registered}


def method_names() -> tuple[str, ...]:
    """Returns the names of all methods of this process."""
    return tuple(methods())


def get_method(name: str) -> Method:
    """Returns the method called `name`.

    Raises:
        ValueError: for an unknown name, listing the known ones.
    """
    try:
        return methods()[name]
    except KeyError:
        near = difflib.get_close_matches(name, method_names(), n=1)
        raise ValueError(
            f"method={name!r} is not one of this plugin's methods; "
            f"known: {', '.join(method_names())}."
            f"{f' Did you mean {near[0]!r}?' if near else ''}"
        ) from None


def legal_method_names() -> tuple[str, ...]:
    """Returns the legal values of "method": `BY_HEAD` and the methods of this process."""
    return (BY_HEAD, *method_names())


def find_method(name: object, model: str | None) -> Method | None:
    """Returns the method that "method" and "model" select; None for vLLM's own methods.

    Raises:
        ValueError: for `BY_HEAD` and a head that no method or several methods recognise, and for a
            model that is not a string.
    """
    if name == BY_HEAD:
        return recognise_head(resolve_head_path(model, BY_HEAD))
    method = methods().get(name) if isinstance(name, str) else None
    if method is not None:
        check_model_value(model)
    return method


def recognise_head(path: Path) -> Method:
    """Returns the method of the head in folder `path`, found by its config and tensor names.

    Raises:
        ValueError: if no method or several methods recognise it, and for unreadable files.
    """
    from vllm_specplug.drafting.head_files import read_head_files

    head = read_head_files(path)
    owners = head_owners(head)
    if len(owners) == 1:
        return owners[0]
    kinds = owners or [m for m in methods().values() if m.recognises is not None]
    listed = "; ".join(f"{method.name!r}: {method.summary}" for method in kinds)
    if owners:
        raise option_error(
            "model",
            str(path),
            f"several methods draft with such a head ({head}): {listed}",
            f'Name one of them, e.g. "method": "{owners[0].name}"',
        )
    raise option_error(
        "model",
        str(path),
        f"no method knows this kind of head. Found: {head}. Known kinds: {listed}",
        'Use a head of a known kind, or name the method that drafts with it after "method"',
    )


def head_owners(head: HeadFiles) -> list[Method]:
    """Returns the methods that recognise a head as theirs."""
    owners = []
    for method in methods().values():
        # A broken third-party package must not affect other methods.
        try:
            if method.recognises_head(head):
                owners.append(method)
        except Exception as error:
            _logger.warning(
                "Method %r failed to check the head %s: %s: %s",
                method.name,
                head.path,
                type(error).__name__,
                error,
            )
    return owners


def misfit(method: Method, head: HeadFiles) -> Method | None:
    """Returns the method that a head is made for; None if `method` can draft with it."""
    owners = head_owners(head)
    # A method whose options extend another method's also drafts with that method's heads.
    own = method.load_options()
    if any(issubclass(own, owner.load_options()) for owner in owners):
        return None
    return owners[0] if owners else None


def default_method() -> Method:
    """Returns the method that the demo and the benchmarks use by default."""
    return next(method for method in methods().values() if method.is_default)


def headless_methods() -> list[str]:
    """Returns the names of the methods that read neither a draft head nor the target's states."""
    return [n for n, method in methods().items() if not method.needs_head and not method.needs]


def owners_of(option: str) -> list[str]:
    """Returns the names of the methods that declare `option`."""
    return [name for name, method in methods().items() if option in method.option_names()]


@cache
def _discovered() -> dict[str, Method]:
    """Returns the methods of this package and of installed packages, read once per process."""
    discovered: dict[str, Method] = {}
    package = importlib.import_module("vllm_specplug.methods")
    for module in pkgutil.iter_modules(package.__path__):
        if module.ispkg:
            declared = importlib.import_module(f"{package.__name__}.{module.name}")
            method = getattr(declared, "METHOD", None)
            if method is not None:
                discovered[method.name] = method
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        # A broken third-party package must not affect other methods.
        try:
            method = entry.load()
            check_declaration(method, discovered)
        except Exception as error:
            _logger.warning(
                "Speculative method %r of %s cannot be used: %s: %s",
                entry.name,
                entry.value,
                type(error).__name__,
                error,
            )
            continue
        discovered[method.name] = method
    return discovered
