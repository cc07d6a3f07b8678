# SPDX-License-Identifier: Apache-2.0
"""Statistics of the worker arrive in the front end, across vLLM's process boundary."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e import tiny
from tests.e2e.fork_server import run_code

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("metrics")]

VOCAB = 24

ENGINE = """
import json, sys
from vllm import LLM, SamplingParams

from tests.e2e.engine_process import fork_workers

if __name__ == "__main__":
    fork_workers()
    target, head, options = sys.argv[1:]
    options = json.loads(options)
    llm = LLM(
        target, skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=256,
        max_num_seqs=4, disable_log_stats=False, served_model_name="tiny",
        per_request_spec_decode_metrics="detailed", async_scheduling=options.pop("ahead"),
        speculative_config={"method": "jetspec", "model": head, "num_speculative_tokens": 6,
                            **options},
    )
    prompts = [{"prompt_token_ids": [5, 6, 7 + i]} for i in range(2)]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False)
    requests = [
        done.outputs[0].spec_decode_metrics.to_dict() for done in llm.generate(prompts, params)
    ]
    llm.llm_engine.do_log_stats()
    from prometheus_client import REGISTRY
    samples = [
        [s.name, s.labels, s.value] for family in REGISTRY.collect() for s in family.samples
        if s.name.startswith(("specplug:", "vllm:spec_decode"))
    ]
    print("MEASURED " + json.dumps([samples, requests]))
"""


def measure(folder: Path, **options: object) -> tuple[list, list[dict]]:
    """Returns the metrics of an engine in a process of its own, and those of its requests."""
    target = tiny.make_target(folder / "target", VOCAB)
    head = tiny.make_head(folder / "head", VOCAB)
    arguments = (str(target), str(head), json.dumps(options))
    stdout = run_code(ENGINE, *arguments, env={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"})
    line = next(x for x in stdout.splitlines() if x.startswith("MEASURED "))
    samples, requests = json.loads(line.removeprefix("MEASURED "))
    return samples, requests


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> tuple[list, list[dict]]:
    folder = tmp_path_factory.mktemp("metrics")
    return measure(folder, ahead=False, max_step_rows=14, tree_budget=6)


@pytest.fixture(scope="module")
def samples(measured) -> list:
    return measured[0]


def value(samples: list, name: str, **labels: str) -> float:
    """Sum over the samples of one name with these labels; a missing one fails the test."""
    found = [v for n, has, v in samples if n == name and labels.items() <= has.items()]
    assert found, f"no {name} {labels}"
    return sum(found)


def per_label(samples: list, name: str, label: str) -> dict[str, float]:
    return {has[label]: v for n, has, v in samples if n == name}


def assert_counts_agree(samples: list, requests: list[dict]) -> None:
    """Asserts that the engine's metrics are vLLM's, and the sums of the requests' metrics."""
    for field, name, vllms in (
        ("num_spec_steps", "drafts_total", "drafts_total"),
        ("num_draft_tokens", "draft_nodes_total", "draft_tokens_total"),
        ("num_accepted_draft_tokens", "accepted_tokens_total", "accepted_tokens_total"),
    ):
        count = value(samples, f"specplug:{name}", model_name="tiny", engine="0")
        assert count == value(samples, f"vllm:spec_decode_num_{vllms}") > 0
        assert count == sum(request[field] for request in requests)
    for request in requests:
        assert sum(request["acceptance_histogram"]) == len(request["per_step_drafted"])
        assert all(request["per_step_drafted"])


def test_counts_agree_with_vllm(measured):
    assert_counts_agree(*measured)


def test_depths_agree_with_vllm(samples):
    by_depth = per_label(samples, "specplug:accepted_tokens_total", "depth")
    by_position = per_label(
        samples, "vllm:spec_decode_num_accepted_tokens_per_pos_total", "position"
    )
    assert by_depth
    for position, count in by_position.items():
        assert by_depth.get(str(int(position) + 1), 0) == count


def test_reserved_rows_without_a_node_are_no_drafts(tmp_path):
    """A scheduler that works ahead reserves rows before it knows how many nodes fill them."""
    assert_counts_agree(*measure(tmp_path, ahead=True, tree_budget="auto"))


def test_phases_are_timed_and_trees_are_within_budget(samples):
    steps = value(samples, "specplug:step_nodes_count")
    assert steps > 0
    for phase in ("draft", "verify", "compact"):
        assert value(samples, f"specplug:{phase}_seconds_count") >= steps
        assert value(samples, f"specplug:{phase}_seconds_sum") > 0
    # Fourteen rows for two requests: seven each, of which one is the root.
    assert value(samples, "specplug:tree_budget") == 6
    assert value(samples, "specplug:step_nodes_sum") == value(samples, "specplug:draft_nodes_total")


def test_steps_without_a_tree_carry_a_reason(samples):
    # The last tokens of each request leave no depth to draft.
    assert value(samples, "specplug:plain_steps_total", reason="near_max_len") > 0
    assert value(samples, "specplug:plain_steps_total", reason="context") == 0
