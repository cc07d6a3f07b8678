# SPDX-License-Identifier: Apache-2.0
"""Runs the checks as on CUDA on a GPU; see `cuda_device`.

    python -m tests.e2e.cuda.cuda_on_gpu --out OUT [--jobs 6] [--modules a,b] [--seconds 200]

Each module is a process of its own, several at once on the one GPU, with its log in OUT/MODULE.log
and its results in OUT/MODULE.json. One that takes longer than `--seconds` is killed; what it had
found by then is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

REPO = Path(__file__).resolve().parents[3]
# Those that take longest first.
MODULES = (
    "cuda_checks",
    "cuda_vision_checks",
    "cuda_graph_checks",
    "cuda_window_checks",
    "cuda_hybrid_checks",
    "cuda_self_checks",
    "cuda_draft_checks",
    "cuda_token_scale_checks",
)


def run_module(module: str, out: Path, seconds: float) -> str:
    """Runs a module's checks; how its process ended."""
    result, log = out / f"{module}.json", out / f"{module}.log"
    result.unlink(missing_ok=True)
    command = [sys.executable, "-m", "tests.e2e.pair", f"tests.e2e.cuda.{module}", str(result)]
    with log.open("w") as stream:
        process = subprocess.Popen(
            command,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**os.environ, "SPECPLUG_CHECKS_ON_GPU": "1"},
            cwd=REPO,
            start_new_session=True,
        )
        try:
            return f"ended with {process.wait(seconds)}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"was killed after {seconds:.0f} s"


def written_checks(module: str) -> list[str]:
    """Names of a module's checks, in the order they are written."""
    source = Path(__file__).with_name(f"{module}.py").read_text()
    return re.findall(r"^def (check_\w+)", source, re.MULTILINE)


def outcome(failure: str | None) -> str:
    """One line for an entry of a module's results."""
    if failure is None:
        return "ok"
    lines = failure.strip().splitlines()
    # What was raised last, with the rest of its message.
    raised = [i for i, line in enumerate(lines) if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return " ".join(line.strip() for line in lines[raised[-1] if raised else -1 :])[:400]


def report(module: str, out: Path, end: str) -> bool:
    """Prints a line for each check of a module; whether all of them are good."""
    result = out / f"{module}.json"
    found = json.loads(result.read_text()) if result.is_file() else {}
    for name in written_checks(module):
        told = outcome(found[name]) if name in found else f"did not end, the process {end}"
        print(f"{module} {name}: {told}")
    return all(
        name in found and (found[name] is None or found[name].startswith("skipped: "))
        for name in written_checks(module)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=6, help="processes at once")
    parser.add_argument("--modules", default=",".join(MODULES), help="names with commas between")
    parser.add_argument("--seconds", type=float, default=200.0, help="limit of each module")
    args = parser.parse_args()
    modules = args.modules.split(",")
    unknown = sorted({*modules}.difference(MODULES))
    if unknown:
        parser.error(f"no such modules: {', '.join(unknown)}; there are {', '.join(MODULES)}")
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(args.jobs) as pool:
        ends = list(pool.map(lambda module: run_module(module, out, args.seconds), modules))
    good = [report(module, out, end) for module, end in zip(modules, ends, strict=True)]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
