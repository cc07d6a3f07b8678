# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import logging

import pytest

from vllm_specplug.metrics.worker_metrics import SpecPlugMetrics

LOGGER = logging.getLogger("specplug.test.worker_metrics")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def make_metrics(clock, **options) -> SpecPlugMetrics:
    return SpecPlugMetrics(logger=LOGGER, clock=clock, log_interval_s=10.0, **options)


def step(metrics: SpecPlugMetrics, num_nodes=16, num_accepted=2):
    metrics.stats.observe_draft(num_nodes, num_accepted)
    return metrics.end_step()


def test_each_step_gives_its_own_payload(clock):
    metrics = make_metrics(clock)
    assert step(metrics, 16, 2) == {
        "num_drafts": 1,
        "num_nodes": 16,
        "accepted_by_depth": [1, 1],
    }
    assert metrics.end_step() is None
    assert step(metrics, 8, 0) == {"num_drafts": 1, "num_nodes": 8}


def test_one_line_an_interval_about_that_interval_only(clock, caplog):
    metrics = make_metrics(clock)
    with caplog.at_level(logging.INFO):
        for _ in range(25):  # one step a second, from second 0
            step(metrics, num_accepted=3)
            clock.now += 1.0
        assert len(caplog.messages) == 2
        for _ in range(10):
            step(metrics, num_accepted=0)
            clock.now += 1.0
    assert [m.partition(" (")[0] for m in caplog.messages] == [
        "specplug: mean acceptance length 4.00",
        "specplug: mean acceptance length 4.00",
        "specplug: mean acceptance length 2.20",  # 4 of 10 steps accepted 3
    ]


@pytest.mark.parametrize("is_reporting", [True, False])
def test_an_idle_worker_and_other_ranks_say_nothing(clock, caplog, is_reporting):
    metrics = make_metrics(clock, is_reporting=is_reporting)
    with caplog.at_level(logging.INFO):
        for _ in range(600):
            payload = metrics.end_step() if is_reporting else step(metrics, num_accepted=0)
            assert (payload is None) == is_reporting
            clock.now += 1.0
    assert not caplog.messages


def test_watchdog_is_fed(clock, caplog):
    metrics = make_metrics(clock, head="heads/mine")
    for _ in range(512):
        step(metrics, num_accepted=0)
    assert "over the last 512 drafts of heads/mine" in caplog.messages[0]
