# SPDX-License-Identifier: Apache-2.0
"""The state machine for every method; see test_state_machine.py.

With `SPECPLUG_FUZZ_OUT=FOLDER` what each method's examples did is noted in `FOLDER/fuzz.md`.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.fuzz.engine_machine import EngineMachine, machine_pair
from tests.fuzz.report import command_line, name_of_check, note

# Examples of each method: a few in every run, thousands in all in the long one.
EXAMPLES = int(os.environ.get("SPECPLUG_FUZZ_EXAMPLES", "8"))
STEPS = 30


def machine_name(method: str, ahead: bool) -> str:
    """What the machine of a method is called: "METHOD" or "ahead-METHOD"."""
    return f"ahead-{method}" if ahead else method


def run_examples(
    method: str, ahead: bool = False, target: dict[str, Any] | None = None, **changes: Any
) -> Counter[str]:
    """Runs the machine, on another target if one is given; what its examples did."""
    totals: Counter[str] = Counter()
    machine = type(
        f"{name_of_check(machine_name(method, ahead))}_machine",
        (EngineMachine,),
        {"method": method, "ahead": ahead, "target": target, "totals": totals},
    )
    chosen: dict[str, Any] = {
        "max_examples": EXAMPLES,
        "stateful_step_count": STEPS,
        "deadline": None,
        "database": None,
        "print_blob": True,
        # The same examples in every run, unless somebody asks for many.
        "derandomize": EXAMPLES < 100,
        "suppress_health_check": list(HealthCheck),
    }
    run_state_machine_as_test(machine, settings=settings(**{**chosen, **changes}))
    return totals


def run_method(method: str, ahead: bool = False) -> None:
    """The examples of one method, noted; fails where they were empty."""
    start = time.perf_counter()
    totals = run_examples(method, ahead)
    name = machine_name(method, ahead)
    print(f"{name}: {dict(totals)}")
    assert totals["verified"] > 0 and totals["accepted"] > 0, totals
    assert totals["preempted"] > 0 and totals["cached"] > 0, totals
    assert (totals["stale"] > 0) == ahead, totals
    if folder := os.environ.get("SPECPLUG_FUZZ_OUT"):
        variables = {"SPECPLUG_FUZZ_EXAMPLES": str(EXAMPLES), "SPECPLUG_FUZZ_OUT": folder}
        seconds = time.perf_counter() - start
        note(name, totals, seconds, Path(folder), command_line(name, variables))


def method_checks(*methods: str, ahead: bool = False) -> dict[str, Callable[[], None]]:
    """Checks for a module of many: one for each method."""
    return {
        name_of_check(machine_name(method, ahead)): partial(run_method, method, ahead)
        for method in methods
    }


def check_oracle() -> None:
    run_method("oracle")


def check_jetspec() -> None:
    run_method("jetspec")


def check_ddtree() -> None:
    run_method("ddtree")


def check_dels() -> None:
    run_method("dels")


def check_dspark_tree() -> None:
    run_method("dspark_tree")


def check_longspec() -> None:
    run_method("longspec")


def check_eagle3_tree() -> None:
    run_method("eagle3_tree")


def check_mtp_tree() -> None:
    run_method("mtp_tree")


def check_tokenswift() -> None:
    run_method("tokenswift")


def check_ngram_tree() -> None:
    run_method("ngram_tree")


def check_ahead_oracle() -> None:
    run_method("oracle", ahead=True)


def _is_noticed(ahead: bool, match: str) -> None:
    with pytest.raises(AssertionError, match=match):
        run_examples("oracle", ahead, phases=[Phase.generate], report_multiple_bugs=False)


def check_lost_compaction_is_noticed() -> None:
    """The negative control: without it accepted paths that skip nodes leave wrong keys behind."""
    for ahead in (False, True):
        backend = machine_pair("oracle", ahead).runner.tree_backend
        backend.compact = lambda *args: None
        try:
            _is_noticed(ahead, match=r"^\('r\d+', \[")
        finally:
            del backend.compact


def check_a_kept_request_is_noticed() -> None:
    """A speculator that forgets nobody drafts as well as any other."""
    for ahead in (False, True):
        speculator = machine_pair("oracle", ahead).runner.speculator
        forget = speculator.forget
        speculator.forget = lambda *args: None
        try:
            _is_noticed(ahead, match="requests are kept in .*extra_args")
        finally:
            del speculator.forget
            forget(list(speculator.extra_args), list(speculator.extra_args))


def check_short_soak() -> None:
    """The long run's script, for a few hundred steps: too few for the slopes to mean anything."""
    from tests.soak.soak import problems, run

    samples, summary = run(400, "ngram_tree", seed=1)
    assert len(samples) == 4
    slopes = ("grew", "faded", "stay in use")
    found = [text for text in problems(summary) if not any(word in text for word in slopes)]
    assert not found, (found, summary)
    assert summary["requests_finished"] > 20 and summary["clients_left"] > 0
    assert summary["cached_prompt_tokens"] > summary["prompt_tokens"] / 2
