# SPDX-License-Identifier: Apache-2.0
"""Which source drafts, on simulated steps."""

from __future__ import annotations

from collections import Counter

from vllm_specplug.methods.tokenswift.draft_source import SourceChooser

SOURCES = ("heads", "self", "ngrams")


def _run(chooser, steps, costs, available=SOURCES):
    """Steps of known (tokens, milliseconds) by source; how often each was used."""
    used: Counter[str] = Counter()
    for _ in range(steps):
        source = chooser.choose(available)
        used[source] += 1
        chooser.observe(*costs[source])
    return used


def test_the_best_rate_wins_and_the_others_are_tried_rarely() -> None:
    chooser = SourceChooser(SOURCES)
    # A draft forward of 30 ms against a verification of 40: two thirds more tokens do not pay.
    used = _run(chooser, 2000, {"heads": (1.8, 42.0), "self": (2.9, 72.0), "ngrams": (1.2, 40.0)})
    assert chooser.best == "heads"
    assert used["heads"] > 0.9 * 2000
    assert used["self"] > 0
    assert used["ngrams"] > 0


def test_a_source_that_loses_clearly_is_tried_less() -> None:
    def trials(tokens: float) -> int:
        costs = {"heads": (2.0, 40.0), "self": (tokens, 40.0)}
        return _run(SourceChooser(SOURCES[:2]), 300, costs, SOURCES[:2])["self"]

    assert 0 < trials(1.0) < trials(1.9)


def test_the_choice_follows_the_context() -> None:
    chooser = SourceChooser(SOURCES)
    _run(chooser, 500, {"heads": (1.8, 42.0), "self": (2.9, 72.0), "ngrams": (1.2, 40.0)})
    # Verification has become three times as expensive: now the draft forward pays.
    used = _run(
        chooser, 3000, {"heads": (1.8, 122.0), "self": (2.9, 152.0), "ngrams": (1.2, 120.0)}
    )
    assert chooser.best == "self"
    assert used["self"] > 0.6 * 3000


def test_only_available_sources_are_used() -> None:
    chooser = SourceChooser(SOURCES)
    costs = {"heads": (1.0, 10.0), "self": (9.0, 10.0), "ngrams": (1.0, 10.0)}
    assert set(_run(chooser, 400, costs, ["heads", "ngrams"])) == {"heads", "ngrams"}
    assert _run(chooser, 400, costs)["self"] > 200
    assert "self" not in _run(chooser, 50, costs, ["heads", "ngrams"])


def test_one_source_needs_no_trial() -> None:
    chooser = SourceChooser(["self"])
    assert _run(chooser, 100, {"self": (2.0, 10.0)}, ["self"]) == {"self": 100}
    assert chooser.rates["self"].rate > 0
