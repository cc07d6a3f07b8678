# SPDX-License-Identifier: Apache-2.0
"""The page of `speed.py` and `products.py`: `python bench/gpu/speed_page.py FOLDER... [--out OUT]`.

FOLDER has gpu_speed.json, gpu_products.json or both.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

sys.path.append(str(Path(__file__).parent))

from acceptance_model import PUBLISHED

from vllm_specplug.bench.result_page import ResultPage, Section

ABOUT = """**Acceptance imposed, all costs real.** The target has the shape of Qwen3-8B, the head
that of its published {head} head. Their weights are random, in bfloat16, and the target's are made
so that its next token is known. The head runs as it is. Its candidates are then overwritten on the
device: the target's token gets the rank that an acceptance model draws. The model is fitted to the
acceptance length that JetSpec's paper reports for {head} with {tokens} draft tokens ({lengths}).
vLLM's own chain drafts with a head of the same shape. Its drafts are overwritten with the target's
tokens, and vLLM accepts each with the model's probability. The adaptive budget served each load
once before it was measured. The page says nothing about a head's quality. Every answer was checked
to be the target's."""
HEADS = {"jetspec": "JetSpec", "eagle3": "EAGLE-3"}
STEPS = """Time of a step relative to a plain step, with 1,024 tokens of context: the median step /
the mean step, averaged over all rounds and both tasks. A step with trees verifies one tree per
request and drafts the next. Where the two differ much, the machine was interrupted."""
SPEEDS = """Imposed acceptance length divided by the median step in plain steps. For the adaptive
budget, which chooses the trees, tokens per second relative to plain decoding."""
LENGTHS = """Measured mean acceptance length / imposed one, for the adaptive budget that of its
largest tree. vLLM's chain draws every token by itself, so that its lengths scatter."""
KERNELS = "Milliseconds of kernels per step, and their launches, by torch's profiler."
PRODUCTS = "All matrix products of the 36 layers and the LM head by rows, replayed from a graph."
DRAFT_PRODUCTS = """All matrix products of the draft head's 5 layers and the LM head by rows,
replayed from a graph; those in e4m3 include the rounding of their inputs."""


