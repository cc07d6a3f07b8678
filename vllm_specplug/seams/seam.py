# SPDX-License-Identifier: Apache-2.0
"""Seams: the places where the package uses or changes vLLM, and sets that are applied together.

This module and the lists of seams import neither vLLM nor the code that a seam installs. They name
both by strings, so a list can be read, checked and shown on any vLLM.
"""

from __future__ import annotations

import dis
import functools
import importlib
import inspect
import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

_MISSING: Any = object()


class SeamError(RuntimeError):
    """A seam's target is missing, or the seam is already applied."""


def resolve(path: str) -> Any:
    """Returns the object at "module:Attribute.path", or the module without a colon.

    Raises:
        SeamError: naming the first part that is missing.
    """
    name, _, attributes = path.partition(":")
    try:
        value: Any = importlib.import_module(name)
    except Exception as error:
        raise SeamError(f"{name} cannot be imported ({error})") from error
    for attribute in attributes.split(".") if attributes else ():
        if not hasattr(value, attribute):
            raise SeamError(f"{name} has no {attribute}")
        value = getattr(value, attribute)
        name = f"{name}.{attribute}"
    return value


def _find_problem(path: str) -> str | None:
    """Returns what is missing on the way to the object at `path`; None if it exists."""
    try:
        resolve(path)
    except SeamError as error:
        return str(error)
    return None


@dataclass(frozen=True)
class Topic:
    """Why the package touches vLLM in some places."""

    key: str
    why: str


class _Applicable:
    """What can be applied to vLLM and undone."""

    def apply(self) -> None:
        raise NotImplementedError

    def undo(self) -> None:
        raise NotImplementedError

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Applies it for the duration of a `with` block."""
        self.apply()
        try:
            yield
        finally:
            self.undo()


@dataclass(eq=False)
class Seam(_Applicable):
    """A place in vLLM that the package changes; subclasses override `_apply` and `_undo`."""

    topic: Topic
    target: str
    """The name in vLLM, as "module:Attribute.path"."""
    kind: ClassVar[str]
    _is_applied: bool = field(default=False, init=False, repr=False)

    @property
    def name(self) -> str:
        """The target as Python would write it."""
        return self.target.replace(":", ".")

    @property
    def targets(self) -> tuple[str, ...]:
        """The names in vLLM that must exist."""
        return (self.target,)

    @property
    def owner_path(self) -> str:
        """Path of the object that has the target as an attribute."""
        module, _, attributes = self.target.partition(":")
        owner = attributes.rpartition(".")[0]
        return f"{module}:{owner}" if owner else module

    def verify(self) -> str | None:
        """Returns what is missing in the installed vLLM; None if nothing is."""
        return _find_problem(self.target)

    def apply(self) -> None:
        """Makes the change.

        Raises:
            SeamError: if the target is missing, or the change is already made.
        """
        if self._is_applied:
            raise SeamError(f"{self.name} is already applied")
        self._apply()
        self._is_applied = True

    def undo(self) -> None:
        """Reverts the change; does nothing if it was not made."""
        if self._is_applied:
            self._undo()
            self._is_applied = False

    def _apply(self) -> None:
        pass

    def _undo(self) -> None:
        pass


@dataclass(eq=False)
class Members(Seam):
    """Attributes of an object of vLLM's that the package overrides, calls or reads.

    The target is the object. A class defines the attributes, or its methods set them; a function
    registers them as buffers. Nothing is changed. Only what would be noticed late, or never, is
    listed: a missing import fails by itself.
    """

    members: str = ""
    """Their names, separated by spaces."""
    kind = "builds on"

    @property
    def targets(self) -> tuple[str, ...]:
        separator = "." if ":" in self.target else ":"
        return tuple(f"{self.target}{separator}{name}" for name in self.members.split())

    def verify(self) -> str | None:
        problem = super().verify()
        if problem is not None:
            return problem
        owner = resolve(self.target)
        missing = [
            name
            for name in self.members.split()
            if not hasattr(owner, name) and name not in _stored_names(owner)
        ]
        return f"it has no {', '.join(missing)}" if missing else None


@functools.cache
def _stored_names(owner: Any) -> frozenset[str]:
    """Names of the attributes that methods of a class and its bases set, or of the buffers that a
    function registers."""
    if inspect.ismodule(owner):
        return frozenset()
    if not isinstance(owner, type):
        body = list(dis.get_instructions(inspect.unwrap(owner)))
        return frozenset(
            name.argval
            for call, name in itertools.pairwise(body)
            if call.argval == "register_buffer" and name.opname == "LOAD_CONST"
        )
    functions = [
        inspect.unwrap(member)
        for base in owner.__mro__
        for member in vars(base).values()
        if inspect.isfunction(member)
    ]
    return frozenset(
        instruction.argval
        for function in functions
        for instruction in dis.get_instructions(function)
        if instruction.opname == "STORE_ATTR"
    )


@dataclass(eq=False)
class Replace(Seam):
    """An attribute or module global that is replaced.

    `make` names a function of the package that takes vLLM's object and returns its replacement.
    """

    make: str = ""
    kind: ClassVar[str] = "replaces"
    _owner: Any = field(default=None, init=False, repr=False)
    _own: Any = field(default=_MISSING, init=False, repr=False)
    """The owner's own value; missing if it inherited the attribute."""

    @property
    def attribute(self) -> str:
        return self.name.rpartition(".")[2]

    def verify(self) -> str | None:
        # Importing the package's own code also shows a name that vLLM lacks.
        return super().verify() or _find_problem(self.make)

    def _apply(self) -> None:
        owner = resolve(self.owner_path)
        stock = self._stock()
        new = self._made(resolve(self.make)(stock), stock)
        self._owner, self._own = owner, vars(owner).get(self.attribute, _MISSING)
        setattr(owner, self.attribute, new)

    def _stock(self) -> Any:
        return resolve(self.target)

    def _made(self, new: Any, stock: Any) -> Any:
        return new

    def _undo(self) -> None:
        if self._own is _MISSING:
            delattr(self._owner, self.attribute)
        else:
            setattr(self._owner, self.attribute, self._own)
        self._owner, self._own = None, _MISSING


