# SPDX-License-Identifier: Apache-2.0
"""Settings shared by the tests of whole engines."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def float32_states() -> None:
    """For all engines of this process: for tests in a process of their own."""
    from tests.e2e.hybrids import use_float32_states

    use_float32_states()
