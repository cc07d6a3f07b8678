# SPDX-License-Identifier: Apache-2.0
"""What a GPU should show, stated before one was seen; `full_report.py` fills in what it did, and
`prediction_tables.py` writes them into the docs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from bounds import (
    BLOCK_WEIGHTS,
    CHAIN_WEIGHTS,
    CONTEXTS,
    H100,
    H200,
    NODES,
    TARGET_WEIGHTS,
    Device,
    attention_us,
    scheme_cycles,
    step_ms,
)

# Result files of a run by name, as `report.Report` writes them.
Results = Mapping[str, dict[str, Any]]
# The package's own, in the order in which a run with little time takes them.
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

    @property
    def bound_text(self) -> str:
        return f"at {'least' if self.least else 'most'} {self.bound:g}"

    def keeps(self, value: float) -> bool:
        return value >= self.bound if self.least else value <= self.bound

    def outcome(self, results: Results) -> dict[str, Any]:
        """A line of the report: each value measured and the worst of them, and whether they keep
        the bound."""
        found = list(self.find(results))
        line = {
            "what": self.what,
            "bound": self.bound_text,
            "why": self.why,
            "count": len(found),
            "values": [
                {"at": at, "value": value, "holds": self.keeps(value)} for at, value in found
            ],
        }
        if not found:
            return {**line, "worst": None, "at": "not measured", "holds": None}
        at, worst = (min if self.least else max)(found, key=lambda item: item[1])
        return {**line, "worst": worst, "at": at, "holds": self.keeps(worst)}


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


def _device(results: Results) -> Device | None:
    """The run's own, by its large copy and product."""
    for data in results.values():
        if data.get("copy_bandwidth") and data.get("product_rate"):
            return Device("this one", data["copy_bandwidth"], data["product_rate"])
    return None


def _trees_beside_chains(results: Results) -> Iterable[Measured]:
    for key, at in _kernel_rows(results).items():
        for kernel in TREE_KERNELS:
            tree, chain = at.get(f"{kernel} tree"), at.get(f"{kernel} chain")
            if tree and chain:
                yield _name(key, kernel), tree["us"] / chain["us"]


