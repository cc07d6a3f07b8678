# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_specplug.bench.plan import (
    BenchPlan,
    PlanError,
    make_plan,
    method_config,
    read_plan_file,
    server_entry,
)


def plan(**values: Any) -> BenchPlan:
    return make_plan({"model": "m", "head": "the/head", "servers": "plain,ngram", "data": "d"}
                     | values)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("jetspec", {}),
        ("jetspec-16", {"num_speculative_tokens": 16, "tree_budget": 16}),
        ("jetspec-64-auto", {"num_speculative_tokens": 64, "tree_budget": "auto"}),
        ("jetspec-auto", {"tree_budget": "auto"}),
        (
            "jetspec-7-chain",
            {"num_speculative_tokens": 7, "tree_budget": 7, "tree_width": 1, "ngram_topk": 0},
        ),
    ],
)
def test_short_names(name: str, expected: dict[str, Any]) -> None:
    assert method_config(name, "the/head") == {
        "method": "jetspec", "model": "the/head", **expected,
    }  # fmt: skip


def test_servers_without_head() -> None:
    assert method_config("plain", None) is None
    for name in ("ngram", "suffix"):
        config = method_config(name, None)
        assert config is not None and config["method"] == name
    found = method_config("ngram_tree-6", "the/head")
    assert found == method_config("ngram_tree-6", None)
    assert found is not None and "model" not in found and found["num_speculative_tokens"] == 6


@pytest.mark.parametrize(
    "name", ["eagle-4", "jetspec-x", "jetspec-8-best", "jetspec-8-16", "jetspec-8-entropy", ""]
)
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"is unknown\. Use plain, ngram, suffix, METHOD"):
        method_config(name, "the/head")


def test_a_method_without_a_head_is_refused() -> None:
    with pytest.raises(PlanError, match=r"servers: server 'jetspec-8' needs a draft head: add"):
        plan(head=None, servers="plain,jetspec-8")


def test_servers_by_json_and_address() -> None:
    entry = server_entry('eagle={"method": "eagle3", "model": "E"}', None)
    assert entry.name == "eagle" and entry.speculative_config == {"method": "eagle3", "model": "E"}
    assert server_entry("far=http://host:8000/", None).url == "http://host:8000"
    for bad in ("far=ftp://host", "far=[1]", "far={"):
        with pytest.raises(ValueError, match="neither a --speculative-config as JSON nor"):
            server_entry(bad, None)


@pytest.mark.parametrize("rate", [0, -1.5, float("nan"), float("inf")])
def test_rates_must_be_positive(rate: float) -> None:
    with pytest.raises(PlanError, match=r"rates.*: a request rate must be above 0 requests/s"):
        plan(rates=[1.0, rate])


@pytest.mark.parametrize("text", ["tpot", "tpot:", "tpot=50", "tpot:-1", "tpot:0", "itl:50"])
def test_objectives_must_be_readable(text: str) -> None:
    with pytest.raises(PlanError, match=rf"goodput: objective '{text}' cannot be read; write NAME"):
        plan(goodput=["ttft:500", text])
    with pytest.raises(PlanError, match="'ttft' is given twice"):
        plan(goodput=["ttft:500", "ttft:50"])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"servers": "ngram"}, "servers must contain 'plain'"),
        ({"servers": ""}, "no server to measure"),
        ({"servers": "plain,ngram,ngram"}, "two servers are called 'ngram'"),
        ({"concurrency": [0]}, "concurrency must be at least 1 request, not 0"),
        ({"rates": []}, "nothing to measure"),
        ({"rate": [1]}, "rate: no such setting; known: .*rates"),
        ({"servers": [{"name": "plain", "speculativeconfig": {}}]}, "known: name, serve_args"),
        ({"min_requests": 9, "max_requests": 8}, "min_requests=9 is above max_requests=8"),
        ({"points": 1}, "points: .*greater than or equal to 2"),
    ],
)
def test_what_cannot_be_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan(**values)


def test_every_mistake_is_listed() -> None:
    with pytest.raises(PlanError) as error:
        plan(rates=[0], repeats=0, goodput=["x"])
    assert [line.split(":")[0].split(".")[0] for line in str(error.value).splitlines()] == [
        "rates",
        "goodput",
        "repeats",
    ]


def test_rates_are_sorted_and_counted() -> None:
    found = plan(rates=[2, 0.5, 2], point_time=10, min_requests=6, max_requests=15)
    assert found.rates == (0.5, 2.0)
    assert [found.num_requests(rate, None) for rate in (0.5, 1.2, 2.0)] == [6, 12, 15]
    assert found.num_requests(None, 1) == 6 and found.num_requests(None, 2) == 8


def test_baseline_goes_first() -> None:
    found = plan(servers="ngram,plain")
    assert [entry.name for entry in found.ordered_servers] == ["plain", "ngram"]


@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_plan_files(tmp_path: Path, suffix: str) -> None:
    values = {"model": "m", "servers": ["plain", {"name": "x", "speculative_config": {"a": 1}}],
              "data": "prompts.jsonl", "rates": [1, 2]}  # fmt: skip
    path = tmp_path / f"plan.{suffix}"
    path.write_text(json.dumps(values))  # JSON is YAML too
    found = make_plan(read_plan_file(path))
    assert found.data == (tmp_path / "prompts.jsonl",)
    assert found.servers[1].speculative_config == {"a": 1} and found.rates == (1.0, 2.0)


@pytest.mark.parametrize(
    ("name", "text"),
    [("p.json", "{"), ("p.yaml", "a: [1"), ("p.yaml", "just text"), ("p.yaml", None)],
)
def test_unreadable_plan_files(tmp_path: Path, name: str, text: str | None) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(PlanError, match=f"{name} (cannot be read|must hold settings by name)"):
        read_plan_file(tmp_path / name)
