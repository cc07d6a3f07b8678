# SPDX-License-Identifier: Apache-2.0
"""Tensor parallel ranks verify the same trees, whatever each of them would have drafted."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import numpy as np
import pytest

from tests.e2e.fork_server import run_forked
from tests.unit.tree.candidates import tree_of
from vllm_specplug.drafting.device_levels import unpacked_trees
from vllm_specplug.drafting.reserved_rows import ReservedRows
from vllm_specplug.tree import DraftTree
from vllm_specplug.vllm_worker import ranks
from vllm_specplug.vllm_worker.ranks import packed_on_host


def _run_all(module: str, arguments: list[list[Any]], folder: Path) -> None:
    """Runs `main` of a module here in a process for each list of arguments, side by side."""
    log = folder / "log"
    job = [f"tests.unit.vllm_worker.{module}", json.dumps(arguments)]
    name = f"specplug-test-{uuid4().hex}"
    env = {"VLLM_DIST_IDENT": name}
    try:
        status = run_forked("tests.unit.vllm_worker.side_by_side", job, log, env=env, timeout_s=300)
    finally:
        # Processes that end without their destructors leave their shared memory.
        for left in Path("/dev/shm").glob(f"{name}*"):
            left.unlink()
    assert status == 0, log.read_text()[-8000:]


def test_replicas_measure_step_costs_together(tmp_path: Path) -> None:
    """A slower clock does not change how many forwards run: a forward that the other replica does
    not join never ends."""
    from vllm.utils.network_utils import get_open_port

    port = get_open_port()
    _run_all("replica_process", [[rank, port, str(tmp_path)] for rank in range(2)], tmp_path)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first["rows"] and first == second


@pytest.mark.parametrize("where", ["draft", "forward", "collective"])
def test_a_worker_that_fails_to_warm_up_leaves_no_other_waiting(tmp_path: Path, where: str) -> None:
    """Both end; where the other one waits in a forward that only both can end, the worker that
    failed says what failed, and ends."""
    from vllm.utils.network_utils import get_open_port

    port = get_open_port()
    _run_all("failing_process", [[rank, port, str(tmp_path), where] for rank in range(2)], tmp_path)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    if where == "collective":
        assert first
        # What `WorkerProc` does not take for an answer to its executor.
        assert second[0] == "SystemExit"
        assert "MemoryError in what all workers do together: no room" in second[1]
        return
    assert first[0] == second[0] == "RuntimeError"
    assert "another worker" in first[1] and "MemoryError: no room on this device" in second[1]


def _tree(*token_ids: int) -> DraftTree:
    count = len(token_ids)
    return tree_of(token_ids, [-1, -1, 0, 1][:count], [-0.1, -1e-42, -np.inf, -3.0][:count])


def test_a_message_keeps_every_bit_and_cuts_what_is_over_budget() -> None:
    trees = [_tree(7, 8, 9), DraftTree.empty(), _tree(2**31 - 1, 0, 1, 2), _tree(5, 6)]
    message = packed_on_host(trees, [4, 3, 2, 2])
    # The size is known from the budgets: a receiver has its own, perhaps emptier, trees.
    assert message.shape == packed_on_host([DraftTree.empty()] * 4, [4, 3, 2, 2]).shape
    for sent, got in zip(trees, unpacked_trees(message), strict=True):
        got.validate()
        expected = sent.prefix(2) if sent is trees[2] else sent
        for name in ("token_ids", "parent_indices", "depths", "scores"):
            a, b = getattr(got, name), getattr(expected, name)
            assert a.dtype == b.dtype and a.tobytes() == b.tobytes()


def test_a_reservation_is_the_first_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[list[float]] = []
    monkeypatch.setattr(ranks, "first_rank_values", lambda values: sent.append(values) or sent[0])
    first = ReservedRows({"a": 5, "ended": 2}, others=3)
    for own in (first, None, ReservedRows({"a": 1}, others=9)):
        got = ranks.first_rank_reservation(own, ["a", "new"])
        assert got == ReservedRows({"a": 5, "new": 3}, others=3)
    # All ranks join in with messages of one size.
    assert [len(values) for values in sent] == [3, 3, 3]
    sent.clear()
    for own in (None, first):
        assert ranks.first_rank_reservation(own, ["a", "new"]) is None


def test_vllms_worker_process_ends_with_a_worker_that_cannot_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM's own loop answers any other exception and waits for its next message."""
    from vllm.v1.executor.multiproc_executor import WorkerProc

    class Alone:
        """Nobody comes to the collective."""

        def wait(self, patience: Any = None) -> None:
            raise RuntimeError("timed out")

    class Worker:
        def breaks(self) -> None:
            raise MemoryError("no room")

        def leaves_a_collective(self) -> None:
            ranks.any_failed(MemoryError("no room"))

    group = SimpleNamespace(world_size=2, cpu_group=None)
    monkeypatch.setattr(ranks, "get_world_group", lambda: group)
    monkeypatch.setattr("torch.distributed.all_reduce", lambda *args, **kwargs: Alone())
    answers: list[Any] = []
    calls = iter(["breaks", "leaves_a_collective", "breaks"])
    process: Any = object.__new__(WorkerProc)
    process.worker, process.rank, process.handle_output = Worker(), 0, answers.append
    process.rpc_broadcast_mq = SimpleNamespace(dequeue=lambda **kwargs: (next(calls), (), {}, None))
    with pytest.raises(SystemExit, match="MemoryError in what all workers do together: no room"):
        process.worker_busy_loop()
    assert [type(answer) for answer in answers] == [MemoryError]
    assert list(calls) == ["breaks"]
