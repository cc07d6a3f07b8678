# SPDX-License-Identifier: Apache-2.0
"""Predictions for a GPU: the docs state what the report checks, and every cell is judged."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.scripts import load_script

tables = load_script("gpu/prediction_tables")
predictions = load_script("gpu/predictions")
bounds = load_script("gpu/bounds")

HERE = bounds.Device("here", 4.0e12, 700e12)


def outcome(start: str, **results: Any) -> dict[str, Any]:
    """The line whose text begins so."""
    (found,) = (p for p in predictions.PREDICTIONS if p.what.startswith(start))
    return found.outcome({name: {"name": name, **data} for name, data in results.items()})


def kernels(*rows: dict[str, Any]) -> dict[str, Any]:
    """A result of the kernels' times on `HERE`."""
    return {"rows": list(rows), "copy_bandwidth": HERE.copy, "product_rate": HERE.product}


def timed(
    kernel: str, us: float, nodes: int = 64, context: int = 32768, batch: int = 1, copy: float = 0.5
) -> dict[str, Any]:
    return {"context": context, "batch": batch, "nodes": nodes, "kernel": kernel, "us": us,
            "of_copy": copy}  # fmt: skip


def test_the_docs_hold_the_tables() -> None:
    page = tables.PAGE.read_text()
    assert tables.filled(page) == page, "run scripts/gpu/prediction_tables.py --write"
    for prediction in predictions.PREDICTIONS:
        assert f"| {prediction.what} | {prediction.bound_text} |" in page
    changed = page.replace("| 32k | 44 |", "| 32k | 45 |")
    assert changed != page and tables.filled(changed) == page
    with pytest.raises(ValueError, match="0 places for 'predicted bounds'"):
        tables.filled(page.replace("<!-- predicted bounds -->", ""))


def test_each_cell_of_the_grid_is_timed_and_judged() -> None:
    grid = load_script("../bench/gpu/kernels").grid(quick=False)
    cells = [(context, nodes) for context in bounds.CONTEXTS for nodes in bounds.NODES]
    assert {(c, 1, n) for c, n in cells} <= set(grid) and len(grid) == len(set(grid))
    rows = []
    for context, nodes in cells:
        us = bounds.attention_us(context, nodes, HERE)
        slow = 1.3 if (context, nodes) == (8192, 127) else 1.1
        rows += [timed("triton tree", 2 * us, nodes, context),
                 timed("flash tree", slow * us, nodes, context)]  # fmt: skip
    line = outcome("the fastest kernel beside the predicted time", gpu_kernels=kernels(*rows))
    assert line["count"] == len(cells) and line["holds"] is False
    assert line["worst"] == pytest.approx(1.3) and "8192 tokens, 127 nodes" in line["at"]
    assert [cell["holds"] for cell in line["values"]].count(False) == 1
    # Without the device's own rates there is nothing to compare with.
    line = outcome("the fastest kernel beside the predicted time", gpu_kernels={"rows": rows})
    assert line["holds"] is None


@pytest.mark.parametrize(("us", "two", "chain", "holds"), [
    (100.0, 101.0, 90.0, (True, True)), (100.0, 99.0, 80.0, (False, False)),
])  # fmt: skip
def test_flash_beside_what_it_is_made_of(
    us: float, two: float, chain: float, holds: tuple[bool, bool]
) -> None:
    rows = [timed("flash tree", us), timed("fa3 two-pass", two), timed("fa3 chain", chain)]
    rows.append(timed("flash tree", 400.0, context=1024))
    rows.append(timed("fa3 chain", 100.0, context=1024))
    found = (
        outcome("flash beside two", gpu_kernels=kernels(*rows)),
        outcome("flash beside FlashAttention", gpu_kernels=kernels(*rows)),
    )
    assert tuple(line["holds"] for line in found) == holds
    assert [line["count"] for line in found] == [1, 1], "short contexts are no part of it"


def test_the_schemes_beside_their_cycles() -> None:
    def line(us: float, nodes: int) -> dict[str, Any]:
        rows = (timed("cute tree", 100.0, nodes), timed("cute_ws tree", us, nodes))
        return outcome("cute_ws beside cute, over", gpu_kernels=kernels(*rows))

    assert line(90.0, 63)["holds"] is True and line(92.0, 63)["holds"] is False
    assert line(100.0, 64)["holds"] is True and line(106.0, 64)["holds"] is False
    assert line(100.0, 31)["holds"] is None, "bound by memory"


def engines(**more: Any) -> dict[str, Any]:
    """Steps as the device should make them, some changed by a factor."""
    rows = []
    for part, kind, nodes in (("ar", "plain", 0), ("stock", "chain", 3), ("verify", "tree", 16)):
        for batch, context in ((1, 1024), (8, 1024)):
            ms = bounds.step_ms(kind, nodes, context, HERE, batch) * more.get(part, 1.0)
            row = {"part": part, "batch": batch, "context": context, "step_ms": ms}
            rows.append({**row, "nodes": nodes} if nodes else row)
            # Phases are timed with waits between them.
            rows.append({**row, "nodes": nodes, "step_ms": 9 * ms, "execute_model": 3.0})
    return {"gpu_verify": {"rows": rows}, "gpu_kernels": kernels()}


def test_whole_steps_beside_their_prediction_and_beside_stock_chains() -> None:
    line = outcome("a step of an 8B model", **engines())
    assert line["count"] == 6 and line["worst"] == pytest.approx(1.0)
    slow = outcome("a step of an 8B model", **engines(stock=1.3))
    assert [cell["holds"] for cell in slow["values"]].count(False) == 2
    beside = outcome("a step of a tree of 16 nodes", **engines())
    assert beside["count"] == 1 and beside["holds"] is True
    assert beside["worst"] == pytest.approx(
        bounds.step_ms("tree", 16, 1024, HERE) / bounds.step_ms("chain", 3, 1024, HERE)
    )
    assert outcome("a step of a tree of 16 nodes", **engines(verify=1.2))["holds"] is False
    # As a host that trees wait for would make it.
    late = 9.0 / bounds.step_ms("tree", 16, 1024, bounds.H100)
    assert outcome("a step of a tree of 16 nodes", **engines(verify=late))["holds"] is False


def test_bounds_are_what_the_model_says() -> None:
    """No bound asks for more than its own derivation gives."""
    h200, h100 = bounds.H200, bounds.H100
    limit = {p.what.split(",")[0]: p.bound for p in predictions.PREDICTIONS}
    step, plain = bounds.step_ms, bounds.step_ms("plain", 0, 1024, h100)
    assert (
        step("tree", 64, 1024, h100) / plain
        < limit["a step that verifies 64 nodes and drafts beside a plain step of an 8B model"]
    )
    assert (
        step("tree", 16, 1024, h100) / step("chain", 3, 1024, h100)
        < limit["a step of a tree of 16 nodes beside one of vLLM's own EAGLE-3 chain of 3"]
    )
    assert (
        limit["the draft's time beside the target's forward"]
        > bounds.BLOCK_WEIGHTS / bounds.TARGET_WEIGHTS
    )
    for batch, least in ((1, 0.7), (4, 0.8)):
        for nodes in (15, 31):
            read = batch * 32768 * 4096
            us = bounds.attention_us(32768, nodes, h200, batch)
            assert read / us * 1e6 / h200.copy > least
