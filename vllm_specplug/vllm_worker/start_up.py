# SPDX-License-Identifier: Apache-2.0
"""Checks and choices of a worker before it builds its runner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.logger import init_logger

from vllm_specplug.kernels import describe
from vllm_specplug.kernels.extension import choose_reference
from vllm_specplug.options import option_error
from vllm_specplug.seams import WORKER_SEAMS
from vllm_specplug.seams.seam import SeamSet

logger = init_logger("vllm.specplug.worker")


def choose_kernel(name: str, dtype: torch.dtype) -> None:
    """Applies the option `tree_kernel` and logs which kernel serves.

    Raises:
        ValueError: when "cpp" is asked for and there is no compiled kernel.
    """
    choose_reference(name == "reference")
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


class OwnKernels:
    """A CPU worker mixin: steps run the kernels of their own engine. A process may have several
    engines."""

    vllm_config: Any

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        spec: Any = self.vllm_config.speculative_config
        choose_reference(spec.tree_kernel == "reference")
        return super().execute_model(*args, **kwargs)  # type: ignore[misc]  # vLLM's worker


def make_finalize_loading(_: None) -> Callable[[Any, Any], None]:
    """Returns the method that vLLM calls on a loaded graph. Torch's graphs are complete."""
    return lambda graph, vllm_config: None


def require_seams(device: str, uses_v2: bool) -> None:
    """Checks everything of vLLM that a starting worker will call or override.

    Args:
        uses_v2: whether the worker builds vLLM's V2 model runner.

    Raises:
        RuntimeError: naming what is missing.
    """
    if not uses_v2:
        raise RuntimeError(
            "This worker has not loaded the plugin vllm-specplug: it would build vLLM's V1 model "
            "runner, which runs no trees. Give all processes of the server the same VLLM_PLUGINS."
        )
    _require(
        WORKER_SEAMS[device].verify(), "what vllm-specplug builds on", "choose another speculative "
        "method",
    )  # fmt: skip


def use_seams(layers: str, *seams: SeamSet) -> None:
    """Applies the seams for layers that only some targets have.

    Raises:
        RuntimeError: naming what is missing.
    """
    missing = [problem for each in seams for problem in each.verify()]
    _require(missing, f"what trees need in layers with {layers}", "use another target")
    for each in seams:
        each.apply()


def _require(missing: list[str], what: str, remedy: str) -> None:
    if missing:
        raise RuntimeError(
            f"This vLLM lacks {what}: {'; '.join(missing)}. Install a supported release "
            f"(`specplug doctor` names it) or {remedy}."
        )
