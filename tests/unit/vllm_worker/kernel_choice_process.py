# SPDX-License-Identifier: Apache-2.0
"""One tensor parallel rank that chooses its kernels by a clock of its own: for the target's trees,
for drafts, and as it would alone. Written to FOLDER/RANK.json."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel

from vllm_specplug.kernels import cuda_dispatch
from vllm_specplug.kernels.cuda_dispatch import KernelShape, choose_cuda_kernel
from vllm_specplug.vllm_v2.cuda_trees import CudaTreeBackend
from vllm_specplug.vllm_worker.cuda_kernels import StepLimits

SHAPE = KernelShape(head_dim=64, dtype=torch.float16, block_size=16, num_heads=2, num_kv_heads=1)
LIMITS = StepLimits(num_requests=2, num_rows=16, tree_rows=5, context=64)
# Microseconds on each rank.
TIMES = {"cute": (10.0, 90.0), "triton": (20.0, 20.0)}


class Kernels(CudaTreeBackend):
    def capability(self) -> tuple[int, int]:
        return 9, 0


def main(rank: int, size: int, folder: str) -> None:
    cuda_dispatch.unsupported_by = lambda *args: None  # type: ignore[assignment]
    cuda_dispatch.self_test_failure = (  # type: ignore[assignment]
        lambda name, *args: None if name in TIMES else "it is wrong"
    )
    cuda_dispatch.load_kernel = str  # type: ignore[assignment]
    cuda_dispatch.call_us = lambda name, *args: TIMES[name][rank]  # type: ignore[assignment]
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(size, rank, f"file://{folder}/store", rank, "gloo")
        initialize_model_parallel(size)
        kernels = Kernels("auto", 2, LIMITS, torch.device("cpu"))
        chosen = {
            "target": kernels.choose(SHAPE).name,
            "drafts": kernels.choose(SHAPE, for_drafts=True).name,
            "alone": choose_cuda_kernel("auto", SHAPE, kernels.device, (9, 0)).name,
        }
    (Path(folder) / f"{rank}.json").write_text(json.dumps(chosen))
