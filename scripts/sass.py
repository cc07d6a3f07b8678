# SPDX-License-Identifier: Apache-2.0
"""What the inner loop of compiled attention costs a scheduler of compute capability 9.0 at least.

The loop is read from machine code: the first innermost one with matrix products, which is the one
over full tiles of the context, on the path with the fewest instructions that runs all its products.
Products of float32 are no matrix instructions but multiplications with additions of every lane.
Each of the four schedulers of a multiprocessor issues one instruction a cycle, and a pipe takes a
warp's instruction over several cycles (CUDA programming guide, arithmetic instructions: results a
cycle and multiprocessor). Latencies, memory and stalls are not in it: no kernel is faster, ours
may be slower.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

SCHEDULERS, WARP = 4, 32
# Multiplications with additions of a scheduler's tensor core in a cycle, 16-bit factors.
TENSOR = 512

_FLOAT = {"FADD", "FMUL", "FFMA", "HADD2", "HMUL2", "HFMA2"}
_MULTIPLY = {"IMAD"}
_ALU = {
    "FMNMX", "FSEL", "FSET", "FSETP", "IABS", "IADD3", "ISETP", "LEA", "LOP3", "PRMT", "SEL",
    "SGXT", "SHF", "VIADD", "VIADDMNMX", "VIMNMX", "VIMNMX3",
}  # fmt: skip
_SPECIAL = {"MUFU", "POPC", "FLO", "BREV"}
_MEMORY = {
    "LDC", "LDG", "LDGSTS", "LDS", "LDSM", "SHFL", "STG", "STS", "STSM", "UTMALDG", "SYNCS",
}  # fmt: skip


class Instruction(NamedTuple):
    opcode: str
    """With its suffixes."""
    conditional: bool
    target: str | None
    """Label of a branch."""

    @property
    def name(self) -> str:
        return self.opcode.partition(".")[0]

    @property
    def products(self) -> int:
        """Multiplications with additions that a warp's part of it makes."""
        if self.name == "HGMMA":
            return 16 * 16 * int(re.findall(r"64x(\d+)x16", self.opcode)[0])
        if self.name == "HMMA":
            assert ".16816." in self.opcode, self.opcode
            return 16 * 8 * 16
        return 0

    @property
    def lane_products(self) -> int:
        """Multiplications with additions in float32 that a warp's lanes make."""
        return WARP * (self.name == "FFMA")


@dataclass(frozen=True)
class Loop:
    """An iteration of a warp: instructions, and cycles that pipes of its scheduler take."""

    issued: int
    float_cycles: int
    alu_cycles: int
    special_cycles: int
    memory: int
    """Instructions; what they cost depends on the data."""
    tensor_cycles: int
    products: int
    """Multiplications with additions that a warp makes, of matrices or, without any, of lanes."""

    @property
    def cycles(self) -> int:
        """That the scheduler is taken up besides its tensor core."""
        return max(self.issued, self.float_cycles, self.alu_cycles, self.special_cycles)

    def row(self, rows: int, columns: int, head_dim: int, warps: int) -> list[str]:
        """Cells of the table, for a block of `warps` whose tile has `rows` rows and `columns`."""
        made = self.products * warps
        needed = 2 * rows * columns * head_dim
        assert needed <= made <= 2 * needed, "not one tile an iteration"
        of_scheduler = warps // SCHEDULERS
        taken, tensor = self.cycles * of_scheduler, self.tensor_cycles * of_scheduler
        per_column = max(taken, tensor) / columns
        parts = (self.issued, self.float_cycles, self.alu_cycles, self.special_cycles, self.memory)
        return [
            f"{rows} x {columns}",
            " / ".join(map(str, parts)),
            str(taken),
            str(tensor),
            f"{per_column:.1f}",
            f"{per_column / rows * 64:.1f}",
        ]


TITLES = (
    "tile",
    "a warp: issued / float / alu / special / memory",
    "issue",
    "tensor",
    "column",
    "of 64 rows",
)


def inner_loop(cubin: bytes, float32: bool = False) -> Loop:
    """Of the first loop with products in machine code for sm_90; in `float32`, with products of
    lanes."""
    return _inner_loop(*_listing(cubin), float32)


def _inner_loop(code: list[Instruction], labels: dict[str, int], float32: bool) -> Loop:
    work = _lane_products if float32 else _products
    return _count(_shortest(code, labels, *_first_loop(code, labels, work), work), work)


class Waits(NamedTuple):
    """Instructions of an iteration at which a warp waits. A tile of the copy engine is waited for
    besides, at its mbarrier, which not every iteration has."""

    products: int
    """For its own warpgroup's."""
    copies: int
    """For small copies of its own thread."""
    block: int
    """For all threads of the block."""


def waits(cubin: bytes) -> Waits:
    """On the path of `inner_loop`."""
    code, labels = _listing(cubin)
    return _waits(_shortest(code, labels, *_first_loop(code, labels)))


def _waits(path: list[Instruction]) -> Waits:
    names = [instruction.opcode for instruction in path]
    return Waits(
        sum(name.startswith("WARPGROUP.DEPBAR") for name in names),
        sum(name.startswith("DEPBAR") for name in names),
        sum(name.startswith(("BAR.SYNC", "BAR.RED")) for name in names),
    )


def producer_slots(cubin: bytes) -> int:
    """Instructions that a warp which only loads issues for a tile, by the copy engine alone."""
    code, labels = _listing(cubin)
    first, last = _first_loop(code, labels, _boxes)
    return len(_shortest(code, labels, first, last, _boxes))


