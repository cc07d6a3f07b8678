# SPDX-License-Identifier: Apache-2.0
"""Engines compared side by side in one process, taking turns of a second, on CPU clocks.

All engines serve the same prompts, the one that has had the least time takes the next turn:
whatever else the machine does, for longer than some seconds, hits all alike. Times are CPU seconds
of one thread, for what is reported and for the adaptive budget's own measurements; each engine has
a clock of its own that stands still while others run. They are what the wall clock shows on a core
that nobody else uses.

To be imported before anything of vLLM: it confines the process to one core and one thread and
replaces `time.perf_counter`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

CellT = TypeVar("CellT")

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
# All engines in this process, for it is its CPU time that is counted.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
# A second thread would wait for the first one in a loop, and that counts as CPU time.
os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})

# Long enough for an engine to have its weights and code in the caches as if it were alone, short
# enough for the machine's drift to hit all alike.
TURN = 1.0
PROMPTS, LONGEST_PROMPT = 400, 700


class Clock:
    """CPU seconds of this process, as `time.perf_counter`; can be set back."""

    def __init__(self) -> None:
        self._offset = 0.0

    def __call__(self) -> float:
        return time.process_time() - self._offset

    def set(self, seconds: float) -> None:
        """Goes on from `seconds`."""
        self._offset = time.process_time() - seconds


CLOCK = Clock()
time.perf_counter = CLOCK


def make_engine(model: str, speculative: dict[str, Any] | None, most_requests: int = 16) -> Any:
    """An engine in this process; `speculative` is its speculative config, None for plain vLLM."""
    from vllm import LLM

    options = {} if speculative is None else {"speculative_config": speculative}
    return LLM(
        model=model,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=2048,
        max_num_seqs=most_requests,
        max_num_batched_tokens=2048,
        # A prompt met again must cost what it cost the first time.
        enable_prefix_caching=False,
        disable_log_stats=False,
        **options,
    )


def _speculative_counts() -> dict[str, float]:
    """What all engines of this process have drafted so far."""
    from prometheus_client import REGISTRY

    names = {
        "specplug:drafts": "drafts",
        "specplug:draft_nodes": "nodes",
        "specplug:accepted_tokens": "accepted",
        "specplug:predicted_accepted_tokens": "expected",
    }
    families = REGISTRY.restricted_registry([f"{name}_total" for name in names]).collect()
    found = dict.fromkeys(names.values(), 0.0)
    for family in families:
        found[names[family.name]] += sum(sample.value for sample in family.samples)
    return found


class Load:
    """Prompts that one engine serves, `concurrency` of them at once, on a clock of its own."""

    # Where the clocks of all loads so far have come to. A later load starts there: for no engine
    # may time go back.
    _latest = 0.0

    def __init__(
        self, llm: Any, prompts: list[list[int]], concurrency: int, params: Any, prefix: str
    ) -> None:
        self._engine = llm.llm_engine
        self._waiting = list(enumerate(prompts))[::-1]
        self._concurrency, self._params, self._prefix = concurrency, params, prefix
        self._started: dict[str, float] = {}
        self._first: dict[str, float] = {}
        self._waits: list[float] = []
        self._per_token: list[float] = []
        self._tokens = 0
        self._made: dict[str, int] = {}
        self.answers: dict[int, list[int]] = {}
        """Output tokens by number of the prompt."""
        self.decode_seconds = 0.0
        """Of steps in which `concurrency` requests were decoded and no prompt was taken in."""
        self.decode_steps = self.decode_tokens = 0
        """Running requests summed over these steps, and the tokens they got."""
        self._counts = dict.fromkeys(_speculative_counts(), 0.0)
        self._epoch = max(Load._latest, CLOCK())
        self.seconds = 0.0

    @property
    def is_done(self) -> bool:
        return not self._waiting and not self._started

    def step(self) -> None:
        """One step of the engine."""
        before = _speculative_counts()
        CLOCK.set(self._epoch + self.seconds)
        while self._waiting and len(self._started) < self._concurrency:
            number, ids = self._waiting.pop()
            req_id = f"{self._prefix}-{number}"
            self._engine.add_request(req_id, {"prompt_token_ids": ids}, self._params)
            self._started[req_id] = time.perf_counter()
        decodes = len(self._made) == len(self._started) == self._concurrency
        began, had = time.perf_counter(), sum(self._made.values())
        outputs = self._engine.step()
        now = time.perf_counter()
        for output in outputs:
            req_id, ids = output.request_id, output.outputs[0].token_ids
            if req_id not in self._made:
                self._waits.append(1e3 * (now - self._started[req_id]))
                self._first[req_id] = now
            self._made[req_id] = len(ids)
        if decodes:
            self.decode_seconds += now - began
            self.decode_steps += len(outputs)
            self.decode_tokens += sum(self._made.values()) - had
        for output in outputs:
            if output.finished:
                req_id, ids = output.request_id, list(output.outputs[0].token_ids)
                self.answers[int(req_id.rsplit("-", 1)[1])] = ids
                self._tokens += len(ids)
                del self._started[req_id], self._made[req_id]
                first = self._first.pop(req_id)
                if len(ids) > 1:
                    self._per_token.append(1e3 * (now - first) / (len(ids) - 1))
        self.seconds = time.perf_counter() - self._epoch
        Load._latest = max(Load._latest, time.perf_counter())
        for name, value in _speculative_counts().items():
            self._counts[name] += value - before[name]

    def result(self) -> dict[str, float]:
        """The fields of a cell."""
        return {
            "tokens_per_s": self._tokens / self.seconds,
            "tpot_ms": median(self._per_token),
            "ttft_ms": median(self._waits),
            "seconds": self.seconds,
            **self._counts,
        }


def run_load(
    llm: Any, prompts: list[list[int]], concurrency: int, params: Any, prefix: str
) -> dict[str, float]:
    """Serves prompts with one engine alone."""
    load = Load(llm, prompts, concurrency, params, prefix)
    while not load.is_done:
        load.step()
    return load.result()


def serve_in_turns(loads: Sequence[Load], turn: float = TURN) -> None:
    """Serves all loads, each on an engine of its own, to their ends; `turn` in seconds."""
    while running := [load for load in loads if not load.is_done]:
        load = min(running, key=lambda load: load.seconds)
        end = load.seconds + turn
        while load.seconds < end and not load.is_done:
            load.step()


def read_cells(path: Path, kind: type[CellT]) -> list[CellT]:
    """The cells, dataclasses of one `kind`, that were measured so far."""
    if not path.is_file():
        return []
    return [kind(**json.loads(line)) for line in path.read_text().splitlines() if line.strip()]


def append_cells(path: Path, cells: Sequence[Any]) -> None:
    """Writes down the cells of a load."""
    with path.open("a") as stream:
        stream.writelines(json.dumps(asdict(cell)) + "\n" for cell in cells)


def missing_loads(
    cells: Sequence[Any], rounds: int, concurrencies: Sequence[int]
) -> list[tuple[int, int]]:
    """(round, requests at once) of the loads that have no cells, in the order they are run."""
    done = {(cell.round, cell.concurrency) for cell in cells}
    return [(r, c) for r in range(rounds) for c in concurrencies if (r, c) not in done]
