# SPDX-License-Identifier: Apache-2.0
"""Where tests "as on CUDA" run, and what engines need there.

With SPECPLUG_INTERPRETED=1 that is a CPU, with kernels in Triton's interpreter and classes of
`cuda_worker`. With SPECPLUG_CHECKS_ON_GPU=1 it is a GPU, and nothing stands in for anything;
SPECPLUG_CHECKS_KERNEL and SPECPLUG_CHECKS_ATTENTION then name a `tree_kernel` and vLLM's attention
backend. Many engines live in one process, and many processes may share the GPU.

To be imported before vLLM and before Triton.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Any

INTERPRETED = os.environ.get("SPECPLUG_INTERPRETED") == "1"
ON_GPU = os.environ.get("SPECPLUG_CHECKS_ON_GPU") == "1"
KERNEL = os.environ.get("SPECPLUG_CHECKS_KERNEL", "triton") if ON_GPU else "triton"
ATTENTION = os.environ.get("SPECPLUG_CHECKS_ATTENTION", "TRITON_ATTN")

if ON_GPU:
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    # Products of float32 in full: a tree and a chain are compared within 1e-3, by other kernels.
    os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
elif INTERPRETED:
    from tests.e2e import interpreter

    interpreter.install()

# Query rows that forwards are captured for, and requests that drafts are: most batches are padded.
CAPTURED_ROWS = [1, 2, 4, 9, 22, 28, 32]
# Of scores of trees that were made twice from the same states. On a GPU, products of another
# number of rows come from another kernel.
SCORES_WITHIN = 1e-3 if ON_GPU else 1e-5
# Where tensors of checks go that operations of a draft read.
DEVICE = "cuda" if ON_GPU else None

_replays = 0


def use_worker() -> None:
    """Engines that this process builds from here on run here."""
    if not ON_GPU:
        from tests.e2e.cuda import cuda_worker

        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
        cuda_worker.use_cuda_worker()
        return
    import torch

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    replay = torch.cuda.CUDAGraph.replay

    def counted(self: Any) -> None:
        global _replays
        _replays += 1
        replay(self)

    torch.cuda.CUDAGraph.replay = counted  # type: ignore[method-assign]


def runner_class() -> type:
    """Of engines with trees."""
    if ON_GPU:
        from vllm_specplug.vllm_v2.worker_gpu import TreeGPUModelRunner

        return TreeGPUModelRunner
    from tests.e2e.cuda.cuda_worker import InterpretedRunner

    return InterpretedRunner


def engine_arguments() -> dict[str, Any]:
    """Of every engine."""
    if not ON_GPU:
        return {"kv_cache_memory_bytes": 1 << 24}
    return {
        "kv_cache_memory_bytes": 1 << 26,
        "gpu_memory_utilization": 0.03,
        "attention_backend": ATTENTION,
    }


def tree_arguments() -> dict[str, Any]:
    """Of engines with trees; where full graphs are wanted, they capture them."""
    from vllm_specplug.vllm_attention.full_graphs import wants_full_graphs

    if not (ON_GPU and wants_full_graphs()):
        # The interpreted runner sets them for itself.
        return {}
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY",
              "cudagraph_capture_sizes": [*CAPTURED_ROWS]}  # fmt: skip
    return {"enforce_eager": False, "compilation_config": graphs}


def tower_arguments() -> dict[str, Any]:
    """Of engines with a vision tower in float32, and without an image processor."""
    if not ON_GPU:
        return {}
    return {"mm_encoder_attn_backend": "TORCH_SDPA", "skip_mm_profiling": True}


def state_arguments() -> dict[str, Any]:
    """Of engines with recurrent states; see `cuda_states`."""
    return {"gdn_prefill_backend": "triton"} if ON_GPU else {}


def tree_options() -> dict[str, Any]:
    """Speculative options."""
    return {"tree_kernel": KERNEL} if ON_GPU else {}


def has_experts() -> bool:
    """Whether vLLM has its kernels for experts; a build may leave them out."""
    return not ON_GPU or find_spec("vllm._moe_C_stable_libtorch") is not None


def need_experts() -> None:
    """Skips a check where vLLM has no kernels for experts."""
    if not has_experts():
        import pytest

        pytest.skip("vLLM is without its kernels for experts")


def graphs() -> AbstractContextManager[None]:
    """vLLM may capture and replay graphs inside."""
    if ON_GPU:
        return nullcontext()
    from tests.pretended_graph import pretended_graphs

    return pretended_graphs()


def num_replays() -> int:
    """Graphs that this process has replayed."""
    if ON_GPU:
        return _replays
    from tests.pretended_graph import PretendedGraph

    return PretendedGraph.replays
