# SPDX-License-Identifier: Apache-2.0
"""PTX and machine code of the kernels, without a GPU. `make test` has one smoke case per kernel."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels.conftest import _one_thread, interpreter, unchecked_interpreter  # noqa: F401

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents and item.get_closest_marker("smoke") is None:
            item.add_marker(pytest.mark.full)
