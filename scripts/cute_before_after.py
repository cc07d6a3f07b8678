# SPDX-License-Identifier: Apache-2.0
"""What the pipelined CuTe kernel takes beside the one before it, in docs/kernels_gpu.md.

git worktree add --detach ../before 2029bea
python -m scripts.cute_before_after ../before [--write]

Both are compiled by the same compiler and read by the same rules. `BEFORE` is the last commit whose
kernel cut all trees alike, loaded small pages by `cp.async` alone and had no producer; it knows the
same features of layers.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
import types
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from scripts import cute_resources, sass

BEFORE = "2029bea"
MARK = "cute before and after"
TITLES = (
    "registers / shared / stack / blocks",
    "a warp: issued / float / alu / special / memory",
    "issue",
    "tensor",
    "of 64 rows",
    "waits: products / copies / block",
)
_ALIAS = "cute_before"


class Case(NamedTuple):
    """A variant of before and those that serve the same launches now."""

    head_dim: int
    warpgroups: int
    page: int
    """Slots of a page: 16, or 64 and more."""
    window: bool = False

    @property
    def before(self) -> dict[str, Any]:
        """Arguments of the former `ForwardConfig`, whose copy engine needed pages of a tile."""
        return {**self._shape, "warpgroups": self.warpgroups, "tma": self.page == 64}

    @property
    def after(self) -> list[dict[str, Any]]:
        shape = {**self._shape, "box": self.page}
        schemes = [{"warpgroups": self.warpgroups}]
        if self.warpgroups > 1:
            schemes.append({"warpgroups": 2, "specialised": True})
        return [{**shape, **scheme} for scheme in schemes]

    @property
    def _shape(self) -> dict[str, Any]:
        return {"head_dim": self.head_dim, "dtype": "bfloat16", "window": self.window}


CASES = [
    *(Case(d, w, page) for d in (64, 128) for w in (1, 3) for page in (16, 64)),
    *(Case(128, w, 16, window=True) for w in (1, 3)),
]


def cells(cubin: bytes, config: Any) -> list[str]:
    """Of a variant of either state; see `TITLES`."""
    taken = " / ".join(map(str, cute_resources.resources(cubin, config)))
    _, pipes, issue, tensor, _, of_rows = cute_resources.loop(cubin, config)
    waits = " / ".join(map(str, sass.waits(cubin)))
    return [taken, pipes, issue, tensor, of_rows, waits]


def former(checkout: Path) -> tuple[Any, Any]:
    """`cute.config` and `cute.compile` of another work tree, beside those of this one."""
    package = types.ModuleType(_ALIAS)
    package.__path__ = [str(checkout / "kernels" / "src")]
    sys.modules[_ALIAS] = package
    return tuple(importlib.import_module(f"{_ALIAS}.cute.{n}") for n in ("config", "compile"))


def measure(checkout: Path) -> dict[str, list[str]]:
    """Rows of the table, compiled one by one."""
    from vllm_specplug.kernels.cute.config import ForwardConfig

    warnings.simplefilter("ignore")
    configs, compiler = former(checkout)
    rows = {}
    for case in CASES:
        then = configs.ForwardConfig(**case.before)
        rows[f"before: {then.name}"] = cells(compiler.compile_config(then).cubin, then)
        for arguments in case.after:
            now = ForwardConfig(**arguments)
            rows[f"after: {now.name}"] = cells(cute_resources.cubin(now), now)
    return rows


def table(rows: dict[str, list[str]]) -> str:
    compiler = f"Compiled by nvidia-cutlass-dsl {version('nvidia-cutlass-dsl')}"
    return f"{compiler}; before: commit `{BEFORE}`.\n\n{sass.table(rows, TITLES)}"


def changed(page: str) -> list[str]:
    """Rows of what is so now that no longer are those of the tables of resources and loops."""
    _, resources = cute_resources.recorded(page)
    loops = sass.recorded(page, cute_resources.LOOPS)
    found = []
    for case in CASES:
        for arguments in case.after:
            config = cute_resources.ForwardConfig(**arguments)
            row = sass.recorded(page, MARK).get(f"after: {config.name}")
            taken = " / ".join(map(str, resources[config.name]))
            loop = cute_resources.of_config(loops, config)
            assert loop is not None, config.name
            if row is None or row[:5] != [taken, *loop[1:4], loop[5]]:
                found.append(config.name)
    return found


def main() -> None:
    checkout = Path(sys.argv[1])
    head = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    commit = subprocess.run(head, check=True, capture_output=True, text=True).stdout.strip()
    if not commit.startswith(BEFORE):
        raise SystemExit(f"{checkout} is at {commit[:7]}; the table compares with {BEFORE}")
    text = table(measure(checkout))
    if "--write" not in sys.argv[2:]:
        print(text)
        return
    page = cute_resources.PAGE.read_text()
    cute_resources.PAGE.write_text(sass.replaced(page, MARK, text))


if __name__ == "__main__":
    main()
