# SPDX-License-Identifier: Apache-2.0
"""What no config should hold, and how much memory refusing it may take."""

from __future__ import annotations

from hypothesis import strategies as st

MEMORY_GROWTH_KIB = 200_000

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
