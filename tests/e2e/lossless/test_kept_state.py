# SPDX-License-Identifier: Apache-2.0
"""Nothing is kept of a request that ended, once its engine is idle."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.e2e.pair import Pair, core_of, generate, pair
from tests.e2e.requests import PROMPTS, greedy
from tests.kept_state import RequestNames, engine_roots, places_of
from vllm_specplug.registry import method_names

pytestmark = [pytest.mark.e2e, pytest.mark.own_process]

# Everything that has a container: lookups, the adaptive budget, windows, partial caches.
DEFAULTS = {"tree_budget": "auto", "ngram_topk": 3}


def _assert_nothing_is_kept(engines: Pair, names: set[str], method: str) -> None:
    roots = engine_roots(core_of(engines.tree), engines.runner)
    found = places_of(roots, names)
    assert not found, f"{method}, {len(names)} requests: {found}"


def _go_idle(engine: Any) -> None:
    """Steps until the worker has been told what finished last, as a server does by itself."""
    for _ in range(500):
        if not engine.has_unfinished_requests():
            break
        engine.step()
    engine.step()


@pytest.mark.parametrize("method", ["oracle", *method_names()])
def test_idle_after_everything(method: str) -> None:
    topk = {} if method == "oracle" else DEFAULTS
    engines = pair(method, speculative=topk, enable_prefix_caching=True)
    core, engine = core_of(engines.tree), engines.tree.llm_engine
    names = RequestNames(core.scheduler)
    # One after the other, with an idle engine between them.
    own = [None, {"specplug_tree_budget": 8}, {"specplug_penalty": 1.3}]
    for i, prompt in enumerate(PROMPTS * 2):
        params = greedy(max_tokens=12, extra_args=own[i % len(own)])
        generate(engines.tree, [prompt], params)
        _go_idle(engine)
        _assert_nothing_is_kept(engines, names.seen, method)
    # Aborted, the last thing that happens; one of them is preempted then.
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(f"gone{i}", {"prompt_token_ids": prompt}, greedy(extra_args=own[i % 3]))
    for _ in range(4):
        engine.step()
    request = core.scheduler.running.pop()
    core.scheduler._preempt_request(request, time.monotonic())
    core.scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
    engine.abort_request([f"gone{i}" for i in range(len(PROMPTS))])
    _go_idle(engine)
    _assert_nothing_is_kept(engines, names.seen, method)
    # The probe sees what there is to see.
    engine.add_request("here", {"prompt_token_ids": PROMPTS[0]}, greedy(extra_args=own[1]))
    for _ in range(4):
        engine.step()
    (here,) = engines.runner.req_states.req_id_to_index
    roots = engine_roots(core, engines.runner)
    places = places_of(roots, {here})
    assert any("planner" in path for path in places), places
    engine.abort_request(["here"])
    _go_idle(engine)
    _assert_nothing_is_kept(engines, names.seen, method)
    assert len(names.seen) == 3 * len(PROMPTS) + 1
