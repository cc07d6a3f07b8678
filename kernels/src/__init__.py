# SPDX-License-Identifier: Apache-2.0
"""Kernels: tree attention, KV compaction, ancestor masks.

`dispatch` has the entry points, `metadata` the description of a batch of trees, `cpu_layout` the
layout of vLLM's CPU cache, and `reference` the torch versions. Importing this package imports
nothing else.
"""

from __future__ import annotations

import importlib
from typing import Any

_EXPORTS = {
    "AttnFeatures": "features",
    "CpuKvLayout": "cpu_layout",
    "FeatureKind": "features",
    "DeltaUpdates": "delta_tree",
    "NgramIndex": "ngram_index",
    "StateTrees": "delta_tree",
    "TreeAttnMetadata": "metadata",
    "TreeLayer": "dispatch",
    "add_rms_norm": "row_ops",
    "ancestor_words": "masks",
    "block_metadata": "metadata",
    "LatentSpan": "latent_spans",
    "LocalTreeWeights": "local_tree",
    "build_best_first": "dispatch",
    "build_local_trees": "local_tree",
    "can_build_local_trees": "local_tree",
    "can_build_best_first": "dispatch",
    "can_store_kv": "kv_store",
    "causal_words": "masks",
    "commit_states": "delta_tree",
    "copy_kv": "dispatch",
    "copy_to_device": "device_copy",
    "isolate_nonfinite": "finite_values",
    "describe": "dispatch",
    "full_words": "masks",
    "recurrent_weights": "local_tree",
    "gumbel_argmax": "gumbel_argmax",
    "gated_silu": "row_ops",
    "key_scores": "key_scores",
    "latent_attn": "latent_spans",
    "make_ngram_index": "ngram_index",
    "markov_weights": "local_tree",
    "move_latents": "latent_spans",
    "multiply_experts": "experts",
    "norm_rotate_heads": "row_ops",
    "probe_cpu_layout": "cpu_layout",
    "rms_norm": "row_ops",
    "rotate_heads": "row_ops",
    "row_argmax": "row_argmax",
    "self_test": "selftest",
    "single_row_metadata": "metadata",
    "store_kv": "kv_store",
    "to_device": "device_copy",
    "top_candidates": "local_tree",
    "tree_attn": "dispatch",
    "tree_conv": "delta_tree",
    "tree_delta_rule": "delta_tree",
    "tree_metadata": "metadata",
}

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    # A module of the same name may be here after its import; the export replaces it.
    globals()[name] = value
    return value