class Wrap(Replace):
    """A function or method that the package wraps."""

    kind = "wraps"

    def _made(self, new: Any, stock: Any) -> Any:
        return functools.wraps(stock)(new)


class ReplaceKernel(Replace):
    """A Triton kernel that a function with the same parameters replaces."""

    kind = "replaces kernels"

    def verify(self) -> str | None:
        problem = super().verify()
        # An engine that this process built earlier may have replaced it.
        if problem is not None or self._is_applied:
            return problem
        misfit: str | None = resolve(self.make).misfit(resolve(self.target))
        return misfit


class Add(Replace):
    """An attribute that vLLM's object lacks, at least in one supported release.

    `make` is called with None, even where vLLM has the attribute.
    """

    kind = "adds"

    def verify(self) -> str | None:
        return _find_problem(self.owner_path)

    def _stock(self) -> Any:
        return None


@dataclass(eq=False)
class Register(Seam):
    """A class registered in place of one of vLLM's attention backends.

    `target` is the backend's name in vLLM's enumeration, `path` the class. vLLM caches its choice
    of backend. An engine that this process built earlier may have cached the stock backend, which
    would silently attend a tree as a chain, so the cache is cleared.
    """

    path: str = ""
    kind: ClassVar[str] = "registers over"
    _earlier: str | None = field(default=None, init=False, repr=False)
    """The class that another package registered before; None for vLLM's own."""

    def verify(self) -> str | None:
        # Only the module: each backend of `latent_gpu` imports libraries that the others do not
        # need.
        return super().verify() or _find_problem(self.path.rpartition(".")[0])

    def _apply(self) -> None:
        backend = resolve(self.target)
        self._earlier = backend.get_path() if backend.is_overridden() else None
        self._override(self.path)

    def _undo(self) -> None:
        self._override(self._earlier)

    def _override(self, path: str | None) -> None:
        """Registers the class at `path`; None for vLLM's own."""
        if path is None:
            resolve(self.target).clear_override()
        else:
            # vLLM keeps overrides of Mamba backends in a table of their own.
            is_mamba = "MambaAttentionBackendEnum" in self.target
            register = resolve("vllm.v1.attention.backends.registry:register_backend")
            register(resolve(self.target), path, is_mamba=is_mamba)
        resolve("vllm.v1.attention.selector:_cached_get_attn_backend").cache_clear()
        resolve("vllm.v1.attention.selector:_cached_get_mamba_attn_backend").cache_clear()


class SeamSet(_Applicable):
    """Seams that are applied together or not at all."""

    def __init__(self, seams: Iterable[Seam]) -> None:
        self.seams = tuple(seams)
        self._applied: list[Seam] = []

    @property
    def is_applied(self) -> bool:
        """Whether all seams are applied."""
        return bool(self.seams) and len(self._applied) == len(self.seams)

    def verify(self) -> list[str]:
        """Returns what is missing in the installed vLLM, one line per seam."""
        problems = ((seam, seam.verify()) for seam in self.seams)
        return [f"{seam.name} ({problem})" for seam, problem in problems if problem is not None]

    def apply(self) -> None:
        """Applies all seams in order; does nothing if they are applied.

        Raises:
            SeamError: naming the seam that failed; the seams before it are undone.
        """
        if self.is_applied:
            return
        for seam in self.seams:
            try:
                seam.apply()
            except Exception as error:
                self.undo()
                raise SeamError(
                    f"{seam.name} could not be changed: {error}. vLLM is as it was."
                ) from error
            self._applied.append(seam)

    def undo(self) -> None:
        """Undoes all applied seams in reverse order."""
        while self._applied:
            self._applied.pop().undo()
