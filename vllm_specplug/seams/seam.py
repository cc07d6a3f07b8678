# SPDX-License-Identifier: Apache-2.0
"""One place where the package meets vLLM, and sets of them that are applied whole or not at all.

Neither this module nor a list of seams imports vLLM or the code that a seam puts in place: both are
named by strings, so that a list can be read, checked and shown on any vLLM.
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
    """A seam's target is missing, already changed, or can no longer be undone."""


def resolve(path: str) -> Any:
    """The object at "module:Attribute.path".

    Raises:
        SeamError: naming the first part that is missing.
    """
    module, _, attributes = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except Exception as error:
        raise SeamError(f"{module} cannot be imported ({error})") from error
    seen = module
    for part in attributes.split("."):
        if not hasattr(found, part):
            raise SeamError(f"{seen} has no {part}")
        found = getattr(found, part)
        seen = f"{seen}.{part}"
    return found


@dataclass(eq=False)
class Seam:
    """A name of vLLM's that the package calls; nothing is changed.

    Seams that change something override `_apply` and `_undo`.
    """

    key: str
    """Topic; several seams may serve one."""
    target: str
    """vLLM's name, "module:Attribute.path"."""
    why: str
    remove_when: str
    kind: ClassVar[str] = "uses"
    _is_applied: bool = field(default=False, init=False, repr=False)

    @property
    def name(self) -> str:
        """The target as Python would write it."""
        return self.target.replace(":", ".")

    def verify(self) -> str | None:
        """None, or what is missing in the installed vLLM."""
        try:
            resolve(self.target)
        except SeamError as error:
            return str(error)
        return None

    def apply(self) -> None:
        """Puts the change in place.

        Raises:
            SeamError: when the target is missing, or already changed by a seam.
        """
        if self._is_applied:
            raise SeamError(f"{self.name} is applied already")
        self._apply()
        self._is_applied = True

    def undo(self) -> None:
        """Takes the change back; nothing when it is not in place.

        Raises:
            SeamError: when somebody else has changed the target since.
        """
        if self._is_applied:
            self._undo()
            self._is_applied = False

    @contextmanager
    def applied(self) -> Iterator[None]:
        """In place while entered."""
        self.apply()
        try:
            yield
        finally:
            self.undo()

    def describe(self) -> dict[str, str]:
        """The seam as plain text, for people."""
        return {
            "key": self.key,
            "kind": self.kind,
            "target": self.name,
            "why": self.why,
            "remove_when": self.remove_when,
        }

    def _apply(self) -> None:
        pass

    def _undo(self) -> None:
        pass


class Overrides(Seam):
    """A method that a subclass in the package overrides."""

    kind = "overrides"


class InstanceAttribute(Seam):
    """An attribute that a method of a vLLM class sets, or a buffer that a function of vLLM
    registers, and the package reads or sets."""

    kind = "reads"

    def verify(self) -> str | None:
        path, _, name = self.target.rpartition(".")
        try:
            owner = resolve(path)
        except SeamError as error:
            return str(error)
        if name not in _attributes_set(owner):
            return f"{path.replace(':', '.')} sets no {name}"
        return None


@functools.cache
def _attributes_set(owner: Any) -> frozenset[str]:
    """Names of the attributes that methods of a class or of its bases store; of a function, of the
    buffers that it registers."""
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


# What seams have put in place, by identity: `functools.wraps` copies attributes, so a mark on a
# function would also be found on a wrapper that somebody else puts around it.
_installed: dict[int, Any] = {}


@dataclass(eq=False)
class Replace(Seam):
    """An attribute or module global that is replaced.

    `make` names a function of the package: it takes what vLLM has and returns what takes its place.
    """

    make: str = ""
    kind: ClassVar[str] = "replaces"
    _owner: Any = field(default=None, init=False, repr=False)
    _own: Any = field(default=_MISSING, init=False, repr=False)
    """What the owner itself held; missing when it inherited the attribute."""
    _new: Any = field(default=None, init=False, repr=False)

    @property
    def attribute(self) -> str:
        return self.target.replace(":", ".").rpartition(".")[2]

    def _apply(self) -> None:
        path, _, name = self.target.rpartition("." if "." in self.target.partition(":")[2] else ":")
        owner = resolve(path) if ":" in path else importlib.import_module(path)
        stock = self._stock()
        if id(stock) in _installed:
            raise SeamError(f"{self.name} is changed already; nothing is put around it twice")
        new = self._made(resolve(self.make)(stock), stock)
        self._owner, self._own = owner, vars(owner).get(name, _MISSING)
        setattr(owner, name, new)
        self._new = new
        _installed[id(new)] = new

    def _stock(self) -> Any:
        return resolve(self.target)

    def _made(self, new: Any, stock: Any) -> Any:
        return new

    def _undo(self) -> None:
        name = self.attribute
        if vars(self._owner).get(name, _MISSING) is not self._new:
            raise SeamError(f"{self.name} was changed by somebody else since; it is left as it is")
        if self._own is _MISSING:
            delattr(self._owner, name)
        else:
            setattr(self._owner, name, self._own)
        # Two seams may put the same constant in place.
        _installed.pop(id(self._new), None)
        self._owner, self._own, self._new = None, _MISSING, None


class Wrap(Replace):
    """A function or method with code of the package around it."""

    kind = "wraps"

    def _made(self, new: Any, stock: Any) -> Any:
        return functools.wraps(stock)(new)


