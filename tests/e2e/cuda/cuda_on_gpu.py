# SPDX-License-Identifier: Apache-2.0
"""Runs the tests as on CUDA on a GPU; see `cuda_device`.

    python -m tests.e2e.cuda.cuda_on_gpu --out OUT [--jobs 6] [--modules a,b] [--seconds 200]

Each module is a process of its own, several at once on the one GPU, with its log in OUT/MODULE.log,
which ends with pytest's summary. One that takes longer than `--seconds` is killed; what it had
found by then is in its log.
"""

from __future__ import annotations

import argparse
import os
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


def run_module(module: str, out: Path, seconds: float) -> bool:
    """Runs a module's tests and prints how they ended; whether all of them passed."""
    log = out / f"{module}.log"
    path = Path(__file__).with_name(f"{module}.py")
    command = [sys.executable, "-m", "tests.e2e.own_process", str(out / f"{module}.reports"), path]
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
            status, end = process.wait(seconds), ""
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            status, end = process.wait(), f", killed after {seconds:.0f} s"
    lines = log.read_text(errors="replace").splitlines()
    summaries = [line.strip("= ") for line in lines if line.startswith("===")]
    print(f"{module}{end}: {summaries[-1] if summaries else 'see its log'}", flush=True)
    return status == 0


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
        good = list(pool.map(lambda module: run_module(module, out, args.seconds), modules))
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
