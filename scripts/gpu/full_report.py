# SPDX-License-Identifier: Apache-2.0
"""One report of a machine with a GPU: `make gpu-report`.

    python scripts/gpu/full_report.py --out OUT [--model MODEL [--head HEAD]]

Runs the doctor, the kernels' correctness and times, and engines end to end, each in a process of
its own with a time limit: 15 minutes in all. Writes OUT/gpu_report.json and OUT/gpu_report.html,
to attach to an issue. It may be interrupted at any time; started again, it goes on with what has
not ended well. `--device cpu` is a dry run in Triton's interpreter with tiny models.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
sys.path[:0] = [str(FOLDER)]

from predictions import PREDICTIONS, TREE_KERNELS  # noqa: E402
from report import commit, environment  # noqa: E402

_LOG_CHARACTERS = 4000


@dataclass(frozen=True)
class Step:
    """A command with a time limit, and the result file that it leaves."""

    name: str
    command: Sequence[str]
    limit_s: float
    # in OUT, without its suffix; the command's output is kept otherwise
    result: str | None = None


def steps(args: argparse.Namespace) -> list[Step]:
    """What is run, most telling first: at most 15 minutes."""
    python = sys.executable
    device = ["--out", str(args.out), "--device", args.device]
    kernels = ["--kernels", ",".join(TREE_KERNELS)]
    bench = ROOT / "bench" / "gpu"

    # Nobody waits for a dry run, and a CPU is slow.
    more = 1.0 if args.device == "cuda" else 3.0

    def step(name: str, limit_s: float, result: str, *command: str) -> Step:
        limit_s *= more
        return Step(name, [python, *command, *device, *_within(limit_s)], limit_s, result)

    def engines(result: str, parts: str, limit_s: float, *given: str) -> Step:
        options = ["--parts", parts, "--name", result, *given]
        return step(f"engines: {parts}", limit_s, result, str(bench / "e2e.py"), *options)

    check, times = str(FOLDER / "check.py"), str(bench / "kernels.py")
    found = [
        Step("doctor", [python, "-m", "vllm_specplug.cli", "doctor", "--json"], 45 * more),
        step("kernels: right?", 130, "gpu_check", check, *kernels),
        # Four starts, of which two compile.
        engines("gpu_smollm", "smollm", 210),
        step("kernels: how fast?", 120, "gpu_kernels_page16", times, *kernels),
        # Three starts.
        engines("gpu_verify", "ar,verify,stock", 225),
    ]
    if args.model:
        given = ["--model", args.model, *(["--head", args.head] if args.head else [])]
        found.append(engines("gpu_model", "model", 170, *given))
    return found


def _within(limit_s: float) -> list[str]:
    """A script's own limit: it ends by itself and says what it left out."""
    return ["--seconds", str(round(0.9 * limit_s))]


def run_step(step: Step, out: Path) -> dict[str, Any]:
    """Runs a step in a process group of its own, which ends with it."""
    start = time.monotonic()
    log = out / "step.log"
    record: dict[str, Any] = {"command": " ".join(step.command)}
    with log.open("w") as stream:
        process = subprocess.Popen(
            step.command,
            stdout=subprocess.PIPE if step.result is None else stream,
            stderr=stream,
            cwd=ROOT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=step.limit_s)
            record["status"] = "ok" if process.returncode == 0 else "failed"
            record["exit_code"] = process.returncode
        except subprocess.TimeoutExpired:
            record["status"], output = "out of time", None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    record["seconds"] = round(time.monotonic() - start, 1)
    if step.result is None:
        with contextlib.suppress(ValueError):
            record["result"] = json.loads(output or "")
    elif (path := out / f"{step.result}.json").is_file():
        # Also of a step that did not end: it writes as it goes.
        record["result"] = json.loads(path.read_text())
    if record["status"] != "ok":
        record["log"] = log.read_text(errors="replace")[-_LOG_CHARACTERS:]
    log.unlink()
    return record


def report_of(key: dict[str, Any], records: dict[str, Any]) -> dict[str, Any]:
    """The report as it is written: where, what ran, and which predictions hold."""
    results = {}
    for record in records.values():
        data = record.get("result")
        if isinstance(data, dict) and "rows" in data:
            results[data["name"]] = data
    outcomes = [prediction.outcome(results) for prediction in PREDICTIONS]
    return {**key, "steps": records, "predictions": outcomes}


def write(report: dict[str, Any], out: Path) -> None:
    """Both files; a reader never sees half of one."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    template = Environment(
        loader=FileSystemLoader(FOLDER), autoescape=True, undefined=StrictUndefined
    ).get_template("full_report.html.j2")
    texts = {"json": json.dumps(report, indent=1), "html": template.render(report=report)}
    for suffix, text in texts.items():
        partial = out / f"gpu_report.{suffix}.tmp"
        partial.write_text(text)
        partial.replace(out / f"gpu_report.{suffix}")


def earlier_records(out: Path, key: dict[str, Any]) -> dict[str, Any]:
    """What an interrupted run of the same code on the same machine has left, if it ended well."""
    try:
        earlier = json.loads((out / "gpu_report.json").read_text())
    except (OSError, ValueError):
        return {}
    if any(earlier.get(name) != value for name, value in key.items()):
        return {}
    return {name: r for name, r in earlier["steps"].items() if r.get("status") == "ok"}


def run_all(todo: Sequence[Step], out: Path, key: dict[str, Any]) -> dict[str, Any]:
    """Runs what has not run well before, writing the report after every step."""
    out.mkdir(parents=True, exist_ok=True)
    records = earlier_records(out, key)
    for number, step in enumerate(todo, 1):
        progress = f"[{number}/{len(todo)}] {step.name}"
        if step.name in records:
            print(f"{progress}: kept from an earlier run", flush=True)
            continue
        print(f"{progress} (at most {step.limit_s:.0f} s)", flush=True)
        records[step.name] = run_step(step, out)
        print(f"    {records[step.name]['status']}", flush=True)
        write(report_of(key, records), out)
    report = report_of(key, {s.name: records[s.name] for s in todo})
    write(report, out)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/gpu"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", help="a model to serve as well, plainly and with trees")
    parser.add_argument("--head", help="a draft head for it; n-gram trees without one")
    args = parser.parse_args()
    key = {"commit": commit(), "model": args.model, "head": args.head, "device": args.device}
    try:
        report = run_all(steps(args), args.out, {**key, **environment()})
    except KeyboardInterrupt:
        print(f"interrupted; {args.out}/gpu_report.* hold what was done, the same command goes on")
        return 130
    print(f"{args.out / 'gpu_report.html'} and {args.out / 'gpu_report.json'}")
    return 0 if all(r["status"] == "ok" for r in report["steps"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
