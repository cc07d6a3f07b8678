# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import logging

import pytest

from vllm_specplug.metrics.watchdog import AcceptanceWatchdog

LOGGER = logging.getLogger("specplug.test.watchdog")


@pytest.fixture
def watchdog() -> AcceptanceWatchdog:
    return AcceptanceWatchdog(LOGGER, head="heads/mine", threshold=1.1, window=100)


def test_warns_once_and_names_likely_causes(watchdog, caplog):
    with caplog.at_level(logging.WARNING):
        for _ in range(1000):
            watchdog.observe(num_drafts=1, num_accepted=0)
    assert watchdog.has_warned
    assert len(caplog.records) == 1
    said = "mean acceptance length is 1.00 over the last 100 drafts of heads/mine"
    assert said in caplog.messages[0] and "another target" in caplog.messages[0]


def test_good_past_does_not_hide_a_bad_present(watchdog, caplog):
    watchdog.observe(num_drafts=100_000, num_accepted=300_000)
    watchdog.observe(num_drafts=100, num_accepted=9)
    assert "is 1.09 over the last 100 drafts" in caplog.messages[0]
