# SPDX-License-Identifier: Apache-2.0
"""Trees on targets with recurrent states against plain decoding, float32."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest

from tests.e2e.families import WINDOW_PROMPTS
from tests.e2e.hybrid_pairs import WRONG, compared, engines
from tests.e2e.pair import changed, core_of, watch_preemptions
from tests.e2e.requests import greedy

pytestmark = [pytest.mark.e2e, pytest.mark.own_process, pytest.mark.usefixtures("float32_states")]


def test_greedy_and_seeded() -> None:
    counts = compared(engines(), least_accepted=60)
    assert counts.skipping > 20, counts


def test_wrong_parents_and_wrong_commits_show() -> None:
    made = engines()
    for wrong in WRONG:
        with changed(*wrong), pytest.raises(AssertionError, match="differs"):
            compared(made)
    # Nothing of it is left behind.
    compared(made, least_accepted=60)


def test_one_state_per_sequence() -> None:
    """Caches are laid out as without speculation: same pages, and one block per state."""
    from vllm.v1.kv_cache_interface import MambaSpec

    made = engines()
    plain, tree = (core_of(llm).scheduler for llm in (made.plain, made.tree))
    groups = [s.kv_cache_config.kv_cache_groups for s in (plain, tree)]
    shapes = [[(g.kv_cache_spec, len(g.layer_names)) for g in each] for each in groups]
    assert shapes[0] == shapes[1]
    states = [i for i, g in enumerate(groups[1]) if isinstance(g.kv_cache_spec, MambaSpec)]
    assert len(states) == 3
    assert all(groups[1][i].kv_cache_spec.num_speculative_blocks == 0 for i in states)
    managers = tree.kv_cache_manager.coordinator.single_type_managers
    held: set[int] = set()
    schedule = tree.schedule

    def noted(*args: Any) -> Any:
        output = schedule(*args)
        for i in states:
            held.update(len(blocks) for blocks in managers[i].req_to_blocks.values())
        return output

    with patch.object(tree, "schedule", noted):
        compared(made, least_accepted=60)
    assert held == {1}
    assert made.runner.state.state_layers.row_bytes > 0


def test_preemption() -> None:
    """A request that lost its state is computed again from its first token."""
    made = engines(num_gpu_blocks_override=24)
    preempted = watch_preemptions(made.tree)
    made.compare(WINDOW_PROMPTS[1:], greedy(max_tokens=90, detokenize=False))
    assert preempted
