# SPDX-License-Identifier: Apache-2.0
"""Settings shared by all tests."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile

import pytest
from hypothesis import settings

# Busy machines make single examples slow without anything being wrong.
settings.register_profile("specplug", deadline=None, print_blob=True)
settings.load_profile("specplug")

# A shell that runs the tests in the background has them ignore SIGINT, and their children, who
# are to be interrupted by it, inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """A folder that all workers of a run share; see `run_engine` in tests/e2e/harness.py."""
    if not hasattr(config, "workerinput"):
        folder = tempfile.mkdtemp(prefix="specplug-tests-")
        os.environ["SPECPLUG_TESTS_SHARED"] = folder
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
