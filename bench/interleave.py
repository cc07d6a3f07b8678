# SPDX-License-Identifier: Apache-2.0
"""Engines side by side in one process, in turns of a second, on CPU clocks.

All engines serve the same prompts, and the one with the least time takes the next turn. So other
work of the machine that takes longer than some seconds affects all. Times are CPU seconds of one
thread, also for the adaptive budget. Each engine has its own clock, which stops while others run.
On an idle core it would agree with the wall clock.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from vllm_specplug.vllm_worker.frames import with_room_for_callees

# Long enough for an engine to fill the caches with its weights and code, short enough for the
# machine's drift to affect all engines.
TURN_SECONDS = 1.0
# Requests with fewer tokens have no pace.
_FEWEST_PACED = 8


class Clock:
    """CPU seconds of this process in place of `time.perf_counter`, which can be set."""

    def __init__(self) -> None:
        self._offset = 0.0

    def __call__(self) -> float:
        return time.process_time() - self._offset

    def set(self, seconds: float) -> None:
        """Continues from `seconds`."""
        self._offset = time.process_time() - seconds


CLOCK = Clock()


def confine_process() -> None:
    """Uses one core, one thread, and `CLOCK` in place of `time.perf_counter`.

    Raises:
        RuntimeError: if vLLM or torch are imported, which have read these settings.
    """
    if not {"torch", "vllm"}.isdisjoint(sys.modules):
        raise RuntimeError("torch or vLLM were imported before the process was confined")
    # All engines must run in this process, whose CPU time is measured.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    # A second thread would wait for the first one in a loop, which takes CPU time.
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    time.perf_counter = CLOCK


@dataclass(frozen=True)
class Load:
    """Prompts for all systems, `concurrency` of them at once."""

    name: str
    round: int
    prompts: Sequence[list[int]]
    concurrency: int


class _Counters:
    """Counters of all drafters of this process; each step adds to the engine that ran it."""

    NAMES = {
        "specplug:drafts": "drafts",
        "specplug:draft_nodes": "nodes",
        "specplug:accepted_tokens": "accepted",
        "specplug:predicted_accepted_tokens": "expected",
    }

    def __init__(self) -> None:
        from vllm_specplug.metrics.step_stats import StepStats

        self.draft_ms: list[float] = []
        observe = StepStats.observe_ms

        def observe_ms(stats: StepStats, phase: str, milliseconds: float) -> None:
            if phase == "draft":
                self.draft_ms.append(milliseconds)
            observe(stats, phase, milliseconds)

        StepStats.observe_ms = observe_ms  # type: ignore[method-assign]

    def totals(self) -> dict[str, float]:
        from prometheus_client import REGISTRY

        found = dict.fromkeys(self.NAMES.values(), 0.0)
        counters = REGISTRY.restricted_registry([f"{name}_total" for name in self.NAMES])
        for family in counters.collect():
            found[self.NAMES[family.name]] += sum(sample.value for sample in family.samples)
        return found


def answer_tokens(number: int, longest: int) -> int:
    """Returns the limit of an answer's tokens, half to all of `longest`.

    Answers of equal length would begin and end together in plain decoding only. Its steps would
    then never wait for another request's prompt, as in real loads.
    """
    return max(1, round(longest * (0.5 + 0.5 * (0.618 * number % 1.0))))


class Serving:
    """A load on one engine, with its own clock."""

    # The latest time of all loads, at which later ones start, because time must not go back.
    _latest = 0.0
    _counters: _Counters | None = None

    def __init__(self, llm: Any, load: Load, params: Any, prefix: str) -> None:
        if Serving._counters is None:
            Serving._counters = _Counters()
        self.llm = llm
        self.load = load
        self._waiting = list(enumerate(load.prompts))[::-1]
        self._params, self._prefix = params, prefix
        self._started: dict[str, float] = {}
        self._first: dict[str, float] = {}
        self._waits: list[float] = []
        self._per_token: list[float] = []
        self._made: dict[str, int] = {}
        # Seconds and tokens of the steps below, by running request.
        self._decoded: dict[str, tuple[float, int]] = {}
        self._paces: list[float] = []
        self.answers: dict[int, list[int]] = {}
        """Output tokens by number of the prompt."""
        self.steps: list[tuple[int, int, float]] = []
        """Requests, tokens and seconds of each step in which `concurrency` requests were decoded
        and none was prefilled."""
        self.draft_ms: list[float] = []
        """Milliseconds of the drafts of these steps."""
        self._counts = dict.fromkeys(_Counters.NAMES.values(), 0.0)
        self._epoch = max(Serving._latest, CLOCK())
        self.seconds = 0.0

    @property
    def is_done(self) -> bool:
        return not self._waiting and not self._started

    # For plain vLLM, too: else a system's place in the interpreter's memory is measured.
    @with_room_for_callees
    def step(self) -> None:
        """Runs a step of the engine."""
        assert self._counters is not None
        engine = self.llm.llm_engine
        before = self._counters.totals()
        self._counters.draft_ms.clear()
        CLOCK.set(self._epoch + self.seconds)
        while self._waiting and len(self._started) < self.load.concurrency:
            number, ids = self._waiting.pop()
            req_id = f"{self._prefix}-{number}"
            params = self._params.clone()
            params.max_tokens = answer_tokens(number, params.max_tokens)
            engine.add_request(req_id, {"prompt_token_ids": ids}, params)
            self._started[req_id] = time.perf_counter()
        decodes = len(self._made) == len(self._started) == self.load.concurrency
        began, had = time.perf_counter(), sum(self._made.values())
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            req_id, ids = output.request_id, output.outputs[0].token_ids
            if req_id not in self._made:
                self._waits.append(1e3 * (now - self._started[req_id]))
                self._first[req_id] = now
            elif decodes:
                seconds, tokens = self._decoded.get(req_id, (0.0, 0))
                tokens += len(ids) - self._made[req_id]
                self._decoded[req_id] = seconds + now - began, tokens
            self._made[req_id] = len(ids)
        if decodes:
            self.steps.append((len(outputs), sum(self._made.values()) - had, now - began))
            self.draft_ms += self._counters.draft_ms
        for output in outputs:
            if output.finished:
                self._finish(output, now)
        self.seconds = time.perf_counter() - self._epoch
        Serving._latest = max(Serving._latest, time.perf_counter())
        for name, value in self._counters.totals().items():
            self._counts[name] += value - before[name]

    def _finish(self, output: Any, now: float) -> None:
        req_id, ids = output.request_id, list(output.outputs[0].token_ids)
        self.answers[int(req_id.rsplit("-", 1)[1])] = ids
        del self._started[req_id], self._made[req_id]
        first = self._first.pop(req_id)
        if len(ids) > 1:
            self._per_token.append(1e3 * (now - first) / (len(ids) - 1))
        seconds, tokens = self._decoded.pop(req_id, (0.0, 0))
        if tokens >= _FEWEST_PACED:
            self._paces.append(1e3 * seconds / tokens)

    def result(self) -> dict[str, Any]:
        """Returns sums and medians over the load; times are in CPU seconds or milliseconds.

        "steps": number of `steps`. "decode_": over these; "decode_steps" counts each request.
        "pace_": milliseconds per token of each request over the same steps, of requests that got
        enough tokens in them. An answer's "tpot_" also includes the steps that prefilled other
        requests, and in a closed loop a faster system prefills more of them per answer. "draft_ms"
        is None for engines that do not draft through this plugin.
        """
        import numpy as np

        tokens = sum(map(len, self.answers.values()))
        return {
            "concurrency": self.load.concurrency,
            "prompts": len(self.load.prompts),
            "tokens": tokens,
            "seconds": self.seconds,
            "tokens_per_s": tokens / self.seconds,
            "ttft_ms": median(self._waits),
            "tpot_ms": median(self._per_token) if self._per_token else None,
            "tpot_p99_ms": float(np.percentile(self._per_token, 99)) if self._per_token else None,
            "pace_ms": median(self._paces) if self._paces else None,
            "pace_p99_ms": float(np.percentile(self._paces, 99)) if self._paces else None,
            "steps": len(self.steps),
            "decode_steps": sum(requests for requests, _, _ in self.steps),
            "decode_tokens": sum(made for _, made, _ in self.steps),
            "decode_seconds": sum(seconds for _, _, seconds in self.steps),
            "step_ms": 1e3 * median(s for _, _, s in self.steps) if self.steps else None,
            "draft_ms": median(self.draft_ms) if self.draft_ms else None,
            **self._counts,
        }


def serve_alone(serving: Serving) -> Serving:
    """Serves a load to the end."""
    while not serving.is_done:
        serving.step()
    return serving


def serve_side_by_side(servings: Sequence[Serving], turn: float = TURN_SECONDS) -> None:
    """Serves loads of several engines to the end; `turn` is in seconds."""
    while running := [serving for serving in servings if not serving.is_done]:
        serving = min(running, key=lambda serving: serving.seconds)
        end = serving.seconds + turn
        while serving.seconds < end and not serving.is_done:
            serving.step()
