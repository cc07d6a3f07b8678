# SPDX-License-Identifier: Apache-2.0
"""Option `tree_kernel` of several engines in one process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_specplug.kernels import describe, latent_spans
from vllm_specplug.kernels.extension import choose_reference, library_error
from vllm_specplug.vllm_worker.start_up import OwnKernels, choose_kernel, require_seams

pytestmark = pytest.mark.skipif(library_error() is not None, reason="the kernels are not compiled")


@pytest.fixture(autouse=True)
def _no_choice() -> Iterator[None]:
    yield
    choose_reference(False)


class _Steps:
    def execute_model(self) -> tuple[str, bool]:
        asked = latent_spans.is_reference_asked()
        return describe(torch.float32)["kernel"], asked


class _Worker(OwnKernels, _Steps):
    def __init__(self, tree_kernel: Any) -> None:
        self.vllm_config = SimpleNamespace(
            speculative_config=SimpleNamespace(tree_kernel=tree_kernel)
        )
        choose_kernel(tree_kernel, torch.float32)


def test_each_engine_has_the_kernels_that_it_asked_for() -> None:
    environment = dict(os.environ)
    first = _Worker("reference")
    assert first.execute_model() == ("reference", True)
    # Refused where the first engine's choice held for the process.
    second = _Worker("cpp")
    for _ in range(2):
        assert second.execute_model() == ("cpp", False)
        assert first.execute_model() == ("reference", True)
    assert _Worker("auto").execute_model() == ("cpp", False)
    assert os.environ == environment


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_worker_that_has_not_loaded_the_plugin_starts_nothing(device: str) -> None:
    """Its config says V1 then: the plugin's seams are not in place there."""
    with pytest.raises(RuntimeError, match="has not loaded the plugin .*VLLM_PLUGINS"):
        require_seams(device, uses_v2=False)
