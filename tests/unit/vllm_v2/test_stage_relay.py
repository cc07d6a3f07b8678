# SPDX-License-Identifier: Apache-2.0
"""An earlier pipeline stage takes over what the last stage has sent."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.tree.candidates import tree_of
from tests.unit.vllm_v2.steps import SLOTS, VOCAB, input_batch, stored
from vllm_specplug.tree import DraftTree
from vllm_specplug.tree.step_trees import TreeStore, attach_trees, path_moves, walk_trees
from vllm_specplug.vllm_v2.stage_relay import Arrival, StageRelay
from vllm_specplug.vllm_v2.step_input import step_rows

N = 4
CPU = torch.device("cpu")
# Two nodes below the root, of which the first has two children.
BUSHY = tree_of([5, 4, 3, 2], [-1, -1, 0, 0])
SLOTS_OF_BATCH, CONTEXTS = [5, 2, 0], [100, 30, 7]


def _store(trees: list[DraftTree], contexts: list[int]) -> TreeStore:
    store = TreeStore(SLOTS, N, VOCAB, CPU)
    stored(store, trees, SLOTS_OF_BATCH, contexts)
    return store


class Stages:
    """The state after the last stage has walked a step, in which paths skip nodes, and drafted."""

    def __init__(self) -> None:
        batch = input_batch(SLOTS_OF_BATCH, CONTEXTS, [4, 0, 4], [0, 6, 0])
        before = [BUSHY, DraftTree.empty(), BUSHY]
        trees = attach_trees(_store(before, CONTEXTS), step_rows(batch, N))
        tokens = torch.tensor([9, 5, 4, 3, 2, 9, 9, 5, 4, 3, 2])
        samples = torch.tensor([5, 2, 9, 9, 9, 9, 4, 9, 9, 9, 9])
        self.trees, self.walk = trees, walk_trees(trees, samples, tokens)
        assert self.walk.lengths.tolist() == [2, 0, 1]
        self.following = _store([tree_of([7], [-1]), BUSHY, BUSHY], [103, 31, 9])
        self.slots = torch.arange(3 * batch.num_tokens).view(3, -1)
        table = StageRelay(None, self.following, None)._table(batch, self.walk)  # type: ignore[arg-type]
        self.entry = SimpleNamespace(
            idx_mapping=batch.idx_mapping,
            idx_mapping_np=np.array(SLOTS_OF_BATCH),
            gen_at_receive_np=np.zeros(3, np.int32),
            specplug_arrival=Arrival(table, "event", trees, self.slots),
        )
        self.handler = SimpleNamespace(
            queue=deque([None, self.entry]),
            req_idx_gen_np=np.zeros(SLOTS, np.int32),
            main_stream=SimpleNamespace(wait_event=lambda event: None),
        )
        self.store = _store(before, CONTEXTS)
        self.moved: list[Any] = []
        backend = SimpleNamespace(compact=lambda *args: self.moved.append(args))
        self.relay = StageRelay(self.handler, self.store, backend)  # type: ignore[arg-type]

    def moves(self) -> list[torch.Tensor]:
        (trees, walk, slots), *more = self.moved
        assert not more and slots is self.slots
        return list(path_moves(trees, walk, slots[0]))


def test_an_earlier_stage_gets_paths_and_trees() -> None:
    made = Stages()
    made.relay.settle()
    expected = path_moves(made.trees, made.walk, made.slots[0])
    for actual, wanted in zip(made.moves(), expected, strict=True):
        assert torch.equal(actual, wanted)
    assert not torch.equal(*expected), "no path skips a node"
    for name in ("root_positions", "parents", "depths"):
        assert torch.equal(getattr(made.store, name), getattr(made.following, name)), name


def test_each_step_is_taken_over_once() -> None:
    """After a pause has taken over a step, the later step does not do so again."""
    made = Stages()
    made.relay.settle()
    made.relay.take_over(made.entry)
    made.relay.settle()
    assert len(made.moved) == 1


@pytest.mark.parametrize("freed", [[0], [0, 1, 2]])
def test_freed_slots_keep_their_new_owners_rows(freed: list[int]) -> None:
    made = Stages()
    slots = [SLOTS_OF_BATCH[i] for i in freed]
    made.handler.req_idx_gen_np[slots] += 1
    before = made.store.rows(torch.tensor(slots)).clone()
    made.relay.take_over(made.entry)
    assert torch.equal(made.store.rows(torch.tensor(slots)), before)
    if len(freed) == 3:
        assert not made.moved
        return
    sources, targets = made.moves()
    assert torch.equal(sources[freed], targets[freed])
    assert not torch.equal(sources[2], targets[2])
