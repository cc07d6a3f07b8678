# SPDX-License-Identifier: Apache-2.0
"""What targets without multi-head latent attention must not depend on."""

from __future__ import annotations

import pytest

from tests.e2e.fork_server import run_code

pytest.importorskip("vllm")

# vLLM itself imports other modules of that kind, which says nothing about this package.
_LATENT_ONLY = (
    "vllm.v1.attention.backends.mla.cpu_mla",
    "vllm_specplug.vllm_attention.latent",
    "vllm_specplug.vllm_attention.latent_gpu",
    "vllm_specplug.vllm_v2.latent_backend",
    "vllm_specplug.vllm_v2.latent_device",
    "vllm_specplug.vllm_worker.target.latent_layers",
)
_SHARED = ("vllm_specplug.vllm_v2.worker_cpu", "vllm_specplug.vllm_worker.proposer")


def test_only_targets_with_latent_attention_import_what_it_needs() -> None:
    """What all workers import, then what latent attention needs."""
    code = (
        f"import sys, {', '.join(_SHARED)}\n"
        f"print('found:', *(m for m in {_LATENT_ONLY!r} if m in sys.modules))\n"
        f"import {', '.join(_LATENT_ONLY)}"
    )
    assert run_code(code).splitlines()[-1] == "found:"
