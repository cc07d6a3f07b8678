# SPDX-License-Identifier: Apache-2.0
"""The state machine for every method; see test_state_machine.py."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.fuzz.engine_machine import EngineMachine

# Examples of each method: a few in every run, a thousand in all in the long one.
EXAMPLES = int(os.environ.get("SPECPLUG_FUZZ_EXAMPLES", "12"))
STEPS = 30


def _run(method: str) -> None:
    machine = type(f"{method}_machine", (EngineMachine,), {"method": method})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            deadline=None,
            database=None,
            print_blob=True,
            # The same examples in every run, unless somebody asks for many.
            derandomize=EXAMPLES < 100,
            suppress_health_check=list(HealthCheck),
        ),
    )
    print(f"{method}: {machine.verified} nodes verified, {machine.accepted} accepted, "
          f"{machine.preempted} requests preempted")  # fmt: skip
    assert machine.verified > 0 and machine.accepted > 0
    assert machine.preempted > 0


def check_oracle() -> None:
    _run("oracle")


def check_jetspec() -> None:
    _run("jetspec")


def check_ddtree() -> None:
    _run("ddtree")


def check_dels() -> None:
    _run("dels")


def check_longspec() -> None:
    _run("longspec")


def check_tokenswift() -> None:
    _run("tokenswift")


def check_ngram_tree() -> None:
    _run("ngram_tree")


def check_short_soak() -> None:
    """The long run's script, for a few hundred steps: too few for the slopes to mean anything."""
    from tests.soak.soak import problems, run

    samples, summary = run(400, "ngram_tree", seed=1)
    assert len(samples) == 4
    found = [text for text in problems(summary) if "grew" not in text and "faded" not in text]
    assert not found, (found, summary)
    assert summary["requests_finished"] > 20 and summary["clients_left"] > 0
    assert summary["cached_prompt_tokens"] > summary["prompt_tokens"] / 2
