# SPDX-License-Identifier: Apache-2.0
"""The alerts in examples/, and the parser with which tests/e2e/serve/test_serve.py checks them
against a server."""

from __future__ import annotations

import re

import pytest
import yaml

from tests.promql import check_query
from tests.unit.scripts import ROOT

GROUPS = yaml.safe_load((ROOT / "examples" / "prometheus_rules.yml").read_text())["groups"]
ALERTS = {rule["alert"]: rule for group in GROUPS for rule in group["rules"]}
DURATION = re.compile(r"\d+[smhd]")

LABELS = {"model_name": {"m"}, "engine": {"0"}}
METRICS = {
    "a_total": LABELS,
    "b_total": {**LABELS, "reason": {"x", "y"}},
    "c_bucket": {**LABELS, "le": {"1"}},
}


def test_groups_have_the_fields_of_prometheus() -> None:
    for group in GROUPS:
        assert set(group) <= {"name", "interval", "rules"} and group["name"] and group["rules"]
    assert len(ALERTS) == sum(len(group["rules"]) for group in GROUPS) >= 4


@pytest.mark.parametrize("name", ALERTS)
def test_alerts_say_what_happens_and_where_to_read(name: str) -> None:
    rule = ALERTS[name]
    required = {"alert", "expr", "labels", "annotations"}
    assert required <= set(rule) <= required | {"for"}
    assert re.fullmatch(r"[A-Za-z]+", name) and isinstance(rule["expr"], str)
    assert DURATION.fullmatch(rule.get("for", "0m"))
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    assert set(rule["annotations"]) == {"summary", "description", "docs"}
    for text in rule["annotations"].values():
        assert text.count("{{") == text.count("}}") == len(re.findall(r"{{ \$.*? }}", text))


@pytest.mark.parametrize(
    "query",
    [
        "rate(a_total[5m]) / rate(a_total[$__rate_interval]) < 0.1 and increase(a_total[5m]) > 1",
        'sum without (reason) (rate(b_total{reason=~"x|y"}[5m])) + rate(a_total[5m])',
        "rate(b_total[5m]) / ignoring (reason) group_left () (a_total + a_total)",
        "histogram_quantile(0.5, sum by (le) (rate(c_bucket[5m])))",
        "sum by (reason) (rate(b_total[5m])) / scalar(sum(a_total))",
    ],
)
def test_well_formed_queries_pass(query: str) -> None:
    check_query(query, METRICS)


@pytest.mark.parametrize(
    ("query", "fault"),
    [
        ("rate(a_total[5m]", "where"),
        ("rate(a_total[5m])) > 1", "where"),
        ("rate(a_total[5 minutes])", "not PromQL"),
        ("rate(a_total)", "not"),
        ("a_total[5m] > 1", "an operator on"),
        ("a_total[5m]", "yields a range"),
        ("rat(a_total[5m])", "unknown function"),
        ("d_total", "no metric d_total"),
        ('b_total{cause="x"}', "no label cause"),
        ('b_total{reason="z"}', "has no reason"),
        ('b_total{reason=~"x|z"}', "has no reason"),
        ("sum by (reason) (a_total)", "no label"),
        ("a_total / b_total", "never matches"),
        ("a_total / ignoring (le) b_total", "of Value"),
        ("histogram_quantile(0.5, rate(a_total[5m]))", "no histogram"),
    ],
)
def test_malformed_queries_are_refused(query: str, fault: str) -> None:
    with pytest.raises(AssertionError, match=fault):
        check_query(query, METRICS)
