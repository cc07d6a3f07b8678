# SPDX-License-Identifier: Apache-2.0
"""What no config should hold, and what reading a file with it may do."""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import strategies as st

# Far more than any refusal needs, far less than what the files of the tests claim.
MEMORY_GROWTH_KIB = 200_000
MAX_MESSAGE = 4000

ABSURD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 70), 1 << 70),
    st.sampled_from([0, -1, 1 << 31, 1 << 62, 10**30]),
    st.floats(allow_nan=True),
    st.text(max_size=5),
    st.lists(st.integers(-5, 1 << 40), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


def refused(read: Callable[[], Any], *words: str) -> None:
    """Fails when `read` takes the file, raises something else, or memory grew on the way."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError) as error:
        read()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MEMORY_GROWTH_KIB
    message = str(error.value)
    assert all(word in message for word in words), message
    assert len(message) < MAX_MESSAGE


def taken_or_refused(read: Callable[[], Any]) -> None:
    """Fails for any other exception than a ValueError of reasonable length."""
    message = ""
    try:
        read()
    except ValueError as error:
        message = str(error)
    assert len(message) < MAX_MESSAGE
