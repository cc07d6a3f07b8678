# SPDX-License-Identifier: Apache-2.0
"""Training of a SmolLM2 head on a GPU in minutes: `make gpu-train`.

    python scripts/gpu/train.py --out OUT [--minutes 9] [--prompts FILE.jsonl ...]

The target answers prompts (offline vLLM), a forward pass stores the features, and training
continues from the repository's head. The new head is written to OUT in pieces of at most 15 MB,
with its provenance and held-out acceptance.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).parent)]

from report import Report  # noqa: E402

HEAD = ROOT / "heads" / "smollm2-135m-jetspec"
LAYERS = "2,14,22,29"
PIECE = 15_000_000


def specplug(*arguments: str, log: Path, limit_s: float) -> None:
    """Runs a `specplug` command with its output in `log`."""
    command = [sys.executable, "-m", "vllm_specplug.cli", *arguments]
    with log.open("a") as stream:
        stream.write(f"$ {' '.join(command)}\n")
        stream.flush()
        run = subprocess.run(command, stdout=stream, stderr=subprocess.STDOUT, timeout=limit_s)
    if run.returncode:
        raise RuntimeError(
            f"{arguments[:2]} ended with {run.returncode}: {log.read_text()[-1500:]}"
        )


def cut(path: Path, out: Path) -> list[str]:
    """Writes `path` in pieces OUT/NAME.000, .., which `cat` joins; returns their names."""
    data = path.read_bytes()
    names = []
    for at in range(0, len(data), PIECE):
        name = f"{path.name}.{at // PIECE:03d}"
        (out / name).write_bytes(data[at : at + PIECE])
        names.append(name)
    return names


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/gpu-train"))
    parser.add_argument("--work", type=Path, default=Path("/tmp/specplug-train"))
    parser.add_argument("--minutes", type=float, default=9.0, help="of the whole run")
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of prompts")
    parser.add_argument("--prompts", type=Path, nargs="*", default=[])
    args = parser.parse_args()
    limit = 60 * args.minutes
    report = Report(args.out, "gpu_train", limit)
    log = args.out / "train.log"
    made = {"topic": 5000, "code": 2500, "puzzle": 700, "translation": 500, "document": 900}

    def left() -> float:
        return max(30.0, report.deadline - time.monotonic())

    target: Path | None = None
    with report.part("target"):
        from vllm_specplug.targets import prepare_target

        target = prepare_target("smollm2", print)
    if target is None:
        return report.finish()
    common = ("--target", str(target))
    with report.part("answers") as record:
        make = [f"--make={k}={max(4, int(v * args.scale))}" for k, v in made.items()]
        files = [f"--prompts={path}" for path in args.prompts if path.is_file()]
        specplug("data", "generate", *common, "--out", str(args.work / "answers"), *make, *files,
                 "--max-num-seqs", "256", "--max-tokens", "320", log=log,
                 limit_s=0.45 * limit)  # fmt: skip
        record["made"] = make
    # An interrupted run of the step above leaves complete files of answers.
    with report.part("features") as record:
        specplug("data", "features", *common, "--data", str(args.work / "answers"),
                 "--out", str(args.work / "features"), "--heldout", str(args.work / "heldout"),
                 "--layers", LAYERS, "--tokens-per-batch", "65536", log=log,
                 limit_s=0.25 * limit)  # fmt: skip
        size = sum(p.stat().st_size for p in (args.work / "features").rglob("*") if p.is_file())
        record["gigabytes"] = size / 1e9
    with report.part("head") as record:
        minutes = max(1.0, (left() - 60) / 60)
        specplug("train", "jetspec", *common, "--features", str(args.work / "features"),
                 "--heldout", str(args.work / "heldout"), "--out", str(args.work / "run"),
                 "--init-from", str(HEAD), "--total-steps", "6000", "--learning-rate", "0.002",
                 "--anchors-per-step", "4096", "--short-block-size", "5", "--short-block-share",
                 "0.6", "--position-gamma", "2.5", "--eval-every", "200", "--save-every", "500",
                 "--max-minutes", f"{minutes:.2f}", log=log, limit_s=left())  # fmt: skip
        record["minutes"] = minutes
    with report.part("bring back") as record:
        folder = args.work / "run" / "head"
        record["pieces"] = cut(folder / "model.safetensors", args.out)
        for name in ("config.json", "provenance.json"):
            shutil.copy(folder / name, args.out / name)
        record["join"] = "cat model.safetensors.* > model.safetensors"
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
