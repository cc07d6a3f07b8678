# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the kernel tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from tests.conftest import use_isa
from tests.pretended_graph import PretendedGraph, pretended_graphs
from vllm_specplug.kernels import extension


def _interpret_triton() -> None:
    """Triton kernels of this process run in the interpreter, unless TRITON_INTERPRET says more.

    Triton looks when a kernel is decorated, its own library included: before its first import. The
    variable does not stay, as engines of other tests would inherit it.
    """
    if "TRITON_INTERPRET" in os.environ:
        return
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        from triton import knobs

        propagate, knobs.propagate_env = knobs.propagate_env, False
        knobs.runtime.interpret = True
        knobs.propagate_env = propagate
    except ImportError:
        pass
    finally:
        del os.environ["TRITON_INTERPRET"]


_interpret_triton()


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def unchecked_interpreter() -> Iterator[None]:
    """Triton kernels run in the interpreter; skips where they would need a GPU."""
    pytest.importorskip("triton")
    from triton import knobs

    if not knobs.runtime.interpret:
        pytest.skip("TRITON_INTERPRET is off")
    from tests.quick_interpreter import quick_interpreter

    with quick_interpreter():
        yield


@pytest.fixture
def interpreter(unchecked_interpreter: None) -> Iterator[None]:
    """Triton kernels run in the checked interpreter."""
    from tests.kernels.checked_interpreter import checked_interpreter

    with checked_interpreter():
        yield


@pytest.fixture
def pretended_pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Graphs are pretended ones, in a pool of their own."""
    monkeypatch.setattr(PretendedGraph, "captured", [])
    with torch.inference_mode(), pretended_graphs(distributed=False):
        yield


@pytest.fixture
def compiled() -> None:
    """Skips where the extension was not built."""
    reason = extension.cpu_extension_error()
    if reason is not None:
        pytest.skip(f"compiled kernels: {reason}")


@pytest.fixture(params=extension.ISAS)
def isa(request, compiled) -> str:
    """Forces each instruction set in turn; skips those this CPU lacks."""
    if request.param not in extension.supported_isas():
        pytest.skip(f"this CPU cannot run {request.param}")
    use_isa(request.param)
    yield request.param
    use_isa(None)


@pytest.fixture(scope="session")
def vllm_cpu_ops() -> None:
    """vLLM's CPU operators; skips without a CPU build of vLLM."""
    platforms = pytest.importorskip("vllm.platforms")
    if not platforms.current_platform.is_cpu():
        pytest.skip("needs a CPU build of vLLM")
    platforms.current_platform.import_kernels()
    if not hasattr(torch.ops._C, "cpu_attn_reshape_and_cache"):
        pytest.skip("this vLLM has no CPU cache operator")
