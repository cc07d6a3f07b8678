# SPDX-License-Identifier: Apache-2.0
"""A page of what runs on a GPU have found, for bench/results.

    python scripts/gpu/result_page.py --out bench/results/gpu_NAME FOLDER...

Takes every result of `check.py`, `lossless.py`, `kernels.py`, `e2e.py` and
`tests.e2e.cuda_v2_on_gpu` below the folders; of the same case the last one counts. Writes OUT.json,
OUT.md and OUT.png, the plot of the kernels' times.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent)]

from predictions import PREDICTIONS, TREE_KERNELS  # noqa: E402

from vllm_specplug.bench.result_page import why_remeasure  # noqa: E402
from vllm_specplug.bench.tables import markdown_table  # noqa: E402

_RECORD = ("command", "commit", "date", "versions", "hardware")


def collect(folders: Iterable[Path]) -> dict[str, Any]:
    """What the folders hold, by kind."""
    found: dict[str, Any] = {"checks": {}, "engine_checks": {}, "lossless": {}, "results": {}}
    for path in (p for folder in folders for p in sorted(folder.rglob("*.json"))):
        data = json.loads(path.read_text())
        if path.stem.endswith("_correctness"):
            parts = json.loads((path.parent / "gpu_check.json").read_text())["parts"]
            own = {k: p for k, p in parts.items() if k.startswith(data["kernel"] + ":")}
            failed = {k: p["error"][:200] for k, p in own.items() if p["status"] == "failed"}
            found["checks"][data["kernel"]] = {**data, "parts": [*own], "failed": failed}
        elif path.stem.startswith("cuda_v2_") or "check_" in "".join(data)[:200]:
            found["engine_checks"].setdefault(path.stem, {}).update(
                # The last line of a failure tells what it was.
                {name: why and why.strip().splitlines()[-1] for name, why in data.items()}
            )
        elif data.get("name") == "gpu_lossless":
            record = {key: data[key] for key in _RECORD}
            for row in data["rows"]:
                found["lossless"].setdefault(row["case"], {})[row["call"]] = row
                found["lossless"][row["case"]]["record"] = record
        elif "rows" in data and data.get("name") != "gpu_check":
            found["results"][data["name"]] = data
    return found


def check_table(checks: dict[str, Any]) -> str:
    rows = []
    for name, check in sorted(checks.items()):
        parts = [part.split(": ")[1] for part in check["parts"]]
        bad = "; ".join(f"{part}: {why}" for part, why in check["failed"].items())
        rows.append([name, str(check["cases"]), ", ".join(parts), bad.replace("\n", " ")])
    header = ("kernel", "cases against the reference", "checked", "not passed")
    return markdown_table(header, rows)


def lossless_table(cases: dict[str, Any]) -> str:
    rows = []
    for case, calls in cases.items():
        of = [call for name, call in calls.items() if name != "record"]
        equal, tokens = (sum(call[key] for call in of) for key in ("equal", "tokens"))
        drafts, accepted = (sum(call[key] for call in of) for key in ("drafts", "accepted"))
        rows.append(
            [case, of[0]["dtype"], f"{equal} of {tokens}", f"{1 + accepted / max(1, drafts):.2f}"]
        )
    header = ("engine", "dtype", "tokens before the first difference", "tokens per step")
    return markdown_table(header, rows)


def engine_table(modules: dict[str, dict[str, str | None]]) -> str:
    rows = []
    for module, checks in sorted(modules.items()):
        bad = {name: why for name, why in checks.items() if why is not None}
        told = "; ".join(f"`{name}`: {why}"[:160] for name, why in bad.items())
        rows.append([f"`{module}`", f"{len(checks) - len(bad)} of {len(checks)}", told])
    return markdown_table(("module", "passed", "not passed"), rows)


def kernel_table(data: dict[str, Any]) -> str:
    """Microseconds a layer, by cell."""
    cells: dict[tuple[int, int, int], dict[str, float]] = {}
    for row in data["rows"]:
        if "us" in row and "context" in row:
            key = (row["batch"], row["context"], row["nodes"])
            cells.setdefault(key, {})[row["kernel"]] = row["us"]
    names = [f"{name} tree" for name in TREE_KERNELS]
    others = ["fa3 chain", "fa3 two-pass", "unified_attention qq_bias"]
    rows = [
        [*map(str, key), *(f"{at[n]:.0f}" if n in at else "-" for n in [*names, *others])]
        for key, at in sorted(cells.items())
        if any(n in at for n in names)
    ]
    header = ("batch", "context", "nodes", *TREE_KERNELS, "FA3, a chain", "FA3 twice", "`qq_bias`")
    return markdown_table(header, rows)


def step_table(data: dict[str, Any]) -> str:
    keys = ("step_ms", "of_plain_step", "execute_model", "_sample", "propose_draft_token_ids")
    rows = [
        [row["part"], str(row["batch"]), str(row["context"]), str(row.get("nodes", "-")),
         *(f"{row[k]:.2f}" if k in row else "-" for k in keys)]
        for row in data["rows"] if "part" in row and "step_ms" in row
    ]  # fmt: skip
    header = ("part", "batch", "context", "nodes", "ms per step", "of a plain one", "forward",
              "sampling", "draft")  # fmt: skip
    return markdown_table(header, rows)


def prediction_table(outcomes: list[dict[str, Any]]) -> str:
    rows = []
    for line in outcomes:
        if line["count"]:
            kept = sum(value["holds"] for value in line["values"])
            worst = f"{line['worst']:.2f} ({line['at']})"
            rows.append([line["what"], line["bound"], f"{kept} of {line['count']}", worst])
    return markdown_table(("predicted", "bound", "kept", "worst"), rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True, help="without a suffix")
    parser.add_argument("--notes", type=Path, help="Markdown to put below the title")
    args = parser.parse_args()
    found = collect(args.folders)
    results = found["results"]
    lossless = {"rows": [
        {"part": "smollm", "dtype": call["dtype"], "batch": 4 if name != "alone" else 1,
         "nodes": 31, "same_output": call["equal"] == call["tokens"]}
        for calls in found["lossless"].values() for name, call in calls.items() if name != "record"
    ]}  # fmt: skip
    outcomes = [p.outcome({**results, "gpu_lossless": lossless}) for p in PREDICTIONS]
    hardware = next(iter([*found["checks"].values(), *results.values()]))["hardware"]
    sections = [f"# On an {hardware['gpu']}"]
    origins = [*found["checks"].values(), *results.values()]
    origins += [case["record"] for case in found["lossless"].values()]
    if why := why_remeasure(origins):
        sections.append(f"**To be measured again**: {why}.")
    if args.notes:
        sections.append(args.notes.read_text().strip())
    if found["checks"]:
        sections += ["## Kernels: right?", check_table(found["checks"])]
    if found["lossless"]:
        sections += ["## Engines beside plain decoding", lossless_table(found["lossless"])]
    if found["engine_checks"]:
        sections += ["## Checks of engines", engine_table(found["engine_checks"])]
    for name, data in results.items():
        if name.startswith("gpu_kernels"):
            rates = (
                f"A large copy moves {data['copy_bandwidth'] / 1e12:.2f} TB/s, "
                f"a large product makes {data['product_rate'] / 1e12:.0f} TFLOP/s."
            )
            sections += ["## Kernels: microseconds a layer", rates, kernel_table(data)]
            plot = next((p for f in args.folders for p in f.rglob(f"{name}.png")), None)
            if plot:
                shutil.copyfile(plot, args.out.with_suffix(".png"))
                sections.append(f"![Times of kernels]({args.out.name}.png)")
        elif any("step_ms" in row for row in data["rows"]):
            sections += ["## Steps of an 8B-shaped model", step_table(data)]
    sections += ["## Predictions", prediction_table(outcomes)]
    args.out.with_suffix(".json").write_text(json.dumps({**found, "predictions": outcomes}) + "\n")
    args.out.with_suffix(".md").write_text("\n\n".join(sections) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
