# SPDX-License-Identifier: Apache-2.0
"""Places at which a kernel's PTX synchronises, to be taken out one at a time.

`redundant` says of some that the kernel is as correct without them, from the flow of control alone:
on all paths, whatever the problem. What it does not say that of must be missed by a test.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from tests.ptx.ptx_program import Program

# Longer names before those that they begin with.
KINDS = (
    "bar.sync", "bar.warp.sync", "fence.proxy", "fence.mbarrier_init", "mbarrier.init",
    "mbarrier.arrive.expect_tx", "mbarrier.arrive", "mbarrier.try_wait", "cp.async.commit_group",
    "cp.async.wait_group", "wgmma.fence", "wgmma.commit_group", "wgmma.wait_group",
)  # fmt: skip
_KIND = re.compile(rf"(?<![\w.])(?:{'|'.join(map(re.escape, KINDS))})\b")
_NAMES = "|".join(re.escape(kind) for kind in KINDS if kind != "mbarrier.try_wait")
# A wait is a loop around its instruction.
_PLACE = re.compile(
    rf"mbarrier\.try_wait[^}}]*LAB_WAIT;|^[ \t]*(?:@!?%\w+[ \t]+)?(?:{_NAMES})\b[^;\n]*;",
    re.MULTILINE,
)
_WRITES = ("st.shared", "cp.async.ca", "cp.async.cg", "cp.async.bulk", "mbarrier.init")
_READS = ("ld.shared", "wgmma.mma_async")
# Work of before, of which only now it is known that it is done.
_ARRIVALS = ("cp.async.wait_group", "mbarrier.try_wait", "fence.proxy")


def kind_of(text: str) -> str | None:
    match = _KIND.search(text)
    return match.group() if match else None


@dataclass(frozen=True)
class Place:
    """Number `number` of its kind, in the order of the code, and where its text is."""

    kind: str
    number: int
    start: int
    end: int

    def removed(self, ptx: str) -> str:
        return ptx[: self.start] + ptx[self.end :]


def places_of(ptx: str) -> list[Place]:
    found: list[Place] = []
    for match in _PLACE.finditer(ptx):
        kind = kind_of(match.group())
        assert kind is not None
        number = sum(place.kind == kind for place in found)
        found.append(Place(kind, number, match.start(), match.end()))
    return found


class Flow:
    """The flow of control of one program."""

    def __init__(self, ptx: str) -> None:
        program = Program(ptx)
        self.code = [(opcode, operands) for _, opcode, operands in program.code]
        self.kinds = [kind_of(opcode) for opcode, _ in self.code]
        self.next: list[list[int]] = []
        for at, (guard, opcode, operands) in enumerate(program.code):
            follows = [] if opcode == "ret" or at + 1 == len(program.code) else [at + 1]
            if opcode.split(".")[0] == "bra":
                target = program.labels[operands[0]]
                follows = [target] if guard is None else [*follows, target]
            self.next.append(follows)
        self.before: list[list[int]] = [[] for _ in self.code]
        for at, follows in enumerate(self.next):
            for to in follows:
                self.before[to].append(at)

    def between(
        self, at: int, stops: Callable[[int], bool], *, backwards: bool = False
    ) -> tuple[set[int], set[int]]:
        """What lies between `at` and those that stop, and these, over all paths. `at` does not."""
        edges = self.before if backwards else self.next
        inside: set[int] = set()
        ends: set[int] = set()
        todo = list(edges[at])
        while todo:
            here = todo.pop()
            if here in inside or here in ends:
                continue
            if here != at and stops(here):
                ends.add(here)
                continue
            inside.add(here)
            todo.extend(edges[here])
        return inside, ends

    def any(self, inside: set[int], names: tuple[str, ...]) -> bool:
        return any(self.code[i][0].startswith(names) for i in inside)

    def redundant(self, place: Place) -> bool:
        indices = [i for i, kind in enumerate(self.kinds) if kind == place.kind]
        rule = {
            "bar.sync": self._barrier,
            "cp.async.commit_group": self._commit,
            "fence.proxy": self._fence,
        }.get(place.kind)
        return rule is not None and rule(indices[place.number])

    def _barrier(self, at: int) -> bool:
        """Between the barrier before, of the same threads, and this one nothing happens that others
        must not miss, or else nothing between this one and the next that could miss it.

        Words of mbarriers are no data. A warp fences what it wrote itself, so that a fence behind
        the barrier is as good without it, if all warps pass it.
        """
        barrier = lambda i: self.code[i][0] == "bar.sync"  # noqa: E731
        (earlier, first), (later, last) = (
            self.between(at, barrier, backwards=b) for b in (True, False)
        )
        if any(self.code[i] != self.code[at] for i in first | last):
            return False
        written = self.any(earlier, (*_WRITES, *_ARRIVALS))
        read = self.any(earlier, (*_READS, "wgmma.wait_group"))
        fences = {i for i in later if self.code[i][0].startswith("fence.proxy")}
        if fences:
            _, without = self.between(at, lambda i: barrier(i) or i in fences)
            missed = any(barrier(i) for i in without)
        else:
            missed = False
        return not (
            (written and (missed or self.any(later, (*_READS, *_WRITES, "mbarrier.arrive"))))
            or (read and self.any(later, _WRITES))
            or (self.any(earlier, ("mbarrier.init",)) and self.any(later, ("mbarrier.",)))
        )

    def _commit(self, at: int) -> bool:
        """The copies join the next group, before any wait; waits are for all groups."""
        wait, commit = "cp.async.wait_group", "cp.async.commit_group"
        if any(opcode == wait and operands != ["0"] for opcode, operands in self.code):
            return False
        inside, _ = self.between(at, lambda i: self.code[i][0] == commit)
        return not self.any(inside, (wait,))

    def _fence(self, at: int) -> bool:
        """All warps run the same code, and they fence again before they multiply, or have fenced
        since anything was written."""
        if any(c[0] == "bar.sync" and len(c[1]) > 1 for c in self.code):
            return False
        if self.any(set(range(len(self.code))), ("mbarrier.",)):
            return False
        fence = lambda i: self.code[i][0].startswith("fence.proxy")  # noqa: E731
        later, _ = self.between(at, fence)
        earlier, _ = self.between(at, fence, backwards=True)
        return not self.any(later, ("wgmma.mma_async",)) or not self.any(
            earlier, (*_WRITES, "cp.async.wait_group")
        )
