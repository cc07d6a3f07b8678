# SPDX-License-Identifier: Apache-2.0
"""Tree methods run in vLLM's V2 model runner.

Seams: model_runner_v2, cpu_admission.

What: `VllmConfig.use_v2_model_runner` is true of a config with a tree method, and
`_get_v2_model_runner_unsupported_features` leaves out the entry that stands for our methods: they
reach vLLM as `custom_class`, which V2 does not run. On a CPU `_validate_v2_model_runner` does not
ask for Triton: workers put kernels in its place. `VllmConfig.__post_init__` runs as if nobody had
asked for asynchronous scheduling, which is set when it is done: vLLM admits it by the names of its
own methods, and its CPU platform switches it off without a word. An engine process checks its
config this way once more.

Remove when: vLLM has a proposer registry, and CPU kernels for V2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_specplug.engine.spec_config import tree_config
from vllm_specplug.seams import CPU_ADMISSION
from vllm_specplug.seams.seam import resolve


def replace_use_v2_model_runner(stock: property) -> property:
    """`VllmConfig.use_v2_model_runner`, true of a config with a tree method."""

    def use_v2_model_runner(self: Any) -> bool:
        return tree_config(self) is not None or stock.__get__(self)

    return property(use_v2_model_runner)


def wrap_unsupported_features(original: Callable[[Any], list[str]]) -> Callable[[Any], list[str]]:
    """The list of what V2 lacks, without the methods that run in it."""

    def unsupported_features(self: Any) -> list[str]:
        features = original(self)
        spec = tree_config(self)
        if spec is None:
            return features
        return [name for name in features if name != f"speculative method {spec.method!r}"]

    return unsupported_features


def wrap_validate_v2_model_runner(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """The check of a V2 config. With a tree method it passes on a CPU without Triton.

    Raises:
        ValueError: naming the method and what vLLM's V2 runner does not support.
    """

    def validate(self: Any) -> None:
        from vllm.platforms import current_platform

        spec = tree_config(self)
        if spec is None:
            return original(self)
        if lacking := self._get_v2_model_runner_unsupported_features():
            raise ValueError(
                f"Speculative method {spec.plugin_method!r} runs in vLLM's V2 model runner, which "
                f"does not support {', '.join(lacking)}. Leave that out, or the method."
            )
        if not current_platform.is_cpu() or resolve(CPU_ADMISSION.target):
            return original(self)
        with CPU_ADMISSION.applied():
            return original(self)

    return validate


def wrap_post_init(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """A config's completion. With a tree method, steps are scheduled ahead of the host: on a GPU
    unless told not to, on a CPU when asked."""

    def post_init(self: Any) -> None:
        if tree_config(self) is None:
            original(self)
            return
        scheduler, parallel = self.scheduler_config, self.parallel_config
        asked = scheduler.async_scheduling
        nccl_asked = parallel.disable_nccl_for_dp_synchronization
        scheduler.async_scheduling = False
        original(self)
        scheduler.async_scheduling = schedules_ahead(self, asked)
        if scheduler.async_scheduling and nccl_asked is None:
            # vLLM's default beside asynchronous scheduling.
            parallel.disable_nccl_for_dp_synchronization = True

    return post_init


def schedules_ahead(vllm_config: Any, asked: bool | None) -> bool:
    """Whether steps of this config are scheduled ahead.

    Raises:
        ValueError: when it was asked for and the executor cannot do it.
    """
    from vllm.v1.executor.abstract import Executor

    wanted = asked if asked is not None else vllm_config.device_config.device_type != "cpu"
    if not wanted or Executor.get_class(vllm_config).supports_async_scheduling():
        return wanted
    if asked:
        backend = vllm_config.parallel_config.distributed_executor_backend
        raise ValueError(
            f"async_scheduling=True cannot be used with distributed_executor_backend={backend!r}, "
            "which waits for every step. Leave one of them out."
        )
    return False
