# SPDX-License-Identifier: Apache-2.0
"""What targets without multi-head latent attention must not depend on."""

from __future__ import annotations

import subprocess
import sys

import pytest

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


def _imported_by(*modules: str) -> set[str]:
    """The modules of `_LATENT_ONLY` that importing `modules` imports, in a new interpreter."""
    code = (
        f"import sys, {', '.join(modules)}\n"
        f"print('found:', *(m for m in {_LATENT_ONLY!r} if m in sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return set(run.stdout.splitlines()[-1].split()[1:])


def test_workers_import_nothing_that_only_latent_attention_needs() -> None:
    assert _imported_by(*_SHARED) == set()


def test_what_latent_attention_needs_is_found_where_it_is_imported() -> None:
    assert _imported_by(*_LATENT_ONLY) == set(_LATENT_ONLY)
