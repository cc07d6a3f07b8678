# SPDX-License-Identifier: Apache-2.0
"""Any order of requests, aborts, preemptions, prefix hits and budgets leaves outputs as they are.

`SPECPLUG_FUZZ_EXAMPLES=150 pytest tests/fuzz` runs thousands of examples, others each time; the
default, the same few in every run, is what every run affords. Of schedulers that work ahead every
run has only the oracle's: `make test-full` and `make fuzz` have all methods.
"""

from __future__ import annotations

from unittest.mock import patch

import pytest

from tests.fuzz.engine_machine import machine_pair
from tests.fuzz.examples import TIMEOUT_S, assert_noticed, run_method
from tests.soak.soak import run
from vllm_specplug.registry import method_names

pytestmark = [pytest.mark.e2e, pytest.mark.own_process(timeout_s=TIMEOUT_S)]


@pytest.mark.parametrize("method", ["oracle", *method_names()])
def test_methods(method: str) -> None:
    run_method(method)


def test_oracle_ahead() -> None:
    run_method("oracle", ahead=True)


@pytest.mark.parametrize("ahead", [False, True])
def test_lost_compaction_is_noticed(ahead: bool) -> None:
    """The negative control: without it accepted paths that skip nodes leave wrong keys behind."""
    backend = machine_pair("oracle", ahead).runner.tree_backend
    with patch.object(backend, "compact", lambda *args: None):
        assert_noticed(r"^\('r\d+', \[", ahead)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_kept_request_is_noticed(ahead: bool) -> None:
    """A speculator that forgets nobody drafts as well as any other."""
    speculator = machine_pair("oracle", ahead).runner.speculator
    with patch.object(speculator, "forget", lambda *args: None):
        assert_noticed("requests are kept in .*extra_args", ahead)
    speculator.forget(list(speculator.extra_args), list(speculator.extra_args))


@pytest.mark.parametrize("method", ["ngram_tree", "jetspec"])
def test_short_soak(method: str) -> None:
    """The long run's script, for a few hundred steps: too few for memory to mean anything."""
    summary = run(600, method, seed=1)
    assert summary["acceptance_second_half"] > 0
    assert summary["requests_finished"] > 20 and summary["clients_left"] > 0
    assert summary["cached_prompt_tokens"] > summary["prompt_tokens"] / 2
