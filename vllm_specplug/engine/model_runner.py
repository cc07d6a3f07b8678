# SPDX-License-Identifier: Apache-2.0
"""Selects vLLM's V2 model runner for tree methods.

Seams: model_runner_v2, cpu_admission. Our methods reach vLLM as `custom_class`, a method that V2
does not run. An engine process checks its config again in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.executor.abstract import Executor

from vllm_specplug.engine.spec_config import tree_config
from vllm_specplug.seams.listing_runner import CPU_ADMISSION
from vllm_specplug.seams.seam import resolve


def replace_use_v2_model_runner(stock: property) -> property:
    """`VllmConfig.use_v2_model_runner`, true for a config with a tree method."""

    def use_v2_model_runner(self: Any) -> bool:
        return tree_config(self) is not None or stock.__get__(self)

    return property(use_v2_model_runner)


def wrap_unsupported_features(original: Callable[[Any], list[str]]) -> Callable[[Any], list[str]]:
    """The list of features that V2 does not support, without our methods."""

    def unsupported_features(self: Any) -> list[str]:
        features = original(self)
        spec = tree_config(self)
        if spec is None:
            return features
        return [name for name in features if name != f"speculative method {spec.method!r}"]

    return unsupported_features


def wrap_validate_v2_model_runner(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """The check of a V2 config, which a tree method also passes on a CPU without Triton.

    Raises:
        ValueError: naming the method and the features that vLLM's V2 runner does not support.
    """

    def validate(self: Any) -> None:
        from vllm.platforms import current_platform

        spec = tree_config(self)
        if spec is None:
            return original(self)
        if unsupported := self._get_v2_model_runner_unsupported_features():
            raise ValueError(
                f"Speculative method {spec.plugin_method!r} runs in vLLM's V2 model runner, which "
                f"does not support {', '.join(unsupported)}. Leave that out, or the method."
            )
        if not current_platform.is_cpu() or resolve(CPU_ADMISSION.target):
            return original(self)
        with CPU_ADMISSION.applied():
            return original(self)

    return validate


def wrap_post_init(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """`VllmConfig.__post_init__`, which supports asynchronous scheduling for tree methods.

    It is on by default on a GPU and with pipeline parallelism, and off otherwise. vLLM's own code
    runs with it switched off: vLLM allows it by the names of its own methods, and its CPU platform
    silently switches it off.
    """

    def post_init(self: Any) -> None:
        if tree_config(self) is None:
            original(self)
            return
        scheduler, parallel = self.scheduler_config, self.parallel_config
        requested = scheduler.async_scheduling
        disable_nccl = parallel.disable_nccl_for_dp_synchronization
        scheduler.async_scheduling = False
        original(self)
        scheduler.async_scheduling = schedules_ahead(self, requested)
        if scheduler.async_scheduling and disable_nccl is None:
            # vLLM's default with asynchronous scheduling.
            parallel.disable_nccl_for_dp_synchronization = True

    return post_init


def schedules_ahead(vllm_config: Any, requested: bool | None) -> bool:
    """Returns whether an engine with this config schedules asynchronously.

    Args:
        requested: the user's `async_scheduling`; None for the default, which is on for a GPU and
            for pipeline parallelism, and off otherwise.

    Raises:
        ValueError: if it was requested and the executor does not support it.
    """
    parallel = vllm_config.parallel_config
    wanted = requested
    if wanted is None:
        is_cpu = vllm_config.device_config.device_type == "cpu"
        wanted = not is_cpu or parallel.pipeline_parallel_size > 1
    if not wanted or Executor.get_class(vllm_config).supports_async_scheduling():
        return wanted
    if requested:
        backend = parallel.distributed_executor_backend
        raise ValueError(
            f"async_scheduling=True cannot be used with distributed_executor_backend={backend!r}, "
            "which waits for every step. Leave one of them out."
        )
    return False
