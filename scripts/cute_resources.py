# SPDX-License-Identifier: Apache-2.0
"""The tables of what compiled CuTe kernels take, in docs/kernels_gpu.md: resources, and the issue
cycles of their inner loops.

python -m scripts.cute_resources [--write] [--jobs N]

With the tables goes a digest of the sources, so that a test which compiles nothing notices tables
that were not written again. Minutes; what was compiled is kept under $SPECPLUG_CACHE, so that an
interrupted run goes on.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
import warnings
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from scripts import sass, source_digest
from vllm_specplug.kernels.cute.config import (
    BOXES,
    DTYPES,
    HEAD_DIMS,
    SCHEMES,
    SHARED_RESERVED,
    SHARED_TOTAL,
    TILE_N,
    CombineConfig,
    ForwardConfig,
    all_configs,
)
from vllm_specplug.kernels.cute.store import (
    StoredKernel,
    as_stored,
    cache_root,
    read,
    sources,
    write,
)

PAGE = Path(__file__).resolve().parent.parent / "docs" / "kernels_gpu.md"
_START, _END = "<!-- cute resources -->", "<!-- /cute resources -->"
LOOPS = "cute loops"
PRODUCERS = "cute producers"
ON_DEMAND = "cute on demand"
TAKEN = "registers / shared / stack / blocks"
# Of a multiprocessor of compute capability 9.0: registers, threads, and what a thread's registers
# are given out in.
REGISTERS, THREADS, REGISTER_UNIT = 65536, 2048, 8


def on_demand_configs() -> list[ForwardConfig]:
    """Variants that are compiled where they are asked for, as far as they are recorded: with boxes
    of the smallest page, at the head size with the fewest registers to spare, elsewhere all
    features at once."""
    every = {"window": True, "soft_cap": True, "alibi": True}
    some = ({"soft_cap": True}, {"alibi": True}, {"window": True, "soft_cap": True})
    return [
        ForwardConfig(
            head_dim, DTYPES[0], warpgroups, BOXES[0], specialised=specialised, **features
        )
        for head_dim in HEAD_DIMS
        for features in ((*some, every) if head_dim == HEAD_DIMS[-1] else (every,))
        for warpgroups, specialised in SCHEMES
    ]


def digest(paths: Iterable[Path]) -> str:
    """Of a module outside the kernel's folder constants alone count."""
    return source_digest.digest(paths, constants_alone=lambda path: path.parent.name != "cute")


class Resources(NamedTuple):
    """What a kernel takes, as the assembler says; blocks follow from it."""

    registers: int
    shared_bytes: int
    stack_bytes: int
    blocks: int
    """That fit a multiprocessor at once."""


def resources(cubin: bytes, config: ForwardConfig | CombineConfig) -> Resources:
    """Of machine code; needs the cuobjdump in Triton's package."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "-res-usage", file.name]
        listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    (usage,) = re.findall(r"REG:(\d+) STACK:(\d+)", listing)
    registers, stack = map(int, usage)
    rounded = -(-registers // REGISTER_UNIT) * REGISTER_UNIT
    blocks = min(
        REGISTERS // (rounded * config.threads),
        SHARED_TOTAL // (config.shared_bytes + SHARED_RESERVED),
        THREADS // config.threads,
    )
    return Resources(registers, config.shared_bytes, stack, blocks)


def loop(cubin: bytes, config: ForwardConfig) -> list[str]:
    """The cells of the table of inner loops."""
    warps = config.threads // sass.WARP
    return sass.inner_loop(cubin).row(config.tile_m, TILE_N, config.head_dim, warps)


def producer(cubin: bytes, config: ForwardConfig) -> list[str]:
    """The cells of the table of producers."""
    return [str(config.boxes), str(sass.producer_slots(cubin))]


def recorded_producer(page: str, config: ForwardConfig) -> list[str] | None:
    return of_config(sass.recorded(page, PRODUCERS), config)


def of_config(found: dict[str, list[str]], config: ForwardConfig) -> list[str] | None:
    return found.get(config.name) or found.get(config.name.replace(config.dtype, "*"))


def recorded_loop(page: str, config: ForwardConfig) -> list[str] | None:
    """What the table in `page` says; one line serves all dtypes where they are equal."""
    return of_config(sass.recorded(page, LOOPS), config)


def loop_table(found: dict[str, list[str]], titles: Sequence[str] = sass.TITLES) -> str:
    rows = {}
    for name, cells in found.items():
        (own,) = (dtype for dtype in DTYPES if f"_{dtype}_" in name)
        others = [found[name.replace(own, dtype)] for dtype in DTYPES]
        rows[name.replace(own, "*") if others == [cells] * len(others) else name] = cells
    return sass.table(rows, titles)


def table(found: dict[str, Resources]) -> str:
    """Rows of variants, columns of dtypes: registers / shared memory / stack / blocks."""
    rows = [
        f"Compiled by nvidia-cutlass-dsl {version('nvidia-cutlass-dsl')} "
        + source_digest.stamp(digest(sources())),
        "",
        f"| Kernel | {' | '.join(DTYPES)} |",
        "|---|" + "---|" * len(DTYPES),
    ]
    for name in found:
        if DTYPES[0] in name:
            cells = [found[name.replace(DTYPES[0], dtype)] for dtype in DTYPES]
            row = " | ".join(map(shown, cells))
            rows.append(f"| {name.replace(DTYPES[0], '*')} | {row} |")
    return "\n".join(rows)


def recorded(page: str) -> tuple[str, dict[str, Resources]]:
    """The compiler's version and what the table in `page` says."""
    block = re.search(f"{_START}(.*){_END}", page, re.DOTALL)
    assert block, "no table of resources"
    release = re.search(r"dsl ([\w.+]+) from", block[1])
    assert release, "no version above the table of resources"
    found = {}
    for line in block[1].splitlines():
        if line.startswith("| ") and "/" in line:
            name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
            for dtype, cell in zip(DTYPES, cells, strict=True):
                numbers = Resources(*map(int, cell.split("/")))
                found[name.replace("*", dtype)] = numbers
    return release[1], found


