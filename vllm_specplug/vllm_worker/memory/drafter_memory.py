# SPDX-License-Identifier: Apache-2.0
"""The drafter's memory outside of vLLM's pages: subtracted from the cache memory, then bound."""

from __future__ import annotations

from functools import partial

import torch

from vllm_specplug.drafting.method import Capability
from vllm_specplug.options import option_error
from vllm_specplug.vllm_worker.memory.cache_groups import check_plain_attention, target_layer
from vllm_specplug.vllm_worker.memory.window_cache import window_bytes
from vllm_specplug.vllm_worker.ranks import first_rank_values
from vllm_specplug.vllm_worker.runner_view import RunnerView
from vllm_specplug.vllm_worker.self_draft import partial_cache_bytes


def memory_for_caches(state: RunnerView, available: int) -> int:
    """Returns the bytes of `available` that remain for vLLM's caches.

    Raises:
        ValueError: if none remain.
    """
    drafter = state.drafter
    available = _without_tree_states(state, available)
    partial_bytes = partial_cache_bytes(state)
    if partial_bytes >= available:
        kept = drafter.partial_cache_spec()
        assert kept is not None
        requests, budget = kept.options
        raise option_error(
            requests,
            kept.max_requests,
            f"partial caches of {budget}={kept.budget} tokens each take "
            f"{partial_bytes / 2**20:.0f} MiB, all of the {available / 2**20:.0f} MiB for caches",
            f"Lower {requests} or {budget}, or raise VLLM_CPU_KVCACHE_SPACE",
        )
    return _without_windows(state, available) - partial_bytes


def drafter_memory(state: RunnerView) -> torch.Tensor:
    """Allocates the drafter's memory outside of vLLM's pages, for vLLM's memory profile.

    Raises:
        ValueError: if the device has less free memory.
    """
    window, kept = state.drafter.window_spec(), state.drafter.partial_cache_spec()
    size = partial_cache_bytes(state)
    if window is not None:
        size += window_bytes(window, state.max_requests, state.dtype)
    try:
        return torch.empty(size, dtype=torch.uint8, device=state.device)
    except torch.OutOfMemoryError:
        problem = f"take {size / 2**20:.0f} MiB, more than the device has free"
        if kept is None:
            assert window is not None
            raise ValueError(
                f"The draft head's windows of {window.size} tokens for {state.max_requests} "
                f"requests {problem}. Lower --max-num-seqs."
            ) from None
        raise option_error(
            kept.options[0],
            kept.max_requests,
            f"partial caches of {kept.options[1]}={kept.budget} tokens each {problem}",
            f"Lower {kept.options[0]} or {kept.options[1]}",
        ) from None


def max_tree_rows(state: RunnerView) -> int:
    """Returns the number of tree rows in the largest step."""
    most = state.vllm_config.speculative_config.max_step_rows or state.max_rows
    return min(most, state.max_rows, state.max_requests * (state.drafter_options.num_nodes + 1))


def _without_tree_states(state: RunnerView, available: int) -> int:
    """Returns `available` without what tree rows keep in layers with a recurrent state until the
    walk."""
    rows = max_tree_rows(state)
    kept = rows * state.state_layers.row_bytes
    if kept >= available:
        raise ValueError(
            f"{rows} rows of trees keep {kept / 2**20:.0f} MiB in the target's layers with a "
            f"state, all of the {available / 2**20:.0f} MiB for caches. Lower max_step_rows, "
            "num_speculative_tokens or max_num_seqs, or raise VLLM_CPU_KVCACHE_SPACE."
        )
    return available - kept


def _without_windows(state: RunnerView, available: int) -> int:
    """Returns `available` without the drafter's windows."""
    spec = state.drafter.window_spec()
    if spec is None:
        return available
    windows = window_bytes(spec, state.max_requests, state.dtype)
    if windows >= available:
        raise ValueError(
            f"The draft head's windows of {spec.size} tokens for {state.max_requests} requests "
            f"take {windows / 2**20:.0f} MiB, all of the {available / 2**20:.0f} MiB for caches. "
            "Lower --max-num-seqs, or raise VLLM_CPU_KVCACHE_SPACE."
        )
    return available - windows


def bind_drafter_memory(state: RunnerView, method: str) -> None:
    """Gives the drafter its windows, caches of the target and partial caches. Call it once vLLM's
    caches exist.

    Raises:
        ValueError: if the target's layers do not support them.
    """
    drafter = state.drafter
    backend = state.runner.tree_backend
    window = drafter.window_spec()
    if window is not None:
        drafter.bind_window(backend.draft_window(window, state))
    specs = drafter.target_cache_specs()
    needs_cache = Capability.TARGET_CACHE in state.vllm_config.speculative_config.needs()
    if bool(specs) != needs_cache:
        # What tensor parallelism and caches allow is decided by the capability.
        raise ValueError(
            f"Speculative method {method!r}: its drafter's target_cache_specs() names "
            f"{len(specs)} caches, and its needs {'have' if needs_cache else 'lack'} the "
            "capability 'target_cache'. Declare both, or neither."
        )
    if specs:
        caches = {}
        for cache_spec in dict.fromkeys(specs):
            group, name = target_layer(state.target_groups(), state.layers, cache_spec, method)
            caches[cache_spec] = backend.target_cache(
                state.layers[name].kv_cache, partial(state.block_table, group), cache_spec
            )
        drafter.bind_target_caches([caches[cache_spec] for cache_spec in specs])
    spec = drafter.partial_cache_spec()
    if spec is not None:
        check_plain_attention(
            state.layers,
            method,
            "drafts with the target's own layers over partial caches",
            "Use another method, or other settings of this one",
        )
        forward = backend.self_draft(state, spec)
        drafter.bind_target_forward(forward, first_rank_values)