class Run:
    """One gpu_speed.json."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.data = data
        self.rows = [row for row in data["rows"] if "problem" not in row]
        self.arms = list(dict.fromkeys(row["arm"] for row in self.rows))
        self.batches = sorted({row["batch"] for row in self.rows})
        self.tasks = list(dict.fromkeys(row["profile"] for row in self.rows if row.get("a")))
        broken = [row for row in self.rows if row["is_chain"] is False]
        assert not broken, f"not the target's tokens: {broken}"

    @property
    def about(self) -> str:
        name = self.data.get("head", "jetspec")
        published = PUBLISHED[name]
        lengths = ", ".join(f"{task} {published.lengths[task]:.2f}" for task in self.tasks)
        return ABOUT.format(head=HEADS[name], tokens=published.nodes + 1, lengths=lengths)

    @property
    def is_compiled(self) -> bool:
        engines = [e for e in self.data["parts"]["engines"].values() if isinstance(e, dict)]
        modes = {engine["mode"] != "0" for engine in engines if "mode" in engine}
        assert len(modes) == 1, "some engines were compiled and some were not"
        return modes.pop()

    @property
    def title(self) -> str:
        kind = "compiled" if self.is_compiled else "not compiled, from whole graphs"
        return f"{kind}, {self.data['commit']}"

    def found(self, arm: str, batch: int, task: str | None = None) -> list[Mapping[str, Any]]:
        wanted = {"arm": arm, "batch": batch, **({"profile": task} if task else {})}
        return [row for row in self.rows if wanted.items() <= row.items()]

    def step(
        self, arm: str, batch: int, task: str | None = None, key: str = "median_step_ms"
    ) -> float | None:
        """Returns the mean time of a step in plain steps."""
        rows = self.found(arm, batch, task)
        plain = mean(row[key] for row in self.found("plain", batch))
        return mean(row[key] for row in rows) / plain if rows else None

    def table(self, cell: Any, tasks: Sequence[str]) -> Section:
        arms = [arm for arm in self.arms if arm != "plain"]
        lines = [
            [str(batch), *([task] if task else []), *(cell(arm, batch, task) for arm in arms)]
            for task in tasks
            for batch in self.batches
        ]
        return Section(("batch", *(["task"] if any(tasks) else []), *arms), lines)

    def sections(self) -> list[Section]:
        def steps(arm: str, batch: int, task: str) -> str:
            keys = ("median_step_ms", "step_ms")
            found = [self.step(arm, batch, key=key) for key in keys]
            return " / ".join("-" if one is None else f"{one:.2f}" for one in dict.fromkeys(found))

        def speed(arm: str, batch: int, task: str) -> str:
            rows, length = self.found(arm, batch, task), self.step(arm, batch, task)
            if length is None:
                return "-"
            if not arm.startswith("auto"):
                return f"{rows[0]['imposed'] / length:.2f} x"
            # The budget chooses the size of trees.
            plain = median(row["tokens_per_s"] for row in self.found("plain", batch))
            return f"{mean(row['tokens_per_s'] for row in rows) / plain:.2f} x"

        def lengths(arm: str, batch: int, task: str) -> str:
            rows = self.found(arm, batch, task)
            if not rows:
                return "-"
            return f"{mean(row['mean_acceptance'] for row in rows):.2f} / {rows[0]['imposed']:.2f}"

        plain = [
            [str(b), *(f"{median(row[key] for row in self.found('plain', b)):.{n}f}"
                       for key, n in (("tokens_per_s", 0), ("median_step_ms", 2)))]
            for b in self.batches
        ]  # fmt: skip
        parts = [
            (Section(("batch", "tokens/s", "ms per step"), plain), "Plain decoding", ""),
            (self.table(steps, [""]), "Steps", STEPS),
            (self.table(speed, self.tasks), "Speed-up over plain decoding", SPEEDS),
            (self.table(lengths, self.tasks), "Acceptance", LENGTHS),
        ]
        if not self.is_compiled:
            parts = parts[1:2]
        sections = [
            Section(part.header, part.rows, f"{name}, {self.title}", [notes] if notes else [])
            for part, name, notes in parts
        ]
        kernels = self.data.get("kernels")
        if kernels and self.is_compiled:
            lines = [
                [k["arm"], str(k["batch"]), f"{k['device_ms']:.2f}", f"{k['launches']:.0f}"]
                for k in kernels
            ]
            header = ("engine", "batch", "device ms", "launches")
            sections.append(Section(header, lines, f"Work of the device, {self.title}", [KERNELS]))
        return sections


def product_sections(data: Mapping[str, Any]) -> list[Section]:
    rows = [row for row in data["rows"] if "rows" in row]
    target = [row for row in rows if "kind" not in row]
    lines = [
        [str(row["rows"]), f"{row['ms']:.2f}", f"{row['ms'] / target[0]['ms']:.2f}"]
        for row in target
    ]
    sections = [Section(("rows", "ms", "of one row"), lines, "Matrix products by rows", [PRODUCTS])]
    draft = {(row["rows"], row["kind"]): f"{row['ms']:.2f}" for row in rows if "kind" in row}
    if draft:
        kinds = list(dict.fromkeys(kind for _, kind in draft))
        lines = [
            [str(count), *(draft[count, kind] for kind in kinds)]
            for count in dict.fromkeys(count for count, _ in draft)
        ]
        header = ("rows", *(f"ms, {kind}" for kind in kinds))
        sections.append(Section(header, lines, "Draft products by rows", [DRAFT_PRODUCTS]))
    return sections


def kept(data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the published data of a file: its rows, and the device's kernels of each profile."""
    kernels = [
        {key: one[key] for key in ("arm", "batch", "wall_ms", "device_ms", "launches", "device")}
        for one in data.get("kernels", ())
    ]
    return {"rows": data["rows"], **({"kernels": kernels} if kernels else {})}


def provenance(data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the provenance of a file for a page of results."""
    machine = data["hardware"]
    gpu = f"{machine['gpu']}, driver {machine['driver']}" if "gpu" in machine else "no GPU"
    return {
        **{key: data[key] for key in ("commit", "versions", "date")},
        # Folders of that machine mean nothing to readers.
        "command": re.sub(r"(?<=\s)/(?:\w+/)*", "", data["command"]),
        "hardware": {
            "logical_cpus": machine["cpu_count"],
            "gpu": machine.get("gpu"),
            "gpus": [gpu],
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    parser.add_argument("--name", default="gpu_speed")
    parser.add_argument("--note", default="", help="additional text about these runs")
    args = parser.parse_args()
    sections: list[Section] = []
    records, data, about = [], {}, ""
    for folder in args.folders:
        for path in sorted(folder.glob("gpu_*.json")):
            found = json.loads(path.read_text())
            data[f"{folder.name}/{path.name}"] = kept(found)
            if path.name == "gpu_speed.json":
                run = Run(found)
                about = run.about
                sections += run.sections()
            else:
                sections += product_sections(found)
            records.append(provenance(found))
    gpu = found["hardware"].get("gpu", "a CPU")
    title, about = f"Trees and plain decoding: {gpu}", f"{about}\n\n{args.note}".strip()
    page = ResultPage(args.name, title, about, sections, data, records)
    page.write(args.out)
    # One line instead of ten thousand.
    path = args.out / f"{args.name}.json"
    path.write_text(json.dumps(json.loads(path.read_text())) + "\n")


if __name__ == "__main__":
    main()
