# SPDX-License-Identifier: Apache-2.0
"""`vllm serve --spec-method tree` over HTTP, which finds the method by the head: what it serves and
what it refuses."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
import yaml
from openai.types.chat import ChatCompletion
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tests.e2e.harness import METHODS, chat_ids, engine_args, run_engine, target_path
from tests.e2e.served import MARK, Server
from vllm_specplug.bench.server import free_port

pytestmark = [pytest.mark.e2e, MARK]

QUESTIONS = [
    "Write a Python function that reverses a string.",
    "What is the capital of France?",
    "List three fruits.",
    "Count from one to ten.",
]


# Drafts for certain, whatever the clock says of the rest.
DRAFTED = {"extra_body": {"vllm_xargs": {"specplug_tree_budget": 8}}}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    port = free_port()
    command = [
        target_path(), "--dtype", "float32", "--enforce-eager", "--max-model-len", "1024",
        "--spec-method", "tree", "--spec-model", str(METHODS["jetspec"]["model"]),
        "--spec-tokens", "12", "--served-model-name", "smollm2", "--port", str(port),
        "--per-request-spec-decode-metrics", "detailed",
    ]  # fmt: skip
    with Server([command], port, tmp_path_factory.mktemp("serve")) as server:
        yield openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=300)


def _samples(client: openai.OpenAI) -> list[Sample]:
    """What the server's `/metrics` has."""
    url = str(client.base_url).removesuffix("/v1/") + "/metrics"
    with urllib.request.urlopen(url, timeout=60) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return [sample for family in families for sample in family.samples]


def _answer(client: openai.OpenAI, question: str, **options: object) -> ChatCompletion:
    return client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": question}],
        **{"temperature": 0.0, "max_tokens": 32, **options},
    )


def _ask(client: openai.OpenAI, question: str, **options: object) -> str:
    return str(_answer(client, question, **options).choices[0].message.content)


@pytest.fixture(scope="module")
def plain_answers() -> list[str]:
    """Answers of plain decoding to `QUESTIONS`."""
    ids = [chat_ids(question) for question in QUESTIONS]
    calls = [{"prompts": ids, "params": {"temperature": 0.0, "max_tokens": 32}}]
    plain = run_engine(engine_args(max_model_len=1024), calls)
    return [output["text"] for output in plain.outputs()]


def test_answers_are_those_of_plain_vllm(client: openai.OpenAI, plain_answers: list[str]) -> None:
    """Alone with the default budget, and at once with trees in every step."""
    assert [_ask(client, question) for question in QUESTIONS] == plain_answers
    with ThreadPoolExecutor(len(QUESTIONS)) as pool:
        together = list(pool.map(lambda question: _ask(client, question, **DRAFTED), QUESTIONS))
    assert together == plain_answers and all(together)


@pytest.mark.parametrize("options", [{}, {"response_format": {"type": "json_object"}}])
def test_answers_carry_their_acceptance(client: openai.OpenAI, options: dict[str, object]) -> None:
    """As load generators read it: they drop an answer whose counts contradict each other."""
    answer = _answer(client, QUESTIONS[3], max_tokens=64, **DRAFTED, **options)
    found = answer.model_extra["metrics"]["speculative_decoding"]
    histogram, accepted = found["acceptance_histogram"], found["per_step_accepted"]
    steps, drafted = found["num_spec_steps"], found["per_step_drafted"]
    assert found["num_spec_tokens"] == 12 and len(histogram) == 13
    assert histogram == [accepted.count(depth) for depth in range(13)]
    assert steps == sum(histogram) == len(drafted) > 0
    assert 0 < sum(accepted) == found["num_accepted_draft_tokens"]
    assert sum(drafted) == found["num_draft_tokens"]
    assert all(0 <= depth <= nodes <= 8 for depth, nodes in zip(accepted, drafted, strict=True))
    assert found["mean_acceptance_length"] == 1 + sum(accepted) / steps
    # Every other token of the answer was sampled by the target.
    assert sum(accepted) + steps <= answer.usage.completion_tokens


def test_dashboard_and_alerts_ask_for_what_the_server_has(client: openai.OpenAI) -> None:
    _ask(client, QUESTIONS[0], max_tokens=64, **DRAFTED)
    _ask(client, QUESTIONS[0], extra_body={"vllm_xargs": {"specplug_tree_budget": 0}})
    metrics: dict[str, dict[str, set[str]]] = {}
    for sample in _samples(client):
        for label, value in sample.labels.items():
            metrics.setdefault(sample.name, {}).setdefault(label, set()).add(value)
    examples = Path(__file__).resolve().parents[3] / "examples"
    panels = json.loads((examples / "grafana.json").read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    groups = yaml.safe_load((examples / "prometheus_rules.yml").read_text())["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(queries) > 10 and len(rules) >= 4
    # A query of an unknown metric or label is answered with nothing, and without an error.
    for query in (*queries, *(rule["expr"] for rule in rules)):
        series = re.findall(r"((?:vllm|specplug):\w+)(?:{(.*?)})?", query)
        assert series and query.count("(") == query.count(")"), query
        for name, selector in series:
            for label, pattern in re.findall(r'(\w+)=~?"(.*?)"', selector):
                wanted = set(pattern.split("|")) - {"$model"}
                assert wanted <= metrics[name][label], (query, name, label)
        known = {label for name, _ in series for label in metrics[name]}
        assert set(re.findall(r"(?:by|without|ignoring) \((\w+)\)", query)) <= known, query
    for rule in rules:
        names = re.findall(r"(?:vllm|specplug):\w+", rule["expr"])
        for label in re.findall(r"\$labels\.(\w+)", str(rule["annotations"])):
            assert label in metrics[names[0]], rule["alert"]


def test_options_that_other_speculation_refuses_are_honoured(
    client: openai.OpenAI, plain_answers: list[str]
) -> None:
    biased = _ask(client, QUESTIONS[0], logit_bias={"33": 100.0}, max_tokens=5)
    assert len(set(biased)) == 1 and len(biased) == 5, biased
    # Only the likeliest token can reach nine tenths of the likeliest token's probability.
    sampled = _ask(client, QUESTIONS[0], temperature=1.0, extra_body={"min_p": 1.0})
    assert sampled == plain_answers[0]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"vllm_xargs": {"specplug_tree_budget": True}}, "specplug_tree_budget"),
        ({"vllm_xargs": {"specplug_tree_budget": 999}}, "specplug_tree_budget"),
        ({"vllm_xargs": {"specplug_penalty": -1}}, "specplug_penalty"),
        ({"vllm_xargs": {"specplug_tree_bugdet": 1}}, "specplug_tree_bugdet"),
        ({"specplug_tree_budget": 4}, "specplug_tree_budget"),
    ],
)
def test_refused_parameters_are_named(
    client: openai.OpenAI, body: dict[str, object], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        _ask(client, QUESTIONS[0], extra_body=body)
    assert error.value.param == param and error.value.status_code == 400