def recorded_on_demand(page: str) -> dict[str, tuple[Resources, list[str]]]:
    """What is taken, and the cells of the inner loop."""
    return {
        name: (Resources(*map(int, cells[0].split("/"))), cells[1:])
        for name, cells in sass.recorded(page, ON_DEMAND).items()
    }


def shown(taken: Resources) -> str:
    return " / ".join(map(str, taken))


def difference(now: Resources, then: Resources, *, same_compiler: bool) -> str | None:
    """Where a kernel is not as recorded; of another compiler, where it takes a quarter more
    registers, spills, or fewer blocks fit."""
    worse = (
        now.registers > 1.25 * then.registers
        or now.stack_bytes > then.stack_bytes
        or now.blocks < then.blocks
    )
    return f"{now}, recorded {then}" if (now != then if same_compiler else worse) else None


class _Measured(NamedTuple):
    taken: Resources
    loop: list[str]
    producer: list[str]


def cubin(config: ForwardConfig | CombineConfig) -> bytes:
    """Of this compiler; the store's own cache may hold another's."""
    from vllm_specplug.kernels.cute.compile import compile_config

    root = cache_root() or Path(tempfile.gettempdir())
    folder = root / "resources" / version("nvidia-cutlass-dsl")
    kept = read(folder, config.name)
    if not isinstance(kept, StoredKernel):
        kept = as_stored(compile_config(config))
        write(folder, kept)
    return kept.cubin


def _measure(config: ForwardConfig | CombineConfig) -> _Measured:
    warnings.simplefilter("ignore")
    made = cubin(config)
    attends = isinstance(config, ForwardConfig)
    return _Measured(
        resources(made, config),
        loop(made, config) if attends else [],
        producer(made, config) if attends and config.specialised else [],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="into docs/kernels_gpu.md")
    parser.add_argument("--jobs", type=int, default=2, help="variants that are compiled at once")
    arguments = parser.parse_args()
    configs, asked = all_configs(), on_demand_configs()
    with ProcessPoolExecutor(arguments.jobs) as pool:
        measured = list(pool.map(_measure, [*configs, *asked]))
    found = {config.name: each for config, each in zip(configs, measured, strict=False)}
    text = table({name: each.taken for name, each in found.items()})
    loops = loop_table({name: each.loop for name, each in found.items() if each.loop})
    producers = loop_table(
        {name: each.producer for name, each in found.items() if each.producer},
        ("boxes of K", "issued"),
    )
    on_demand = sass.table(
        {
            config.name: [shown(each.taken), *each.loop]
            for config, each in zip(asked, measured[len(configs) :], strict=True)
        },
        (TAKEN, *sass.TITLES),
    )
    if not arguments.write:
        print(text, loops, producers, on_demand, sep="\n\n")
        return
    block = f"{_START}\n{text}\n{_END}"
    page = re.sub(f"{_START}.*{_END}", lambda _: block, PAGE.read_text(), flags=re.DOTALL)
    for mark, rows in ((LOOPS, loops), (PRODUCERS, producers), (ON_DEMAND, on_demand)):
        page = sass.replaced(page, mark, rows)
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