class ReplaceKernel(Replace):
    """A Triton kernel that a function stands in for; its parameters must be the kernel's."""

    kind = "replaces kernels"

    def verify(self) -> str | None:
        problem = super().verify()
        if problem is not None:
            return problem
        stock, new = resolve(self.target), resolve(self.make)
        if stock is new:
            # In place already, for an engine that this process built before.
            return None
        own = tuple(inspect.signature(getattr(stock, "fn", stock)).parameters)
        if own not in new.forms:
            return f"its parameters are {', '.join(own)} instead of {', '.join(new.forms[0])}"
        return None


class Add(Replace):
    """An attribute that vLLM's object lacks, in some supported release at least; the maker is not
    told what others have."""

    kind = "adds"

    def verify(self) -> str | None:
        try:
            owner, separator, path = self.target.partition(":")
            if "." in path:
                resolve(owner + separator + path.rpartition(".")[0])
            else:
                importlib.import_module(owner)
        except (SeamError, ImportError) as error:
            return str(error)
        return None

    def _stock(self) -> Any:
        return None


@dataclass(eq=False)
class Retype(Seam):
    """The declared type of a class's field; `target` is the class, `annotation` names the type."""

    attribute: str = ""
    annotation: str = ""
    kind: ClassVar[str] = "retypes"
    _own: Any = field(default=None, init=False, repr=False)
    _new: Any = field(default=None, init=False, repr=False)

    @property
    def name(self) -> str:
        return f"{super().name}.{self.attribute}"

    def verify(self) -> str | None:
        problem = super().verify()
        if problem is None and self.attribute not in resolve(self.target).__annotations__:
            problem = f"{super().name} declares no {self.attribute}"
        return problem

    def _apply(self) -> None:
        problem = self.verify()
        if problem is not None:
            raise SeamError(problem)
        annotations = resolve(self.target).__annotations__
        self._own, self._new = annotations[self.attribute], resolve(self.annotation) | None
        annotations[self.attribute] = self._new

    def _undo(self) -> None:
        annotations = resolve(self.target).__annotations__
        if annotations.get(self.attribute) is not self._new:
            raise SeamError(f"{self.name} was changed by somebody else since; it is left as it is")
        annotations[self.attribute] = self._own


@dataclass(eq=False)
class Register(Seam):
    """A class registered over one of vLLM's attention backends; `target` is the backend's name in
    vLLM's enumeration, `path` the class.

    vLLM remembers which class it chose: an engine that this process built before has the stock
    backend there, and stock attention would silently take a tree for a chain.
    """

    path: str = ""
    kind: ClassVar[str] = "registers over"
    _own: Any = field(default=None, init=False, repr=False)

    def _apply(self) -> None:
        backend = resolve(self.target)
        self._own = backend.get_path() if backend.is_overridden() else None
        if self._own == self.path:
            raise SeamError(f"{self.name} is {self.path} already")
        self._register(backend, self.path)

    def _undo(self) -> None:
        backend = resolve(self.target)
        if backend.get_path() != self.path:
            raise SeamError(f"{self.name} was changed by somebody else since; it is left as it is")
        if self._own is None:
            backend.clear_override()
            self._forget_choices()
        else:
            self._register(backend, self._own)

    def _register(self, backend: Any, path: str) -> None:
        # Without it the override lands where nobody looks for such a backend's.
        is_mamba = "MambaAttentionBackendEnum" in self.target
        register = resolve("vllm.v1.attention.backends.registry:register_backend")
        register(backend, path, is_mamba=is_mamba)
        self._forget_choices()

    def _forget_choices(self) -> None:
        resolve("vllm.v1.attention.selector:_cached_get_attn_backend").cache_clear()
        resolve("vllm.v1.attention.selector:_cached_get_mamba_attn_backend").cache_clear()


class SeamSet:
    """Seams that are in place together or not at all."""

    def __init__(self, seams: Iterable[Seam]) -> None:
        self.seams = tuple(seams)
        self._applied: list[Seam] = []

    @property
    def is_applied(self) -> bool:
        """Whether all of them are in place."""
        return bool(self.seams) and len(self._applied) == len(self.seams)

    def verify(self) -> list[str]:
        """What is missing in the installed vLLM, one line per seam."""
        problems = ((seam, seam.verify()) for seam in self.seams)
        return [f"{seam.name} ({problem})" for seam, problem in problems if problem is not None]

    def apply(self) -> None:
        """Puts all in place, in order; nothing when they are already.

        Raises:
            SeamError: naming the seam that failed; those before it are taken back.
        """
        if self.is_applied:
            return
        for seam in self.seams:
            try:
                seam.apply()
            except Exception as error:
                left = self._roll_back()
                raise SeamError(f"{seam.name} could not be changed: {error}. {left}") from error
            self._applied.append(seam)

    def undo(self) -> None:
        """Takes all back, in reverse order.

        Raises:
            SeamError: naming those that somebody else has changed since; the others are undone.
        """
        left = self._roll_back()
        if left != _CLEAN:
            raise SeamError(left)

    def _roll_back(self) -> str:
        """Undoes what is in place; returns what is true afterwards."""
        problems = []
        while self._applied:
            try:
                self._applied.pop().undo()
            except Exception as error:
                problems.append(str(error))
        return _CLEAN if not problems else "Not taken back: " + "; ".join(problems)


_CLEAN = "All that was changed before it is taken back, vLLM is as it was."
