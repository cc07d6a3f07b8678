# SPDX-License-Identifier: Apache-2.0
"""Updates drafters when the target's weights are replaced in a running engine."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from vllm.device_allocator import get_mem_allocator_instance
from vllm.platforms import current_platform

from vllm_specplug.vllm_worker.target.linear import repack_tables, target_products


def kept_asleep(model_config: Any) -> AbstractContextManager[None]:
    """Returns a context in which device memory comes from the pool that vLLM restores after every
    sleep. At sleep level 2 it drops the weights' pool, and a reload only restores the target.
    """
    if not (current_platform.is_cuda_alike() and model_config.enable_cumem_allocator):
        return nullcontext()
    return get_mem_allocator_instance().use_memory_pool(tag="runtime")


class FollowsTarget:
    """A worker mixin: the drafter follows the target's new weights."""

    vllm_config: Any
    model_runner: Any

    def loading(self) -> AbstractContextManager[None]:
        """Returns the context in which weights are loaded."""
        return nullcontext()

    def follow_target(self) -> None:
        """Updates what was computed from the target's weights. Call it once they are loaded."""
        self.model_runner.drafter.follow_target()

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        with self.loading():
            super().reload_weights(*args, **kwargs)  # type: ignore[misc]  # vLLM's worker
            self.follow_target()

    def update_weights(self, *args: Any, **kwargs: Any) -> None:
        with self.loading():
            super().update_weights(*args, **kwargs)  # type: ignore[misc]  # vLLM's worker

    def finish_weight_update(self, *args: Any, **kwargs: Any) -> None:
        with self.loading():
            super().finish_weight_update(*args, **kwargs)  # type: ignore[misc]  # vLLM's worker
            self.follow_target()


class PacksTarget(FollowsTarget):
    """A CPU worker mixin: packs the target's weights whenever they are loaded."""

    def loading(self) -> AbstractContextManager[None]:
        return target_products(self.vllm_config.speculative_config.target_products)

    def follow_target(self) -> None:
        repack_tables(self.model_runner.get_model())
        super().follow_target()

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        with self.loading():
            super().load_model(*args, **kwargs)  # type: ignore[misc]  # vLLM's worker
