# SPDX-License-Identifier: Apache-2.0
"""The tables of what compiled Triton kernels take, in docs/kernels_triton.md: resources, and the
issue cycles of the attention's inner loops on sm_90.

python -m scripts.resource_table [--write]

With the table goes a digest of the sources, as not every test run compiles for every architecture.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from scripts import sass, source_digest

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "kernels_triton.md"
ARCHITECTURES = (80, 90, 100)
_START, _END = "<!-- resources -->", "<!-- /resources -->"
LOOPS = "triton loops"

# Kernel -> registers a thread, bytes of shared memory, bytes spilled.
Resources = dict[str, tuple[int, int, int]]


def compiled(arch: int) -> list[dict[str, Any]]:
    """`tests.kernels.triton_aot.Compiled` of each kernel for sm_`arch`; minutes, where Triton has
    not kept them.

    Raises:
        RuntimeError: with the compiler's last words.
    """
    run = subprocess.run(
        [sys.executable, "-m", "tests.kernels.triton_aot", str(arch)],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1"},
        capture_output=True,
        text=True,
    )
    if run.returncode:
        raise RuntimeError(run.stderr[-3000:])
    return [json.loads(line) for line in run.stdout.splitlines()]


def sources() -> list[Path]:
    """Of the kernels, and of what is compiled of them."""
    kernels = sorted((ROOT / "kernels" / "src").glob("*_triton*.py"))
    return [*kernels, ROOT / "tests" / "kernels" / "triton_aot.py"]


def digest() -> str:
    return source_digest.digest(sources(), constants_alone=lambda path: False)


def resources(kernels: list[dict[str, Any]]) -> Resources:
    found = {k["name"]: (k["registers"], k["shared_memory"], k["spilled_bytes"]) for k in kernels}
    assert len(found) == len(kernels), "two kernels have one name"
    return found


def loops(kernels: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Rows of the table of inner loops."""
    return {k["name"]: k["loop"] for k in kernels if k["loop"]}


def table(by_arch: dict[int, Resources]) -> str:
    """Rows of kernels: registers / shared memory / spills for each architecture."""
    names = list(dict.fromkeys(name for found in by_arch.values() for name in found))
    rows = [
        f"Compiled by Triton {version('triton')} " + source_digest.stamp(digest()),
        "",
        f"| Kernel | {' | '.join(f'sm_{arch}' for arch in by_arch)} |",
        "|---|" + "---|" * len(by_arch),
    ]
    for name in names:
        cells = [found.get(name) for found in by_arch.values()]
        shown = ["" if cell is None else " / ".join(map(str, cell)) for cell in cells]
        rows.append(f"| {name} | {' | '.join(shown)} |")
    return "\n".join(rows)


def recorded(page: str) -> tuple[str, dict[int, Resources]]:
    """Triton's version and what the table in `page` says."""
    block = re.search(f"{_START}(.*){_END}", page, re.DOTALL)
    assert block, "no table of resources"
    release = re.search(r"Triton ([\w.+]+) from", block[1])
    assert release, "no version above the table of resources"
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in block[1].splitlines()
        if line.startswith("| ")
    ]
    found: dict[int, Resources] = {}
    for column, title in enumerate(lines[0][1:], 1):
        found[int(title.removeprefix("sm_"))] = {
            line[0]: tuple(map(int, line[column].split("/")))  # type: ignore[misc]  # three
            for line in lines[1:]
            if line[column]
        }
    return release[1], found


def differences(found: Resources, wanted: Resources, *, same_compiler: bool) -> list[str]:
    """Where kernels are not as recorded; of another compiler, where they take a quarter more and
    some, or spill more."""
    lines = [f"{name}: only in one of both" for name in found.keys() ^ wanted.keys()]
    for name in found.keys() & wanted.keys():
        now, then = found[name], wanted[name]
        more = any(n > 1.25 * t + some for n, t, some in zip(now, then, (8, 2048, 0), strict=True))
        if now != then if same_compiler else more:
            lines.append(f"{name}: {now}, recorded {then}")
    return sorted(lines)


def main() -> None:
    kernels = {arch: compiled(arch) for arch in ARCHITECTURES}
    text = table({arch: resources(found) for arch, found in kernels.items()})
    inner = sass.table(loops(kernels[90]))
    if "--write" not in sys.argv[1:]:
        print(text, inner, sep="\n\n")
        return
    block = f"{_START}\n{text}\n{_END}"
    page = re.sub(f"{_START}.*{_END}", lambda _: block, PAGE.read_text(), flags=re.DOTALL)
    PAGE.write_text(sass.replaced(page, LOOPS, inner))


if __name__ == "__main__":
    main()
