# SPDX-License-Identifier: Apache-2.0
"""The form of the alerts; tests/e2e/serve/test_serve.py asks a server for their metrics."""

from __future__ import annotations

import re

import pytest
import yaml

from tests.unit.scripts import ROOT

GROUPS = yaml.safe_load((ROOT / "examples" / "prometheus_rules.yml").read_text())["groups"]
ALERTS = {rule["alert"]: rule for group in GROUPS for rule in group["rules"]}
DURATION = re.compile(r"\d+[smhd]")


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
