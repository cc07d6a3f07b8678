# SPDX-License-Identifier: Apache-2.0
"""Statistics of the worker arrive in the front end, across vLLM's process boundary."""

from __future__ import annotations

import json

import pytest

from tests.e2e import tiny
from tests.e2e.fork_server import run_code

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("metrics")]

VOCAB = 24

ENGINE = """
import json, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    target, head = sys.argv[1:]
    llm = LLM(
        target, skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=256,
        max_num_seqs=4, disable_log_stats=False, served_model_name="tiny",
        speculative_config={"method": "jetspec", "model": head, "num_speculative_tokens": 6,
                            "max_step_rows": 14, "tree_budget": 6},
    )
    prompts = [{"prompt_token_ids": [5, 6, 7 + i]} for i in range(2)]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False)
    llm.generate(prompts, params)
    llm.llm_engine.do_log_stats()
    from prometheus_client import REGISTRY
    samples = [
        [s.name, s.labels, s.value] for family in REGISTRY.collect() for s in family.samples
        if s.name.startswith(("specplug:", "vllm:spec_decode"))
    ]
    print("SAMPLES " + json.dumps(samples))
"""


@pytest.fixture(scope="module")
def samples(tmp_path_factory) -> list:
    folder = tmp_path_factory.mktemp("metrics")
    target = tiny.make_target(folder / "target", VOCAB)
    head = tiny.make_head(folder / "head", VOCAB)
    stdout = run_code(ENGINE, str(target), str(head), env={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"})
    line = next(x for x in stdout.splitlines() if x.startswith("SAMPLES "))
    return json.loads(line.removeprefix("SAMPLES "))


def value(samples: list, name: str, **labels: str) -> float:
    """Sum over the samples of one name with these labels; a missing one fails the test."""
    found = [v for n, has, v in samples if n == name and labels.items() <= has.items()]
    assert found, f"no {name} {labels}"
    return sum(found)


def per_label(samples: list, name: str, label: str) -> dict[str, float]:
    return {has[label]: v for n, has, v in samples if n == name}


def test_drafts_nodes_and_depths_agree_with_vllm(samples):
    drafts = value(samples, "specplug:drafts_total", model_name="tiny", engine="0")
    assert drafts > 0
    assert drafts == value(samples, "vllm:spec_decode_num_drafts_total")
    nodes = value(samples, "specplug:draft_nodes_total")
    assert nodes == value(samples, "vllm:spec_decode_num_draft_tokens_total")
    accepted = value(samples, "vllm:spec_decode_num_accepted_tokens_total")
    assert accepted > 0
    assert value(samples, "specplug:accepted_tokens_total") == accepted
    by_depth = per_label(samples, "specplug:accepted_tokens_total", "depth")
    by_position = per_label(
        samples, "vllm:spec_decode_num_accepted_tokens_per_pos_total", "position"
    )
    assert by_depth
    for position, count in by_position.items():
        assert by_depth.get(str(int(position) + 1), 0) == count


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
