# SPDX-License-Identifier: Apache-2.0
"""The tables of what proves the CUDA kernels without a GPU, in docs/kernels_proof.md.

python -m scripts.proof_table [--write]

Cases are counted by collecting them, and by the launches that each would make: see
`scripts.proof_recorder`. Variants that are compiled are those of the committed resource tables.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from scripts import proof_recorder, resource_table, sass

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "kernels_proof.md"
KERNELS, MODULES = "proofs by kernel", "proofs by module"
AGAIN = "run: python -m scripts.proof_table --write"
# In names of modules of tests/kernels that are about devices; beside them those with fixture
# `interpreter`.
DEVICES = "cuda|cute|triton|flash|fa4|graphs|pretended|ptx|sass|start_up_matrix|proof_table"

ATTENTION = (
    "window", "soft cap", "sinks", "slopes", "8-bit cache", "8-bit query", "scales of each token",
    "dense tail", "full mask", "behind FlashAttention", "parts", "float32", "float16", "bfloat16",
)  # fmt: skip
CUTE = (
    "64 rows", "192 rows", "128 rows, specialised", "boxes of 16", "boxes of 64", "window",
    "soft cap", "sinks", "slopes", "dense tail", "full mask", "parts", "float16", "bfloat16",
)  # fmt: skip
LABELS = {"tree_attn": "Triton attention", "cute": "CuTe attention", "cute merge": "CuTe merge"}
# Kernel -> its name in the table of resources, where that is another.
RESOURCES = {"scan": "ngram_scan", "branches": "ngram_branches", "merge": "merge_branches"}
# What names in the table of Triton's resources call what cases are told apart by.
_TRITON_WORDS = {
    "window": "window", "soft cap": "soft cap", "sinks": "sinks", "slopes": "alibi",
    "8-bit cache": "fp8(?! tokens| query)", "8-bit query": "fp8 query",
    "scales of each token": "tokens", "dense tail": "dense", "behind FlashAttention": "prefix",
    "float32": "fp32", "float16": "fp16", "bfloat16": "bf16",
}  # fmt: skip
Notes = proof_recorder.Notes


def device_modules() -> list[Path]:
    return sorted(
        path
        for path in (ROOT / "tests" / "kernels").glob("test_*.py")
        if "_cpu" not in path.stem
        and (re.search(DEVICES, path.stem) or re.search(r"\binterpreter\b", path.read_text()))
    )


def notes(*, launches: bool) -> Notes:
    """Of every case of `device_modules`, full tier included.

    Raises:
        RuntimeError: with pytest's last words.
    """
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-m", "pytest", "-p", "scripts.proof_recorder", "-q", "--tb=no"]
        command += ["-p", "no:cacheprovider", "-p", "no:xdist", "--timeout=120", "-rN"]
        command += ["-W", "ignore", *([] if launches else ["--collect-only"])]
        run = subprocess.run(
            [*command, *map(str, device_modules())],
            cwd=ROOT,
            env={**os.environ, proof_recorder.VARIABLE: file.name},
            capture_output=True,
            text=True,
        )
        found = Path(file.name).read_text()
        # Cases fail for want of results; a module that does not collect is another matter.
        if not found or "rror collecting" in run.stdout or "rrors during collection" in run.stdout:
            raise RuntimeError((run.stdout + run.stderr)[-3000:])
        made: Notes = json.loads(found)
        return made


def cell(cases: Iterable[dict[str, Any]]) -> str:
    """Of the default tier + of the full one alone; empty without any."""
    tiers = [bool(case["full"]) for case in cases]
    default, full = tiers.count(False), tiers.count(True)
    return f"{default} + {full}" if full else str(default or "")


def _launching(found: Notes, kernel: str, how: str, aspect: str | None) -> list[dict[str, Any]]:
    return [
        case
        for case in found.values()
        if any(
            name == kernel and at == how and (aspect is None or aspect in variant)
            for name, at, variant in case["launches"]
        )
    ]


def _row(found: Notes, kernel: str, aspect: str | None, compiled: str) -> list[str]:
    hows = ("interpreted", "sm_80", "sm_90")
    by_how = [_launching(found, kernel, how, aspect) for how in hows]
    every = list({id(case): case for cases in by_how for case in cases}.values())
    controls = [case for case in every if case["control"]]
    return [
        *map(cell, by_how),
        cell(case for case in controls if not case["damage"]),
        cell(case for case in controls if case["damage"]),
        compiled,
    ]


def compiled_triton(kernel: str, aspect: str | None) -> str:
    """Rows of the table of resources, over all architectures."""
    _, recorded = resource_table.recorded(resource_table.PAGE.read_text())
    own = RESOURCES.get(kernel, kernel)
    if aspect == "parts":
        word: Callable[[str], bool] = lambda name: not re.search("dense|prefix", name)  # noqa: E731
    elif aspect is None:
        word = lambda name: True  # noqa: E731
    elif aspect in _TRITON_WORDS or aspect.startswith("Dh "):
        pattern = _TRITON_WORDS.get(aspect) or f"dim {aspect.removeprefix('Dh ')}"
        word = lambda name: bool(re.search(rf"\b{pattern}\b", name))  # noqa: E731
    else:
        return ""
    count = sum(
        (name == own or name.startswith(f"{own} ")) and word(name)
        for rows in recorded.values()
        for name in rows
    )
    return str(count or "")


def compiled_cute(found: Notes, kernel: str, aspect: str | None) -> str:
    """Cases of the compiled variants, by their names."""
    words = {
        "64 rows": "_w1_", "192 rows": "_w3_", "128 rows, specialised": "_ws", "window": "_window",
        "boxes of 16": "_box16", "boxes of 64": "_box64", "soft cap": "_soft_cap",
        "slopes": "_alibi", "float16": "_float16", "bfloat16": "_bfloat16", None: "",
    }  # fmt: skip
    if aspect is not None and aspect.startswith("Dh "):
        words[aspect] = f"_d{aspect.removeprefix('Dh ')}_"
    if aspect not in words:
        return ""
    start = "combine_" if kernel == "cute merge" else "tree_attn_"
    return cell(
        case
        for name, case in found.items()
        if case["module"] == "test_cute_compile" and f"[{start}" in name and words[aspect] in name
    )


def label(kernel: str, aspect: str | None = None) -> str:
    name = LABELS.get(kernel) or f"`{RESOURCES.get(kernel, kernel)}`"
    return name if aspect is None else f"{name}: {aspect}"


def by_kernel(found: Notes) -> str:
    """Lines of kernels, and of what cases of the attention are told apart by."""
    launched = [(k, v) for case in found.values() for k, _, v in case["launches"]]
    names = list(dict.fromkeys(name for name, _ in launched))
    rows = {}
    for kernel in sorted(names, key=lambda name: (name != "tree_attn", "cute" not in name, name)):
        cute = kernel.startswith("cute")
        sizes = {a for name, variant in launched if name == kernel for a in variant if "Dh " in a}
        aspects = {"tree_attn": ATTENTION, "cute": CUTE}.get(kernel, ())
        heads = sorted(sizes, key=lambda size: int(size.removeprefix("Dh ")))
        for aspect in (None, *aspects, *(heads if aspects else ())):
            compiled = (
                compiled_cute(found, kernel, aspect) if cute else compiled_triton(kernel, aspect)
            )
            rows[label(kernel, aspect)] = _row(found, kernel, aspect, compiled)
    titles = (
        "interpreted", "stepped on sm_80", "stepped on sm_90", "wrong inputs", "damaged program",
        "compiled",
    )  # fmt: skip
    return sass.table(rows, titles)


def _first_sentence(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    first = re.split(r"(?<=[.:;])\s", text.replace("\n", " "), maxsplit=1)[0]
    return first.rstrip(".:;")


def by_module(found: Notes) -> str:
    rows = {}
    for path in device_modules():
        cases = [case for case in found.values() if case["module"] == path.stem]
        controls = [case for case in cases if case["control"]]
        rows[f"`{path.name}`"] = [_first_sentence(path), cell(cases), cell(controls)]
    text = sass.table(rows, ("what", "cases", "of these, controls"))
    return text.replace("| Kernel |", "| Module |", 1)


def main() -> None:
    found = notes(launches=True)
    tables = {KERNELS: by_kernel(found), MODULES: by_module(found)}
    if "--write" not in sys.argv[1:]:
        print(*tables.values(), sep="\n\n")
        return
    page = PAGE.read_text()
    for mark, text in tables.items():
        page = sass.replaced(page, mark, text)
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