def _trees(at: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Microseconds of each of our kernels in a cell."""
    return {name: at[f"{name} tree"]["us"] for name in TREE_KERNELS if f"{name} tree" in at}


def _cells_beside_their_prediction(results: Results) -> Iterable[Measured]:
    device = _device(results)
    for key, at in sorted(_kernel_rows(results).items()):
        context, batch, nodes = key
        times = _trees(at)
        if device is None or not times or batch != 1:
            continue
        if context in CONTEXTS and nodes in NODES:
            fastest = min(times, key=lambda name: times[name])
            us = attention_us(context, nodes, device)
            yield f"{_name(key, fastest)}, predicted {us:.0f} µs", times[fastest] / us


def _producer_beside_turns(results: Results) -> Iterable[Measured]:
    for key, at in _kernel_rows(results).items():
        turns, producer = at.get("cute tree"), at.get("cute_ws tree")
        if turns and producer and key[0] >= 32_000 and key[1:] == (1, 63):
            yield _name(key, "cute_ws beside cute"), producer["us"] / turns["us"]


def _producer_beside_its_cycles(results: Results) -> Iterable[Measured]:
    for key, at in sorted(_kernel_rows(results).items()):
        turns, producer = at.get("cute tree"), at.get("cute_ws tree")
        # Trees of fewer nodes are bound by memory, in either scheme.
        if turns and producer and key[0] >= 32_000 and key[1] == 1 and key[2] >= 63:
            ratio = scheme_cycles(key[2]).ratio
            name = f"{_name(key, 'cute_ws beside cute')}, predicted {ratio:.2f}"
            yield name, producer["us"] / turns["us"] / ratio


def _two_passes_beside_trees(results: Results) -> Iterable[Measured]:
    for key, at in _kernel_rows(results).items():
        two, times = at.get("fa3 two-pass"), _trees(at)
        if two and times and key[1] <= 8 and key[2] == 64:
            yield _name(key, "two passes beside the fastest one"), two["us"] / min(times.values())


def _flash_beside_two_passes(results: Results) -> Iterable[Measured]:
    for key, at in _kernel_rows(results).items():
        flash, two = at.get("flash tree"), at.get("fa3 two-pass")
        if flash and two and key[1] <= 8 and key[2] == 64:
            yield _name(key, "flash"), flash["us"] / two["us"]


def _flash_beside_a_stock_chain(results: Results) -> Iterable[Measured]:
    for key, at in _kernel_rows(results).items():
        flash, chain = at.get("flash tree"), at.get("fa3 chain")
        if flash and chain and key[0] >= 16_000 and key[1] <= 8 and key[2] == 64:
            yield _name(key, "flash"), flash["us"] / chain["us"]


def _share_of_a_copy(results: Results, batch: int) -> Iterable[Measured]:
    for key, at in _kernel_rows(results).items():
        shares = [at[f"{name} tree"]["of_copy"] for name in _trees(at)]
        if key[0] >= 32_000 and key[1] == batch and key[2] <= 31 and shares:
            yield _name(key, "fastest kernel"), max(shares)


def _engine_rows(results: Results, part: str) -> list[dict[str, Any]]:
    return [row for data in results.values() for row in data["rows"] if row.get("part") == part]


# A row of a step: kind as in `bounds.step_ms`, (batch, context), nodes, milliseconds.
Step = tuple[str, tuple[int, int], int, float]


def _steps(results: Results) -> Iterable[Step]:
    """Steps without waits between their phases."""
    for part, kind in (("ar", "plain"), ("stock", "chain"), ("verify", "tree")):
        for row in _engine_rows(results, part):
            if "execute_model" not in row:
                cell = row["batch"], row["context"]
                yield kind, cell, row.get("nodes", 0), row["step_ms"]


def _steps_beside_their_prediction(results: Results) -> Iterable[Measured]:
    device = _device(results)
    for kind, (batch, context), nodes, ms in _steps(results):
        if device is not None and context >= CONTEXTS[0]:
            predicted = step_ms(kind, nodes, context, device, batch)
            where = f"{kind} of {nodes}, {batch} x {context} tokens, predicted {predicted:.2f} ms"
            yield where, ms / predicted


def _trees_beside_stock_chains(results: Results) -> Iterable[Measured]:
    chains = {cell: ms for kind, cell, _, ms in _steps(results) if kind == "chain"}
    for kind, cell, nodes, ms in _steps(results):
        if kind == "tree" and nodes == 16 and cell[0] == 1 and cell in chains:
            yield f"{cell[1]} tokens", ms / chains[cell]


def _steps_of_64_nodes(results: Results) -> Iterable[Measured]:
    for row in _engine_rows(results, "verify"):
        if row["nodes"] == 64 and row["batch"] == 1 and "of_plain_step" in row:
            yield f"{row['context']} tokens", row["of_plain_step"]


def _drafts_in_a_step(results: Results) -> Iterable[Measured]:
    for row in _engine_rows(results, "verify"):
        if row.get("execute_model") and "propose_draft_token_ids" in row:
            share = row["propose_draft_token_ids"] / row["execute_model"]
            yield f"batch {row['batch']}, {row['nodes']} nodes", share


def _float32_outputs(results: Results) -> Iterable[Measured]:
    for row in _engine_rows(results, "smollm"):
        if row["dtype"] == "float32":
            yield f"batch {row['batch']}, {row['nodes']} nodes", float(row["same_output"])


def _gigabytes(numbers: int) -> str:
    return f"{2e-9 * numbers:.1f} GB"


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
        "the fastest kernel beside the predicted time of its cell, batch 1", 1.25, False,
        "7 µs, and 85 % of a copy's rate or 60 % of a product's, whichever takes longer; rates as "
        "this device reaches them",
        _cells_beside_their_prediction,
    ),
    Prediction(
        "cute_ws (a producer) beside cute (in turns), 63 nodes over 32k tokens, by time",
        0.9, False,
        "256 packed rows: two blocks of 1024 tensor cycles a tile beside one of 1536 and one whose "
        "lone warpgroup overlaps nothing, 832; see docs/kernels_gpu.md",
        _producer_beside_turns,
    ),
    Prediction(
        "cute_ws beside cute, over the ratio of their cycles, from 63 nodes over 32k tokens",
        1.05, False,
        "there products are the limit, and nothing else differs between the schemes",
        _producer_beside_its_cycles,
    ),
    Prediction(
        "two FlashAttention passes and a merge beside the fastest tree kernel, by time", 1.2, True,
        "two launches fewer and one read less of partial results, at 64 nodes and up to 8 requests",
        _two_passes_beside_trees,
    ),
    Prediction(
        "flash beside two FlashAttention passes and a merge, by time", 1.0, False,
        "the same pass over the context; no merge, whose reads and writes its tail does not make "
        "either, at 64 nodes and up to 8 requests",
        _flash_beside_two_passes,
    ),
    Prediction(
        "flash beside FlashAttention over a chain of as many rows, from 16k tokens, by time",
        1.15, False,
        "the same columns in the same splits; its tail, a launch and at most 257 columns, is 3 to "
        "5 µs beside 52 µs (64 nodes, 16k tokens, H200)",
        _flash_beside_a_stock_chain,
    ),
    Prediction(
        "bytes per second of a copy, up to 31 nodes over 32k tokens, batch 1", 0.7, True,
        "4 (N + 1) packed rows multiply less than the bytes take: 134 MB in "
        f"{attention_us(32_768, 31, H200):.0f} µs (H200), 7 of them fixed",
        lambda results: _share_of_a_copy(results, 1),
    ),
    Prediction(
        "bytes per second of a copy, up to 31 nodes over 32k tokens, batch 4", 0.8, True,
        "as above; the fixed 7 µs are shared by four times the bytes",
        lambda results: _share_of_a_copy(results, 4),
    ),
    Prediction(
        "a step of an 8B model beside its predicted time", 1.2, False,
        f"{_gigabytes(TARGET_WEIGHTS)} of weights, {_gigabytes(CHAIN_WEIGHTS)} more for a chain's "
        f"drafts and {_gigabytes(BLOCK_WEIGHTS)} for a block head's, at 90 % of a copy's rate or "
        "multiplied at 60 % of a product's, and 36 layers of attention; launches are made while "
        "the device works",
        _steps_beside_their_prediction,
    ),
    Prediction(
        "a step of a tree of 16 nodes beside one of vLLM's own EAGLE-3 chain of 3, 8B, batch 1",
        1.15, False,
        f"{_gigabytes(TARGET_WEIGHTS + BLOCK_WEIGHTS)} beside "
        f"{_gigabytes(TARGET_WEIGHTS + CHAIN_WEIGHTS)}: "
        f"{step_ms('tree', 16, 1024, H100):.1f} ms beside {step_ms('chain', 3, 1024, H100):.1f} "
        "(H100); a host that trees wait for in every step would make it 9",
        _trees_beside_stock_chains,
    ),
    Prediction(
        "a step that verifies 64 nodes and drafts beside a plain step of an 8B model, batch 1",
        1.3, False,
        "weights are read once either way: 65 rows multiply 65 x 15 GFLOP, 2.1 ms at 60 % of "
        f"790 TFLOP/s, beside 5.6 ms for {_gigabytes(TARGET_WEIGHTS)}, and overlap with it; the "
        f"draft reads {_gigabytes(BLOCK_WEIGHTS)}: {step_ms('tree', 64, 1024, H100):.1f} ms beside "
        f"{step_ms('plain', 0, 1024, H100):.1f} (H100)",
        _steps_of_64_nodes,
    ),
    Prediction(
        "the draft's time beside the target's forward", 0.25, False,
        f"{_gigabytes(BLOCK_WEIGHTS)} (5 layers, the joined states, the head of the vocabulary) "
        f"beside {_gigabytes(TARGET_WEIGHTS)}, less where launches bound the target",
        _drafts_in_a_step,
    ),
)  # fmt: skip
