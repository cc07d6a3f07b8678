# SPDX-License-Identifier: Apache-2.0
"""Random orders of everything that can happen to a request, against plain decoding.

A hypothesis state machine drives one engine with trees by its step loop: requests are added with
any mix of options, also onto prefixes that are cached; aborted, preempted one or all, resumed;
budgets change; the prefix cache is reset. At every step each output must be the beginning of
what the plain engine answers to that request by itself. When all is done no block may be missing
and nothing may be kept of any request.

Both engines live as long as the process and each plain answer is computed once, so that an
example costs fractions of a second. Whether the tree engine's scheduler waits for every step or
works ahead of it is a parameter.

Examples repeat: grammars, which compile in threads, are ready after a number of looks at their
request instead of when the clock says so. Without that, an engine that has nothing else to do
takes thousands of empty steps before a grammar is there.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.e2e.oracle import OracleDrafter
from tests.e2e.pair import (
    Pair,
    assert_same_logprobs,
    core_of,
    generate,
    pair,
    watch_prefix_hits,
)
from tests.kept_state import RequestNames, engine_roots, places_of
from vllm_specplug.vllm_v2.plain_engine import use_v2

VOCABULARY = range(6, 340)
# A pool this small preempts; blocks of 32 tokens.
TREE_ENGINE = {"enable_prefix_caching": True, "num_gpu_blocks_override": 12, "max_num_seqs": 6,
               "max_num_batched_tokens": 96}  # fmt: skip
PROMPTS = (
    [9],
    [7, 40, 41],
    [60, 61, 62, 63] * 3,
    [100, 9, 12, 13] * 11,
    [100, 9, 12, 13] * 11 + [80],
    list(range(20, 90)),
    list(range(20, 120)),
)
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"max_tokens": 1},
    {"max_tokens": 40, "presence_penalty": 0.9},
    {"repetition_penalty": 1.3, "logit_bias": {50: 4.0}},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 1.0, "seed": 5, "min_p": 0.1, "top_k": 20},
    {"temperature": 0.7, "seed": 11, "logprobs": 3, "prompt_logprobs": 2},
    {"stop_token_ids": [81, 11, 164, 227], "min_tokens": 4},
    {"stop": ["a", "e"]},
    {"bad_words": ["cat"], "frequency_penalty": 0.6},
    {"allowed_token_ids": list(range(6, 300, 2))},
    {"structured": {"regex": "[a-z ]{8,40}"}, "ignore_eos": False},
    {"structured": {"choice": ["the red fox", "the lazy dog"]}, "ignore_eos": False},
    {"structured": {"json": {"type": "object", "properties": {"age": {"type": "integer"}},
                             "required": ["age"], "additionalProperties": False}},
     "ignore_eos": False},
)  # fmt: skip
DEFAULTS = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
# Nodes a request asks for by itself; None leaves it to the engine.
BUDGETS = (None, None, 0, 1, 5, 16)
# How often the scheduler finds a grammar unfinished, in turn.
GRAMMAR_DELAYS = (0, 3, 0, 0, 9, 1)


def sampling_params(index: int, budget: int | None = None, **changes: Any) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    options = {**DEFAULTS, **OPTIONS[index], **changes}
    structured = options.pop("structured", None)
    if structured is not None:
        options["structured_outputs"] = StructuredOutputsParams(**structured)
    if budget is not None:
        options["extra_args"] = {"specplug_tree_budget": budget}
    return SamplingParams(**options)


def machine_pair(method: str, ahead: bool, target: dict[str, Any] | None = None) -> Pair:
    """The engines of a machine; `target` holds what is other than in `TREE_ENGINE`, and the
    model."""
    use_v2()
    # Counting ranks is the only thing compiled here, and takes longer than all examples.
    torch.compiler.set_stance("force_eager")
    tree, model = {**TREE_ENGINE, **(target or {})}, {}
    if method.partition("-")[0] == "assistant_tree":
        # Its target has three KV cache groups.
        tree["num_gpu_blocks_override"] = 26
    if "model" in tree:
        model = {"model": tree.pop("model")}
    made = pair(method, tree={**tree, "async_scheduling": ahead}, **model)
    scheduler = type(core_of(made.tree).scheduler).__name__
    assert scheduler == ("AsyncScheduler" if ahead else "Scheduler"), scheduler
    return made


# By plain engine, prompt and options: a method may have a target of its own. Engines live on.
_answers: dict[tuple[int, tuple[int, ...], int], Any] = {}


def plain_answer(engines: Pair, prompt: list[int], option: int) -> Any:
    """vLLM's output of the request without speculation."""
    key = (id(engines.plain), tuple(prompt), option)
    if key not in _answers:
        _answers[key] = generate(engines.plain, [prompt], sampling_params(option))[0]
    return _answers[key]


