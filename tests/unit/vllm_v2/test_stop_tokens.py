# SPDX-License-Identifier: Apache-2.0
"""No walk goes past a token that ends its request, whatever lies below it."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm import SamplingParams

from tests.unit.tree.walk_oracle import walk_on_host
from tests.unit.vllm_v2.steps import SLOTS, VOCAB, attached, trees
from vllm_specplug.tree import DraftTree
from vllm_specplug.tree.step_trees import walk_trees
from vllm_specplug.vllm_v2.stop_tokens import MAX_STOP_TOKENS, StopTokens, stop_tokens_of

CPU = torch.device("cpu")
stops = st.lists(st.sets(st.integers(0, VOCAB - 1), max_size=2), min_size=4, max_size=4)


@given(st.lists(trees(), min_size=1, max_size=4), stops, st.integers(0, 2**32 - 1))
def test_a_walk_ends_where_it_ends_on_the_host(
    batch: list[DraftTree], ends: list[set[int]], seed: int
) -> None:
    step, tokens, _ = attached(batch)
    samples = torch.from_numpy(np.random.default_rng(seed).integers(0, 3, len(tokens)))
    table = StopTokens(SLOTS, CPU)
    # Whatever slots held before is gone.
    table.put(torch.arange(SLOTS), [set(range(VOCAB))] * SLOTS)
    slots = [(3 * i + 1) % SLOTS for i in range(len(batch))]
    table.put(torch.tensor(slots), ends[: len(batch)])
    walk = walk_trees(table.mask_after_stop(step, tokens), samples, tokens)
    for i, tree in enumerate(batch):
        own = samples[step.rows.starts[i] : step.rows.starts[i + 1]].tolist()
        path, emitted = walk_on_host(tree, own, ends[i])
        assert walk.lengths[i] == len(path)
        assert walk.emitted[i, : len(path) + 1].tolist() == emitted


def test_as_many_as_a_client_sends_are_taken() -> None:
    params = SamplingParams(stop_token_ids=list(range(3 * MAX_STOP_TOKENS)))
    assert len(stop_tokens_of(params)) == 3 * MAX_STOP_TOKENS
    table = StopTokens(2, CPU)
    table.put(torch.tensor([1]), [stop_tokens_of(params)])
    assert (table.token_ids[1] >= 0).all() and (table.token_ids[0] == -1).all()
    assert stop_tokens_of(SamplingParams()) == set()
