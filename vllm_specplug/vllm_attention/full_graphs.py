# SPDX-License-Identifier: Apache-2.0
"""Whether steps with trees are captured whole on a GPU."""

from __future__ import annotations

import os
from typing import Any

from vllm.config.compilation import CUDAGraphMode

from vllm_specplug.kernels.cuda_contract import FULL_GRAPHS_VARIABLE


def wants_full_graphs(vllm_config: Any = None) -> bool:
    """Whether decoding batches and drafts are captured whole: as the variable says, or where it is
    not set as `captures_by_default`."""
    asked = os.environ.get(FULL_GRAPHS_VARIABLE)
    if asked is None:
        return vllm_config is not None and captures_by_default(vllm_config)
    return asked == "1"


def replays_decoding(vllm_config: Any) -> bool:
    """Whether decoding batches with trees are replayed, so that kernels may be timed in a replay.
    False under sleep mode: captures outside vLLM's own must stay out of its memory pool."""
    if vllm_config is None or not wants_full_graphs(vllm_config):
        return False
    mode = vllm_config.compilation_config.cudagraph_mode
    has_graphs = mode is not None and mode.decode_mode() == CUDAGraphMode.FULL
    return has_graphs and not vllm_config.model_config.enable_sleep_mode


def captures_by_default(vllm_config: Any) -> bool:
    """Where graphs of trees have run on a device: on one rank, without LoRA adapters and recurrent
    states."""
    spec, parallel = vllm_config.speculative_config, vllm_config.parallel_config
    return (
        # The reference waits for the host; a speculative config of vLLM's own has no such field.
        getattr(spec, "tree_kernel", "reference") != "reference"
        and parallel.world_size == parallel.data_parallel_size == 1
        and vllm_config.lora_config is None
        and not vllm_config.model_config.is_hybrid
    )