@dataclass
class Expected:
    """A request that runs: what it was asked, how far it is."""

    prompt: list[int]
    output: Any
    seen: int = 0

    @property
    def token_ids(self) -> list[int]:
        return list(self.output.outputs[0].token_ids)


class Watch:
    """What happens in the scheduler of one tree engine, counted; and when grammars are ready."""

    def __init__(self, engines: Pair) -> None:
        self.scheduler = core_of(engines.tree).scheduler
        self.preempted = 0
        self.prefix_hits = watch_prefix_hits(engines.tree)
        self.looks: dict[str, int] = {}
        self.names = RequestNames(self.scheduler)
        self._count_preemptions()
        self._delay_grammars()

    def restart(self) -> None:
        """Before an example."""
        self.preempted = 0
        self.prefix_hits.clear()
        self.looks.clear()
        self.names.seen.clear()

    def _count_preemptions(self) -> None:
        original = self.scheduler._preempt_request

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.preempted += 1
            return original(*args, **kwargs)

        self.scheduler._preempt_request = counted

    def _delay_grammars(self) -> None:
        from vllm.v1.request import RequestStatus

        original = self.scheduler._handle_blocked_waiting_request

        def is_ready(request: Any) -> bool:
            if request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
                looks = self.looks
                if request.request_id not in looks:
                    looks[request.request_id] = GRAMMAR_DELAYS[len(looks) % len(GRAMMAR_DELAYS)]
                if looks[request.request_id]:
                    looks[request.request_id] -= 1
                    return False
                compiled = request.structured_output_request._grammar
                if isinstance(compiled, Future):
                    compiled.result(timeout=120)
            return bool(original(request))

        self.scheduler._handle_blocked_waiting_request = is_ready


# By the engine core watched, all of which live on.
_watches: dict[int, Watch] = {}
_request_numbers = itertools.count()