def _listing(cubin: bytes) -> tuple[list[Instruction], dict[str, int]]:
    """Instructions and where labels point; needs the nvdisasm in Triton's package."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "-c", file.name]
        listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return parse(listing)


def parse(listing: str) -> tuple[list[Instruction], dict[str, int]]:
    """`nvdisasm -c` of one kernel."""
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    pattern = re.compile(r"\s*/\*[0-9a-f]+\*/\s+(@!?U?P\w+\s+)?([A-Z]\w*(?:\.[\w:]+)*)(.*?);")
    for line in listing.splitlines():
        if match := re.match(r"(\.L_\w+):", line):
            labels[match[1]] = len(code)
        elif match := pattern.match(line):
            guard, opcode, rest = match.groups()
            target = re.search(r"`\((\.L_\w+)\)", rest) if opcode.startswith("BRA") else None
            # A branch may have a second predicate among its operands.
            conditional = guard is not None or bool(re.search(r"\bU?P\d", rest))
            code.append(Instruction(opcode, conditional, target and target[1]))
    return code, labels


def _products(instruction: Instruction) -> int:
    return instruction.products


def _lane_products(instruction: Instruction) -> int:
    return instruction.lane_products


def _boxes(instruction: Instruction) -> int:
    return instruction.name == "UTMALDG"


def _first_loop(
    code: list[Instruction],
    labels: dict[str, int],
    work: Callable[[Instruction], int] = _products,
) -> tuple[int, int]:
    """First and last instruction of the first innermost loop with such work."""
    loops = []
    for at, instruction in enumerate(code):
        start = labels.get(instruction.target or "", at + 1)
        if start <= at and any(map(work, code[start : at + 1])):
            loops.append((start, at))
    inner = [
        (start, end)
        for start, end in loops
        if not any((s, e) != (start, end) and start <= s and e <= end for s, e in loops)
    ]
    assert inner, f"no loop with {work.__name__.strip('_')}"
    return min(inner)


def _shortest(
    code: list[Instruction],
    labels: dict[str, int],
    first: int,
    last: int,
    work: Callable[[Instruction], int] = _products,
) -> list[Instruction]:
    """The path through a loop with most work and, of these, fewest instructions. Branches out of
    the loop and those of a warp that diverges are not taken."""
    best: dict[int, tuple[int, int]] = {first: (0, 0)}
    came: dict[int, int] = {}
    for at in range(first, last + 1):
        if at not in best:
            continue
        instruction = code[at]
        done, issued = best[at]
        reached = (done - work(instruction), issued + 1)
        follow = []
        goes_on = instruction.conditional or instruction.target is None
        if goes_on or instruction.opcode.startswith("BRA.DIV"):
            follow.append(at + 1)
        if instruction.target and not instruction.opcode.startswith("BRA.DIV"):
            follow.append(labels[instruction.target])
        if at == last:
            break
        for place in follow:
            if at < place <= last and reached < best.get(place, (1, 0)):
                best[place], came[place] = reached, at
    assert last in best, "the end of the loop is not reached"
    path, at = [code[last]], last
    while at != first:
        at = came[at]
        path.append(code[at])
    return path


def _count(path: list[Instruction], work: Callable[[Instruction], int] = _products) -> Loop:
    counts = Counter(instruction.name for instruction in path)

    def of(names: set[str]) -> int:
        return sum(counts[name] for name in names)

    products = sum(map(work, path))
    assert products, "no products in the loop"
    multiplied = of(_MULTIPLY)
    return Loop(
        issued=len(path),
        # Two halves of 16 lanes, of which only one multiplies integers.
        float_cycles=max(of(_FLOAT) + multiplied, 2 * multiplied),
        alu_cycles=2 * of(_ALU),
        special_cycles=8 * of(_SPECIAL),
        memory=of(_MEMORY),
        tensor_cycles=sum(map(_products, path)) // TENSOR,
        products=products,
    )


def table(rows: dict[str, list[str]], titles: Sequence[str] = TITLES) -> str:
    lines = [f"| Kernel | {' | '.join(titles)} |", "|---|" + "---|" * len(titles)]
    lines += [f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()]
    return "\n".join(lines)


def recorded(page: str, mark: str) -> dict[str, list[str]]:
    """The rows between `<!-- mark -->` and its end."""
    block = re.search(f"<!-- {mark} -->(.*)<!-- /{mark} -->", page, re.DOTALL)
    assert block, f"no table of {mark}"
    found = {}
    for line in block[1].splitlines():
        if line.startswith("| ") and not line.startswith("| Kernel"):
            name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
            found[name] = cells
    return found


def replaced(page: str, mark: str, text: str) -> str:
    """`page` with `text` between the marks."""
    block = f"<!-- {mark} -->\n{text}\n<!-- /{mark} -->"
    return re.sub(f"<!-- {mark} -->.*<!-- /{mark} -->", lambda _: block, page, flags=re.DOTALL)


def difference(now: list[str], then: list[str], *, same_compiler: bool) -> str | None:
    """Where a loop is not as recorded; of another compiler, where its cycles grew by a quarter."""
    worse = now[0] != then[0] or any(
        int(now[i]) > 1.25 * int(then[i]) for i in (TITLES.index("issue"), TITLES.index("tensor"))
    )
    return f"{now}, recorded {then}" if (now != then if same_compiler else worse) else None
