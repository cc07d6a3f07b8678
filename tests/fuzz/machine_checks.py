# SPDX-License-Identifier: Apache-2.0
"""The state machine for every method, on V1; see test_state_machine.py.

With `SPECPLUG_FUZZ_OUT=FOLDER` what each method's examples did is noted in `FOLDER/fuzz.md`.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.fuzz.engine_machine import EngineMachine
from tests.fuzz.report import command_line, note

# Examples of each method: a few in every run, thousands in all in the long one.
EXAMPLES = int(os.environ.get("SPECPLUG_FUZZ_EXAMPLES", "8"))
STEPS = 30


def machine_name(method: str, ahead: bool | None) -> str:
    """What the machine of a method is called: "METHOD", "v2-METHOD" or "v2-ahead-METHOD"."""
    return {None: "", False: "v2-", True: "v2-ahead-"}[ahead] + method


def run_examples(
    method: str, ahead: bool | None = None, target: dict[str, Any] | None = None, **changes: Any
) -> Counter[str]:
    """Runs the machine, on another target if one is given; what its examples did."""
    totals: Counter[str] = Counter()
    machine = type(
        f"{machine_name(method, ahead).replace('-', '_')}_machine",
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


def run_method(method: str, ahead: bool | None = None) -> None:
    """The examples of one method on one runner, noted; fails where they were empty."""
    start = time.perf_counter()
    totals = run_examples(method, ahead)
    name = machine_name(method, ahead)
    print(f"{name}: {dict(totals)}")
    assert totals["verified"] > 0 and totals["accepted"] > 0, totals
    assert totals["preempted"] > 0 and totals["cached"] > 0, totals
    assert (totals["stale"] > 0) == bool(ahead), totals
    if folder := os.environ.get("SPECPLUG_FUZZ_OUT"):
        variables = {"SPECPLUG_FUZZ_EXAMPLES": str(EXAMPLES), "SPECPLUG_FUZZ_OUT": folder}
        seconds = time.perf_counter() - start
        note(name, totals, seconds, Path(folder), command_line(name, variables))


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


def check_lost_compaction_is_noticed() -> None:
    """The negative control: without it accepted paths that skip nodes leave wrong keys behind."""
    import pytest

    from vllm_specplug.vllm_v1 import tree_backend

    compact = tree_backend.compact_kv
    tree_backend.compact_kv = lambda *args, **kwargs: None
    try:
        with pytest.raises(AssertionError):
            run_examples("oracle", phases=[Phase.generate], report_multiple_bugs=False)
    finally:
        tree_backend.compact_kv = compact


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
