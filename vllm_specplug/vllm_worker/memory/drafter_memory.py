# SPDX-License-Identifier: Apache-2.0
"""The drafter's memory outside of vLLM's pages: subtracted from the cache memory, then bound."""

from __future__ import annotations

from functools import partial

import torch
from vllm.distributed import get_tensor_model_parallel_world_size

from vllm_specplug.drafting.method import Capability
from vllm_specplug.vllm_worker.memory.cache_groups import check_plain_attention, target_layer
from vllm_specplug.vllm_worker.memory.rank_caches import bind_target_caches
from vllm_specplug.vllm_worker.memory.window_cache import window_bytes
from vllm_specplug.vllm_worker.runner_view import RunnerView
from vllm_specplug.vllm_worker.self_draft import partial_cache_bytes


def memory_for_caches(state: RunnerView, available: int) -> int:
    """Returns the bytes of `available` that remain for vLLM's caches on a CPU.

    Raises:
        ValueError: if none remain.
    """
    rows = max_tree_rows(state)
    # What tree rows keep until the walk.
    states = (
        rows * state.state_layers.row_bytes,
        f"the states of {rows} rows of trees (lower max_step_rows, num_speculative_tokens or "
        "max_num_seqs)",
    )
    parts = [states, *_drafter_parts(state)]
    needed = sum(size for size, _ in parts)
    if needed >= available:
        limit = f"and {available / 2**20:.0f} MiB are there for both (raise VLLM_CPU_KVCACHE_SPACE)"
        raise _no_room(parts, limit)
    return available - needed


def drafter_memory(state: RunnerView) -> torch.Tensor:
    """Allocates the drafter's memory outside of vLLM's pages, for vLLM's memory profile.

    Raises:
        ValueError: if the device has less free memory.
    """
    parts = _drafter_parts(state)
    needed = sum(size for size, _ in parts)
    try:
        return torch.empty(needed, dtype=torch.uint8, device=state.device)
    except torch.OutOfMemoryError:
        raise _no_room(parts, "more than the device has free") from None


def max_tree_rows(state: RunnerView) -> int:
    """Returns the number of tree rows in the largest step."""
    most = state.vllm_config.speculative_config.max_step_rows or state.max_rows
    return min(most, state.max_rows, state.max_requests * (state.drafter_options.num_nodes + 1))


def _drafter_parts(state: RunnerView) -> list[tuple[int, str]]:
    """Returns the parts of the drafter's memory outside of vLLM's pages: bytes, and what they are
    for and depend on."""
    parts = []
    window, kept = state.drafter.window_spec(), state.drafter.partial_cache_spec()
    if window is not None:
        size = window_bytes(window, state.max_requests, state.dtype)
        what = f"windows of {window.size} tokens for {state.max_requests} requests"
        parts.append((size, f"{what} (lower max_num_seqs)"))
    if kept is not None:
        requests, budget = kept.options
        what = f"{requests}={kept.max_requests} partial caches of {budget}={kept.budget} tokens"
        parts.append((partial_cache_bytes(state, kept), f"{what} (lower {requests} or {budget})"))
    return parts


def _no_room(parts: list[tuple[int, str]], limit: str) -> ValueError:
    needed = sum(size for size, _ in parts)
    listed = "; ".join(f"{size / 2**20:.0f} MiB for {what}" for size, what in parts if size)
    return ValueError(
        f"Besides vLLM's caches, drafts need {needed / 2**20:.0f} MiB, {limit}: {listed}."
    )


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
        # The check at start of the target's caches depends on the capability.
        raise ValueError(
            f"Speculative method {method!r}: its drafter's target_cache_specs() names "
            f"{len(specs)} caches, and its needs {'have' if needs_cache else 'lack'} the "
            "capability 'target_cache'. Declare both, or neither."
        )
    if specs:
        caches = {}
        for cache_spec in dict.fromkeys(specs):
            group, name = target_layer(
                state.target_groups(), state.layers, cache_spec, method,
                get_tensor_model_parallel_world_size(),
            )  # fmt: skip
            caches[cache_spec] = backend.target_cache(
                state.layers[name].kv_cache, partial(state.block_table, group), cache_spec
            )
        bind_target_caches(drafter, caches)
    spec = drafter.partial_cache_spec()
    if spec is not None:
        check_plain_attention(state.layers, method)
        forward = backend.self_draft(state, spec)
        drafter.bind_target_forward(forward)
    check_host_drafts(state, method)


def check_host_drafts(state: RunnerView, method: str) -> None:
    """Refuses a drafter that reads caches on a device but builds its trees on the host.

    Raises:
        ValueError: with what the drafter must do.
    """
    drafter = state.drafter
    caches = (
        drafter.cache_specs(), drafter.target_cache_specs(), drafter.window_spec(),
        drafter.partial_cache_spec(),
    )  # fmt: skip
    if any(caches) and not (state.runner.tree_backend.is_host or drafter.drafts_on_device):
        raise ValueError(
            f"Speculative method {method!r} cannot be used on a GPU: its drafter "
            f"({type(drafter).__name__}) has caches, which serve only drafts that are built on the "
            "device, and its drafts_on_device is False. Implement propose_on_device, draft without "
            "caches, or serve on a CPU."
        )
