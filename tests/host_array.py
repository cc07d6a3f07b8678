# SPDX-License-Identifier: Apache-2.0
"""NumPy arrays over pinned memory that tell of what is read and written through them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

_READING = (
    "tolist", "item", "copy", "astype", "tobytes", "sum", "max", "min", "any", "all", "nonzero",
    "cumsum", "argsort", "argmax", "repeat", "take", "__int__", "__float__", "__bool__",
    "__index__", "__contains__", "__iter__",
)  # fmt: skip
_WRITING = ("fill", "put", "sort", "partition", "itemset")


class HostArray(np.ndarray):
    """An array that calls `noted(address, end, writes)`; so do its views.

    What NumPy lends without a call, to `np.asarray` or the buffer protocol, is not noted.
    """

    noted: Callable[[int, int, bool], None]

    def __array_finalize__(self, base: Any) -> None:
        if isinstance(base, HostArray):
            self.noted = base.noted

    def note(self, writes: bool) -> None:
        if self.size and hasattr(self, "noted"):
            self.noted(*np.lib.array_utils.byte_bounds(self.view(np.ndarray)), writes)

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        if not isinstance(found, HostArray) or found.base is None:
            # No view: values.
            self.note(writes=False)
            return found.view(np.ndarray) if isinstance(found, HostArray) else found
        return found

    def __setitem__(self, key: Any, value: Any) -> None:
        part = super().__getitem__(key)
        # Of an index that is no slice, all.
        is_view = isinstance(part, HostArray) and part.base is not None
        (part if is_view else self).note(writes=True)
        super().__setitem__(key, _bare(value))

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        out = kwargs.get("out")
        if out is not None:
            for array in _within(out):
                array.note(writes=True)
            kwargs["out"] = tuple(_plain(array) for array in out)
        result = getattr(ufunc, method)(*_bare(inputs), **kwargs)
        return out[0] if out is not None and len(out) == 1 else result

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        kwargs = dict(kwargs)
        out = kwargs.pop("out", None)
        if isinstance(out, HostArray):
            out.note(writes=True)
        if out is not None:
            kwargs["out"] = _plain(out)
        if func in (np.copyto, np.put, np.fill_diagonal) and isinstance(args[0], HostArray):
            args[0].note(writes=True)
            args = (_plain(args[0]), *args[1:])
        return func(*_bare(args), **_bare(kwargs))


def _within(tree: Any) -> Iterator[HostArray]:
    if isinstance(tree, HostArray):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for part in tree:
            yield from _within(part)


def _plain(array: Any) -> Any:
    return array.view(np.ndarray) if isinstance(array, HostArray) else array


def _bare(tree: Any) -> Any:
    """Without arrays that tell: they were read."""
    if isinstance(tree, HostArray):
        tree.note(writes=False)
        return _plain(tree)
    if type(tree) in (tuple, list):
        return type(tree)(_bare(part) for part in tree)
    if type(tree) is dict:
        return {name: _bare(part) for name, part in tree.items()}
    return tree


def _telling(name: str, writes: bool) -> Callable[..., Any]:
    stock = getattr(np.ndarray, name)

    def call(self: HostArray, *args: Any, **kwargs: Any) -> Any:
        self.note(writes)
        return stock(_plain(self), *args, **kwargs)

    return call


for _names, _writes in ((_READING, False), (_WRITING, True)):
    for _name in _names:
        if hasattr(np.ndarray, _name):
            setattr(HostArray, _name, _telling(_name, _writes))
