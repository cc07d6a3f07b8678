# SPDX-License-Identifier: Apache-2.0
"""A long run with everything switched on, watched for what grows or fades.

    python -m tests.soak.soak --steps 20000
    python -m tests.soak.soak --steps 20000 --method none

Conversations that share prefixes (about four of five prompt tokens are cached), sampling, seeds,
grammars, clients that leave, preemption by a small pool: on a small random target, so that the
steps cost little and the engine's own state is what is left to see. Every hundred steps it notes
memory and acceptance; now and then clients fall silent, and then all blocks are free and nothing
anywhere is still kept of a request. At the end it prints a summary, and fails when memory grew or
acceptance faded. Method "none" is plain vLLM, whose own growth is the baseline.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EVERY = 100
# Steps after which clients fall silent.
SILENCE = 500
# Most growth of resident memory, in KiB a thousand steps, over the second half of the run.
MEMORY_SLOPE_KIB = 1024
# Most loss of acceptance from the first half to the second; texts differ, so it varies.
ACCEPTANCE_LOSS = 0.25
# Small blocks, so that most of a conversation is cached, and too few for all of them at once.
CACHE = {"block_size": 32, "num_gpu_blocks_override": 40}
# Everything that has a container: lookups, the adaptive budget, windows.
SPECULATIVE = {"tree_budget": "auto", "ngram_topk": 3}
OWN_ARGS = (None, {"specplug_tree_budget": 8}, {"specplug_penalty": 1.3})


@dataclass
class Sample:
    step: int
    resident_kib: int
    nodes: int
    accepted: int


def resident_kib() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    raise AssertionError("no VmRSS")


class Client:
    """Conversations: each turn's prompt is the last turn's prompt, its answer and a few tokens."""

    def __init__(self, engine: Any, seed: int, conversations: int) -> None:
        self.engine = engine
        self.rng = random.Random(seed)
        self.texts: list[list[int]] = [[] for _ in range(conversations)]
        self.open: dict[str, int] = {}
        self.number = 0
        self.prompt_tokens = 0
        self.finished = self.left = 0

    def talk(self) -> None:
        """Starts a turn in every conversation that has none, most of the time."""
        for i, text in enumerate(self.texts):
            if i in self.open.values() or self.rng.random() < 0.3:
                continue
            if not text or len(text) > 170:
                # A new conversation under one of few system prompts.
                start = 20 + 30 * self.rng.randrange(3)
                text[:] = list(range(start, start + 64))
            text += [self.rng.randrange(6, 300) for _ in range(self.rng.randint(1, 6))]
            req_id = f"s{self.number}"
            self.number += 1
            self.open[req_id] = i
            self.prompt_tokens += len(text)
            self.engine.add_request(req_id, {"prompt_token_ids": list(text)}, self._params())

    def _params(self) -> Any:
        from tests.fuzz.engine_machine import OPTIONS, sampling_params

        index = self.rng.randrange(len(OPTIONS))
        # Half of the greedy ones sample, unseeded.
        greedy = not OPTIONS[index].get("temperature")
        changes: dict[str, Any] = {"extra_args": self.rng.choice(OWN_ARGS)}
        if greedy and self.rng.random() < 0.5:
            changes["temperature"] = 0.9
        return sampling_params(index, **changes)

    def step(self) -> None:
        for output in self.engine.step():
            if output.finished:
                i = self.open.pop(output.request_id)
                self.texts[i] += output.outputs[0].token_ids
                self.finished += 1
        if self.open and self.rng.random() < 0.02:
            req_id = self.rng.choice(sorted(self.open))
            self.engine.abort_request([req_id])
            del self.open[req_id]
            self.left += 1


def memory_slope(samples: list[Sample]) -> float:
    """Least-squares slope of resident memory per thousand steps, over the second half."""
    import numpy as np

    half = samples[len(samples) // 2 :]
    steps = [sample.step for sample in half]
    return float(1000 * np.polyfit(steps, [sample.resident_kib for sample in half], 1)[0])


def acceptance(samples: list[Sample]) -> float:
    return sum(s.accepted for s in samples) / max(1, sum(s.nodes for s in samples))


def run(steps: int, method: str, seed: int) -> dict[str, Any]:
    from tests.e2e.pair import Pair, core_of, make_engine, watch_prefix_hits
    from tests.fuzz.engine_machine import TREE_ENGINE
    from tests.kept_state import RequestNames, engine_roots, places_of
    from vllm_specplug.vllm_v2.plain_engine import use_v2

    trees = method != "none"
    # Plain vLLM on the runner that trees have.
    use_v2()
    options = {"speculative": SPECULATIVE} if trees else {}
    llm = make_engine(method if trees else None, **{**TREE_ENGINE, **CACHE}, **options)
    engines = Pair(None, llm)
    if trees:
        engines.watch()
    scheduler = core_of(llm).scheduler
    pool = scheduler.kv_cache_manager.block_pool
    hits = watch_prefix_hits(llm)
    client = Client(llm.llm_engine, seed, conversations=8)
    names, samples = RequestNames(scheduler), list[Sample]()

    def fall_silent() -> None:
        while client.open:
            client.step()
        # Tells the worker what finished last.
        llm.llm_engine.step()
        assert not scheduler.requests
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, "blocks are missing"
        roots = engine_roots(core_of(llm), engines.runner)
        places = places_of(roots, names.seen) if trees else []
        assert not places, f"{len(names.seen)} requests have gone and left {places[:8]}"

    for step in range(1, steps + 1):
        client.talk()
        client.step()
        if step % SILENCE == 0:
            fall_silent()
        if step % EVERY == 0:
            gc.collect()
            counts = engines.take_counts()
            samples.append(Sample(step, resident_kib(), counts.nodes, counts.accepted))
    fall_silent()
    half = len(samples) // 2
    return {
        "steps": steps,
        "method": method,
        "seed": seed,
        "requests_finished": client.finished,
        "clients_left": client.left,
        "prompt_tokens": client.prompt_tokens,
        "cached_prompt_tokens": sum(hits.values()),
        "resident_kib_per_1000_steps": memory_slope(samples),
        "acceptance_first_half": acceptance(samples[:half]),
        "acceptance_second_half": acceptance(samples[half:]),
    }


def problems(summary: dict[str, Any]) -> list[str]:
    """Returns the limits that a run exceeded."""
    found = []
    if summary["resident_kib_per_1000_steps"] > MEMORY_SLOPE_KIB:
        found.append(f"memory grew by {summary['resident_kib_per_1000_steps']:.0f} KiB/1000 steps")
    if summary["method"] != "none":
        first, second = summary["acceptance_first_half"], summary["acceptance_second_half"]
        if not first or second < (1 - ACCEPTANCE_LOSS) * first:
            found.append(f"acceptance went from {first:.2f} to {second:.2f}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--method", default="jetspec")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    from tests.e2e.fork_server import ENVIRONMENT

    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    summary = run(arguments.steps, arguments.method, arguments.seed)
    found = problems(summary)
    print(json.dumps({**summary, "problems": found}, indent=2))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