class EngineMachine(RuleBasedStateMachine):
    """One example; the engine is shared by all."""

    method = "oracle"
    ahead: ClassVar[bool] = False
    """Whether the scheduler works ahead."""
    target: ClassVar[dict[str, Any] | None] = None
    """Of `machine_pair`."""
    totals: ClassVar[Counter[str]] = Counter()
    """What all examples of a method did; one of its own for each."""

    @initialize(
        first=st.lists(
            st.tuples(st.sampled_from(PROMPTS), st.integers(0, len(OPTIONS) - 1)),
            min_size=2,
            max_size=5,
        )
    )
    def begin(self, first: list[tuple[list[int], int]]) -> None:
        self.engines = machine_pair(self.method, self.ahead, self.target)
        self.core = core_of(self.engines.tree)
        self.engine = self.engines.tree.llm_engine
        if id(self.core) not in _watches:
            _watches[id(self.core)] = Watch(self.engines)
        self.watch = _watches[id(self.core)]
        self.watch.restart()
        self.waiting: dict[str, Expected] = {}
        self.texts: list[list[int]] = []
        self.engines.take_counts()
        self.engine.reset_prefix_cache()
        self.totals["examples"] += 1
        for prompt, option in first:
            self._add(list(prompt), option, None)

    # -- rules -------------------------------------------------------------------------------

    def _add(self, prompt: list[int], option: int, budget: int | None) -> None:
        req_id = f"r{next(_request_numbers)}"
        self.waiting[req_id] = Expected(prompt, plain_answer(self.engines, prompt, option))
        self.totals["requests"] += 1
        # The oracle knows every request of the example: some branches are another one's answer.
        OracleDrafter.sequences = [e.prompt + e.token_ids for e in self.waiting.values()]
        self.engine.add_request(
            req_id, {"prompt_token_ids": prompt}, sampling_params(option, budget)
        )

    @rule(
        prompt=st.sampled_from(PROMPTS),
        option=st.integers(0, len(OPTIONS) - 1),
        budget=st.sampled_from(BUDGETS),
    )
    def add(self, prompt: list[int], option: int, budget: int | None) -> None:
        if len(self.waiting) < 10:
            self._add(list(prompt), option, budget)

    # What is drawn never depends on the engine: hypothesis replays draws. Rules that find nothing
    # to do do nothing.

    @rule(
        which=st.integers(0, 7),
        part=st.floats(0, 1),
        option=st.integers(0, len(OPTIONS) - 1),
    )
    def continue_a_finished_one(self, which: int, part: float, option: int) -> None:
        """A prompt whose blocks hold generated tokens."""
        if not self.texts or len(self.waiting) >= 10:
            return
        text = self.texts[which % len(self.texts)]
        if len(text) < 180:
            self._add([*text[: max(1, round(part * len(text)))], 17], option, None)

    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self._step()

    @rule(which=st.integers(0, 9))
    def abort(self, which: int) -> None:
        if self.waiting:
            req_id = list(self.waiting)[which % len(self.waiting)]
            self.engine.abort_request([req_id])
            del self.waiting[req_id]
            self.totals["aborted"] += 1

    @rule()
    def preempt_all(self) -> None:
        """What a reset of the prefix cache does to running requests."""
        assert self.core.scheduler.reset_prefix_cache(reset_running_requests=True)

    @rule()
    def preempt_last(self) -> None:
        """What the scheduler does when blocks run out."""
        scheduler = self.core.scheduler
        if scheduler.running:
            request = scheduler.running.pop()
            scheduler._preempt_request(request, time.monotonic())
            scheduler.prev_step_scheduled_req_ids.discard(request.request_id)

    @rule()
    def reset_prefix_cache(self) -> None:
        self.engine.reset_prefix_cache()

    @rule(rows=st.sampled_from((6, 20, 512)))
    def change_budget(self, rows: int) -> None:
        self.engines.runner.planner.row_budget.max_step_rows = rows

    @rule()
    def go_idle(self) -> None:
        """Everything ends, and the engine steps once more, as a server does by itself."""
        for _ in range(2000):
            if not self.engine.has_unfinished_requests():
                break
            self._step()
        while self.engine.step() or self.core.batch_queue:
            pass  # what was scheduled ahead for requests that ended, and that they ended
        self.totals["idle"] += 1
        self._nothing_is_kept()

    # -- invariants --------------------------------------------------------------------------

    def _step(self) -> None:
        for output in self.engine.step():
            expected = self.waiting[output.request_id]
            completion = output.outputs[0]
            ids = list(completion.token_ids)
            what = (output.request_id, expected.prompt, ids, expected.token_ids)
            assert ids == expected.token_ids[: len(ids)], what
            assert len(ids) >= expected.seen, what
            expected.seen = len(ids)
            if output.finished:
                assert ids == expected.token_ids, what
                plain = expected.output.outputs[0]
                for name in ("text", "finish_reason", "stop_reason"):
                    assert getattr(completion, name) == getattr(plain, name), (name, what)
                assert_same_logprobs(plain.logprobs, completion.logprobs, str(what))
                assert_same_logprobs(
                    expected.output.prompt_logprobs, output.prompt_logprobs, f"prompt of {what}"
                )
                self.texts.append(expected.prompt + ids)
                del self.waiting[output.request_id]

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        try:
            if self.totals["examples"] % 2:
                # Rules alone may leave a method's few examples without one.
                self._step()
                self.preempt_all()
            self.go_idle()
            assert not self.waiting, sorted(self.waiting)
        except BaseException:
            # The engine is shared: the next example must not start from this one's remains.
            self.engine.abort_request(list(self.waiting))
            while self.engine.step() or self.core.batch_queue:
                pass
            raise
        finally:
            counts = self.engines.take_counts()
            self.totals["drafts"] += counts.drafts
            self.totals["verified"] += counts.nodes
            self.totals["accepted"] += counts.accepted
            self.totals["stale"] += counts.stale
            self.totals["preempted"] += self.watch.preempted
            self.totals["cached"] += sum(self.watch.prefix_hits.values())
            self.engines.runner.planner.row_budget.max_step_rows = 512

    def _nothing_is_kept(self) -> None:
        scheduler = self.core.scheduler
        pool = scheduler.kv_cache_manager.block_pool
        # One block is the null block; cached blocks that nobody uses are free.
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        assert all(block.ref_cnt == 0 for block in pool.blocks if not block.is_null)
        assert not scheduler.requests and not scheduler.running and not scheduler.waiting
        runner = self.engines.runner
        assert not runner.req_states.req_id_to_index
        places = places_of(engine_roots(self.core, runner), self.watch.names.seen)
        assert not places, f"requests are kept in {places}"
        # Builders make valid trees of whatever a head computes: none was dropped.
        assert not self.engines.runner.planner._has_warned
