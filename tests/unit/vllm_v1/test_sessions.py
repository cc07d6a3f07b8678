# SPDX-License-Identifier: Apache-2.0
"""A session whose input goes on after an answer: what the next turn takes for computed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.sched.utils import check_stop
from vllm.v1.request import Request, RequestStatus, StreamingUpdate

from vllm_specplug.accept import walk_trees
from vllm_specplug.tree import DraftTree
from vllm_specplug.vllm_v1.runner import TreeRunnerMixin

PROMPT, ANSWER, STOP, NEXT = [10, 11, 12, 13], [20, 21], 1, [30, 31]


@pytest.mark.parametrize("drafts", [[], [21], [21, STOP], [21, STOP, 22, 23]])
def test_the_next_turn_computes_every_token_that_plain_decoding_would(drafts: list[int]) -> None:
    """vLLM counts accepted drafts as computed, those after the end of the answer too: its blocks
    would hold them in place of the next turn's tokens."""
    params = SamplingParams(max_tokens=20, stop_token_ids=[STOP])
    session = Request("s", list(PROMPT), params, None, resumable=True)
    session.append_output_token_ids(ANSWER[0])
    session.num_computed_tokens = len(PROMPT)
    runner: Any = object.__new__(TreeRunnerMixin)
    runner.input_batch = SimpleNamespace(req_ids=["s"])
    runner.requests = {"s": SimpleNamespace(sampling_params=params)}
    text = [21, STOP, 22, 23, 24]
    tree = DraftTree.chain(drafts)
    emitted = walk_trees(
        [tree], [0], lambda rows, live: [text[row] for row in rows], runner.state.ends_request
    ).token_ids[0]
    # As `Scheduler.update_from_output` does: rows less rejected drafts, then the end is looked for.
    session.num_computed_tokens += 1 + len(drafts) - (1 + len(drafts) - len(emitted))
    for token in emitted:
        session.append_output_token_ids(token)
        if check_stop(session, 100):
            break
    if not session.is_finished():
        assert drafts == []  # one token, and the answer goes on
        return
    scheduler: Any = object.__new__(Scheduler)
    scheduler.num_waiting_for_streaming_input, scheduler.log_stats = 0, False
    scheduler.hash_block_size = 4
    session.status = RequestStatus.WAITING
    follow_up = Request("s", list(NEXT), params, None, resumable=True)
    update = StreamingUpdate.from_request(follow_up)
    scheduler._update_request_as_session(session, update)
    # All but the stop token, whose K and V plain decoding never computes.
    assert list(session.all_token_ids) == [*PROMPT, *ANSWER, *NEXT]
    assert session.num_computed_tokens == len(PROMPT) + len(ANSWER)
