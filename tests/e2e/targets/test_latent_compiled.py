# SPDX-License-Identifier: Apache-2.0
"""`test_latent` with both engines compiled. Experts are scored by a softmax here."""

from __future__ import annotations

import pytest

from tests.e2e.latent_pairs import compared, engines, lines_for_trees, nothing_moves

pytestmark = [pytest.mark.e2e, pytest.mark.own_process, pytest.mark.full]


def test_compiled_engines_and_that_errors_show() -> None:
    made = engines(enforce_eager=False)
    compared(made, least_accepted=100)
    for wrong in (lines_for_trees, nothing_moves):
        with wrong(), pytest.raises(AssertionError, match="differs"):
            compared(made)
    # Nothing of it is left behind.
    compared(made, least_accepted=100)
