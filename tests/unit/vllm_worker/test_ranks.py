# SPDX-License-Identifier: Apache-2.0
"""Tensor parallel ranks verify the same trees, whatever each of them would have drafted."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.side_by_side import run_side_by_side
from tests.unit.tree.candidates import tree_of
from vllm_specplug.drafting.device_levels import unpacked_trees
from vllm_specplug.drafting.reserved_rows import ReservedRows
from vllm_specplug.tree import DraftTree
from vllm_specplug.vllm_worker import ranks
from vllm_specplug.vllm_worker.ranks import packed_on_host


def _run_both(role: str, folder: Path, env: list[dict[str, str]], *arguments: str) -> list[Any]:
    """What two workers say; see `worker_process`."""
    each = [[role, str(folder), env[rank], rank, *arguments] for rank in range(2)]
    run_side_by_side("tests.unit.vllm_worker.worker_process", each, folder)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_replicas_measure_step_costs_together(tmp_path: Path) -> None:
    """A slower clock does not change how many forwards run: a forward that the other replica does
    not join never ends."""
    from vllm.utils.network_utils import get_open_port

    shared = {"VLLM_DP_SIZE": "2", "VLLM_DP_MASTER_PORT": str(get_open_port())}
    env = [{**shared, "VLLM_DP_RANK": str(rank)} for rank in range(2)]
    first, second = _run_both("replica", tmp_path, env)
    assert first["rows"] and first == second


@pytest.mark.parametrize("where", ["draft", "forward", "collective"])
def test_a_worker_that_fails_to_warm_up_leaves_no_other_waiting(tmp_path: Path, where: str) -> None:
    """Both end; where the other one waits in a forward that only both can end, the worker that
    failed says what failed, and ends."""
    from vllm.utils.network_utils import get_open_port

    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(get_open_port())}
    first, second = _run_both("rank", tmp_path, [env, env], where)
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
    monkeypatch.setattr(ranks, "drafting_workers", lambda: group)
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
