# SPDX-License-Identifier: Apache-2.0
"""What a worker checks and chooses before its runner is built."""

from __future__ import annotations

import os

import torch
from vllm.logger import init_logger

from vllm_specplug.kernels import describe
from vllm_specplug.kernels.extension import ISA_VARIABLE
from vllm_specplug.options import option_error
from vllm_specplug.seams import WORKER_SEAMS

logger = init_logger("vllm.specplug.worker")


def choose_kernel(name: str, dtype: torch.dtype) -> None:
    """Applies option `tree_kernel` and says which kernel serves.

    Raises:
        ValueError: when "cpp" is asked for and there is no compiled kernel.
    """
    if name == "triton":
        logger.warning("Tree attention: Triton kernels run in the interpreter, for tests only")
        return
    if name == "reference":
        os.environ[ISA_VARIABLE] = "reference"
    chosen = describe(dtype)
    if name == "cpp" and chosen["kernel"] != "cpp":
        raise option_error(
            "tree_kernel",
            name,
            f"the compiled kernels are not available here ({chosen['reason']})",
            'Reinstall with a C++17 compiler, or use "auto"',
        )
    logger.info(
        "Tree attention: %s kernel, %s (%s)", chosen["kernel"], chosen["isa"], chosen["reason"]
    )


def require_seams(device: str) -> None:
    """Checks, when a worker starts, everything of vLLM that it will call or override.

    Raises:
        RuntimeError: naming what is missing.
    """
    missing = WORKER_SEAMS[device].verify()
    if missing:
        raise RuntimeError(
            f"This vLLM lacks what vllm-specplug builds on: {'; '.join(missing)}. Install a "
            "supported release (`specplug doctor` names it) or choose another speculative method."
        )
