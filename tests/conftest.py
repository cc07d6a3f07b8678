# SPDX-License-Identifier: Apache-2.0
"""Settings shared by all tests."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.e2e.own_process import pytest_itemcollected, pytest_runtest_protocol

__all__ = ["pytest_itemcollected", "pytest_runtest_protocol"]

# Busy machines make single examples slow without anything being wrong.
settings.register_profile("specplug", deadline=None, print_blob=True)
settings.load_profile("specplug")

# A shell that runs the tests in the background has them ignore SIGINT, and their children, who
# are to be interrupted by it, inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Kernels of other devices, which no instruction set of the CPU changes.
_OTHER_DEVICES = ("cuda", "cute", "ptx", "triton")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--each-isa",
        action="store_true",
        help="run each test once per instruction set of this machine that the C++ kernels know "
        "(for tests/kernels and what else calls them)",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if not metafunc.config.getoption("each_isa"):
        return
    # Fixture `isa` goes through them itself.
    if "isa" in metafunc.fixturenames or any(
        device in metafunc.module.__name__ for device in _OTHER_DEVICES
    ):
        return
    from vllm_specplug.kernels.extension import supported_isas

    metafunc.parametrize("_isa_limit", supported_isas() or (None,), indirect=True)


@pytest.fixture(autouse=True)
def _isa_limit(request: pytest.FixtureRequest) -> Iterator[None]:
    """With --each-isa: the instruction set of this run of the test, for child processes too."""
    name = getattr(request, "param", None)
    if name is None:
        yield
        return
    from vllm_specplug.kernels import extension

    # Not the test's own `monkeypatch`, whose changes outlive the test's other fixtures then.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(extension.ISA_VARIABLE, name)
        use_isa(name)
        yield
    use_isa(None)


def use_isa(name: str | None) -> None:
    """Limits the C++ kernels of this process to an instruction set; None: the one that
    SPECPLUG_CPU_ISA asks for, else the best."""
    import torch

    from vllm_specplug.kernels import extension

    name = name or extension.requested_isa()
    if name not in extension.ISAS:
        name = extension.supported_isas()[-1]
    torch.ops.specplug.set_cpu_isa(extension.ISAS.index(name))


def pytest_configure(config: pytest.Config) -> None:
    """Makes a folder that all processes of a run share; see `run_engine` in tests/e2e/harness.py.

    It also takes their temporary files, since engines that are killed leave some.
    """
    if "SPECPLUG_TESTS_SHARED" not in os.environ:
        # pytest itself keeps the files of the last runs.
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
        folder = tempfile.mkdtemp(prefix="specplug-tests-")
        os.environ["SPECPLUG_TESTS_SHARED"] = os.environ["TMPDIR"] = tempfile.tempdir = folder
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
