# SPDX-License-Identifier: Apache-2.0
"""Decides whether full CUDA graphs hold steps with trees."""

from __future__ import annotations

import os
from typing import Any

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backend import AttentionCGSupport

from vllm_specplug.kernels.cuda_contract import FULL_GRAPHS_VARIABLE


def wants_full_graphs(vllm_config: Any = None) -> bool:
    """Returns whether full graphs hold decoding batches and drafts, by the environment variable or,
    if it is not set, by `captures_by_default`."""
    asked = os.environ.get(FULL_GRAPHS_VARIABLE)
    if asked is None:
        return vllm_config is not None and captures_by_default(vllm_config)
    return asked == "1"


def replays_decoding(vllm_config: Any) -> bool:
    """Returns whether decoding batches with trees are replayed, so that replays may time kernels.

    False in sleep mode, whose memory pool must hold no captures but vLLM's own.
    """
    if vllm_config is None or not wants_full_graphs(vllm_config):
        return False
    mode = vllm_config.compilation_config.cudagraph_mode
    has_graphs = mode is not None and mode.decode_mode() == CUDAGraphMode.FULL
    return has_graphs and not vllm_config.model_config.enable_sleep_mode


def captures_by_default(vllm_config: Any) -> bool:
    """Returns whether graphs of trees were tested in this setting: one rank, no LoRA adapters, no
    recurrent states, no latent attention."""
    spec, parallel = vllm_config.speculative_config, vllm_config.parallel_config
    return (
        # The reference kernel waits for the host. vLLM's own speculative configs lack the field.
        getattr(spec, "tree_kernel", "reference") != "reference"
        and parallel.world_size == parallel.data_parallel_size == 1
        and vllm_config.lora_config is None
        and not vllm_config.model_config.is_hybrid
        and not vllm_config.model_config.use_mla
    )


class GraphSupport:
    """A mixin for a metadata builder: supports full graphs, also of ragged batches
    (`vllm_v2.graph_trees`), if they are wanted."""

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        if wants_full_graphs(vllm_config):
            return AttentionCGSupport.UNIFORM_BATCH
        return AttentionCGSupport.NEVER
