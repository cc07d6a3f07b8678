# SPDX-License-Identifier: Apache-2.0
"""What a GPU should show, stated before one was seen; `full_report.py` fills in what it did."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

# Result files of a run by name, as `report.Report` writes them.
Results = Mapping[str, dict[str, Any]]
# Those of ours, in the order in which a run with little time takes them.
TREE_KERNELS = ("triton", "flash", "cute", "cute_ws")
# What was measured, and its value.
Measured = tuple[str, float]


@dataclass(frozen=True)
class Prediction:
    """One bound, and where it comes from.

    Args:
        least: the bound is a lower one.
        find: the values of a run that it is about.
    """

    what: str
    bound: float
    least: bool
    why: str
    find: Callable[[Results], Iterable[Measured]]

    def outcome(self, results: Results) -> dict[str, Any]:
        """A line of the report: the worst value measured, and whether it keeps the bound."""
        found = list(self.find(results))
        line = {
            "what": self.what,
            "bound": f"at {'least' if self.least else 'most'} {self.bound:g}",
            "why": self.why,
            "count": len(found),
        }
        if not found:
            return {**line, "worst": None, "at": "not measured", "holds": None}
        at, worst = (min if self.least else max)(found, key=lambda item: item[1])
        holds = worst >= self.bound if self.least else worst <= self.bound
        return {**line, "worst": worst, "at": at, "holds": holds}


def _kernel_rows(results: Results) -> dict[tuple[int, int, int], dict[str, dict[str, Any]]]:
    """Timed calls by (context, batch, nodes) and kernel."""
    rows: dict[tuple[int, int, int], dict[str, dict[str, Any]]] = {}
    for name, data in results.items():
        if name.startswith("gpu_kernels"):
            for row in data["rows"]:
                if "us" in row and "context" in row:
                    key = (row["context"], row["batch"], row["nodes"])
                    rows.setdefault(key, {})[row["kernel"]] = row
    return rows


def _name(key: tuple[int, int, int], kernel: str) -> str:
    return f"{kernel}, {key[1]} x {key[0]} tokens, {key[2]} nodes"


def _trees_beside_chains(results: Results) -> Iterable[Measured]:
    for key, at in _kernel_rows(results).items():
        for kernel in TREE_KERNELS:
            tree, chain = at.get(f"{kernel} tree"), at.get(f"{kernel} chain")
            if tree and chain:
                yield _name(key, kernel), tree["us"] / chain["us"]


def _producer_beside_turns(results: Results) -> Iterable[Measured]:
    for key, at in _kernel_rows(results).items():
        turns, producer = at.get("cute tree"), at.get("cute_ws tree")
        if turns and producer and key[0] >= 32_000 and key[1:] == (1, 63):
            yield _name(key, "cute_ws beside cute"), producer["us"] / turns["us"]


def _two_passes_beside_trees(results: Results) -> Iterable[Measured]:
    for key, at in _kernel_rows(results).items():
        two = at.get("fa3 two-pass")
        trees = [at[f"{k} tree"]["us"] for k in TREE_KERNELS if f"{k} tree" in at]
        if two and trees and key[1] <= 8 and key[2] == 64:
            yield _name(key, "two passes beside the faster one"), two["us"] / min(trees)


def _bandwidth_of_long_contexts(results: Results) -> Iterable[Measured]:
    for key, at in _kernel_rows(results).items():
        shares = [row["of_copy"] for kernel, row in at.items() if kernel.endswith(" tree")]
        if key[0] >= 32_000 and key[2] <= 31 and shares:
            yield _name(key, "fastest kernel"), max(shares)


def _engine_rows(results: Results, part: str) -> list[dict[str, Any]]:
    return [row for data in results.values() for row in data["rows"] if row.get("part") == part]


def _steps_of_64_nodes(results: Results) -> Iterable[Measured]:
    for row in _engine_rows(results, "verify"):
        if row["nodes"] == 64 and "of_plain_step" in row:
            yield f"batch {row['batch']}, {row['context']} tokens", row["of_plain_step"]


def _drafts_in_a_step(results: Results) -> Iterable[Measured]:
    for row in _engine_rows(results, "verify"):
        if row.get("execute_model") and "propose_draft_token_ids" in row:
            share = row["propose_draft_token_ids"] / row["execute_model"]
            yield f"batch {row['batch']}, {row['nodes']} nodes", share


def _float32_outputs(results: Results) -> Iterable[Measured]:
    for row in _engine_rows(results, "smollm"):
        if row["dtype"] == "float32":
            yield f"batch {row['batch']}, {row['nodes']} nodes", float(row["same_output"])


PREDICTIONS = (
    Prediction(
        "outputs of plain decoding in float32 (1: identical)", 1.0, True,
        "every row attends what plain decoding attends; see docs/life_of_a_step.md",
        _float32_outputs,
    ),
    Prediction(
        "a tree beside a causal chain of as many rows, by time", 1.05, False,
        "they differ in the masked tiles alone, which are the tree's own columns",
        _trees_beside_chains,
    ),
    Prediction(
        "cute_ws (a producer) beside cute (in turns), 63 nodes over 32k tokens, by time",
        0.9, False,
        "256 packed rows: two blocks of 1024 tensor cycles a tile beside one of 1536 and one whose "
        "lone warpgroup overlaps nothing, 832; see docs/kernels_gpu.md",
        _producer_beside_turns,
    ),
    Prediction(
        "two FlashAttention passes and a merge beside the faster tree kernel, by time", 1.2, True,
        "two launches fewer and one read less of partial results, at 64 nodes and up to 8 requests",
        _two_passes_beside_trees,
    ),
    Prediction(
        "bytes per second of a copy, up to 31 nodes over 32k tokens", 0.8, True,
        "4 (N + 1) packed rows multiply less than the bytes take; 85 % of a copy less launches",
        _bandwidth_of_long_contexts,
    ),
    Prediction(
        "a step that verifies 64 nodes beside a plain step of an 8B model", 1.10, False,
        "weights are read once either way; 65 rows multiply 65 x 16 GFLOP, 1.3 ms at 790 TFLOP/s "
        "beside 3.8 ms for 16 GB, and overlap with it",
        _steps_of_64_nodes,
    ),
    Prediction(
        "the draft's time beside the target's forward", 0.1, False,
        "5 of 36 layers over 16 rows read 5/36 of the weights; its head reads the embedding once "
        "more: 0.14 of the bytes, less where launches bound the target",
        _drafts_in_a_step,
    ),
)  # fmt: skip
