# SPDX-License-Identifier: Apache-2.0
"""Runs the tests as on CUDA on a GPU; see `cuda_device`.

    python -m tests.e2e.cuda.cuda_on_gpu --out OUT [--jobs 6] [--modules a,b] [--seconds 200]

Each module is a process of its own, several at once on the one GPU, with its log in OUT/MODULE.log
and the reports of its tests in OUT/MODULE.reports. One that takes longer than `--seconds` is
killed; what it had found by then is kept.
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

from tests.e2e.fork_server import ENVIRONMENT, REPO

# Those that take longest first.
MODULES = (
    "test_trees",
    "test_vision",
    "test_graphs",
    "test_windows",
    "test_defaults",
    "test_hybrids",
    "test_self_drafts",
    "test_draft_heads",
    "test_token_scales",
)


def run_module(module: str, out: Path, seconds: float) -> str:
    """Runs a module's tests; how its process ended."""
    reports, log = out / f"{module}.reports", out / f"{module}.log"
    reports.unlink(missing_ok=True)
    path = Path(__file__).with_name(f"{module}.py")
    command = [sys.executable, "-m", "tests.e2e.own_process", str(reports), str(path)]
    with log.open("w") as stream:
        process = subprocess.Popen(
            command,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**ENVIRONMENT, **os.environ, "SPECPLUG_CHECKS_ON_GPU": "1"},
            cwd=REPO,
            start_new_session=True,
        )
        try:
            return f"ended with {process.wait(seconds)}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"was killed after {seconds:.0f} s"


def written_tests(module: str) -> list[str]:
    """Names of a module's tests, in the order they are written."""
    source = Path(__file__).with_name(f"{module}.py").read_text()
    return re.findall(r"^def (test_\w+)", source, re.MULTILINE)


def outcomes(reports: Path) -> dict[str, str]:
    """One line for each test that has ended, by its name."""
    found: dict[str, str] = {}
    for line in reports.read_text().splitlines() if reports.is_file() else ():
        report = json.loads(line)
        name, told = report["nodeid"].rpartition("::")[2], report["longrepr"]
        if report["outcome"] == "skipped":
            found[name] = told[2]
        elif report["outcome"] == "failed":
            message = told if isinstance(told, str) else told["reprcrash"]["message"]
            found[name] = f"failed: {' '.join(message.split())[:400]}"
        elif report["when"] == "call":
            found[name] = "ok"
    return found


def report(module: str, out: Path, end: str) -> bool:
    """Prints a line for each test of a module; whether all of them are good."""
    found = outcomes(out / f"{module}.reports")
    for name, told in found.items():
        print(f"{module} {name}: {told}")
    ended = {name.partition("[")[0] for name in found}
    for name in written_tests(module):
        if name not in ended:
            print(f"{module} {name}: did not end, the process {end}")
    print(f"{module}: {end}")
    return end == "ended with 0"


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
