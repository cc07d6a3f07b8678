# SPDX-License-Identifier: Apache-2.0
"""Prepares a target's layers with recurrent states for trees.

vLLM reserves a state per draft token; trees need one per sequence (`vllm_attention.state_rows`). So
these layers request the same states as without speculation.

Seams: state_rows, state_blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import MambaSpec

from vllm_specplug.seams.listing_attention import CPU_STATE_SEAMS, DEVICE_STATE_SEAMS, STATE_SEAMS
from vllm_specplug.vllm_worker.start_up import use_seams


@dataclass(frozen=True)
class StateLayers:
    """The layers of a target that keep a state, by name."""

    names: tuple[str, ...] = ()
    row_bytes: int = 0
    """Bytes that a tree row keeps in all of them until the walk."""
    value_heads: int = 0
    """Maximum value heads of a layer on this rank."""


def prepare_state_layers(layers: Mapping[str, Any], method: str) -> StateLayers:
    """Returns the layers with a recurrent state and reduces them to one state per sequence.

    Args:
        layers: vLLM's static forward context.

    Raises:
        ValueError: naming the first layer whose state cannot follow a tree.
    """
    found: dict[str, Any] = {
        name: layer for name, layer in layers.items() if isinstance(layer, MambaBase)
    }
    if not found:
        return StateLayers()
    # Imported only for targets with such layers, because these names are private.
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import (
        QwenGatedDeltaNetAttention,
    )

    for name, layer in found.items():
        if type(layer) is not QwenGatedDeltaNetAttention:
            raise ValueError(
                f"Speculative method {method!r} cannot verify trees in this target: layer {name!r} "
                f"has a recurrent state ({type(layer).__name__}), which is not the Gated DeltaNet "
                "of Qwen3-Next. Use a target with such layers or only attention, or a chain method "
                "of vLLM's own."
            )
    on_device = CPU_STATE_SEAMS if current_platform.is_cpu() else DEVICE_STATE_SEAMS
    use_seams("a state", STATE_SEAMS, on_device)
    from vllm_specplug.vllm_attention.state_rows import row_bytes

    for layer in found.values():
        layer.num_spec = 0
        # A fused core for chains of drafts, which plain decoding does not use.
        layer.enable_fused_gdn_spec_decode = False
        layer.get_kv_cache_spec = _without_draft_states(layer.get_kv_cache_spec)
    return StateLayers(
        tuple(found),
        sum(row_bytes(layer) for layer in found.values()),
        max(layer.num_v_heads // layer.tp_size for layer in found.values()),
    )


def check_state_blocks(kv_cache_config: Any, num_nodes: int, method: str) -> None:
    """Refuses trees with a path that could fill two blocks, if states at block ends are kept.

    Raises:
        ValueError: naming the sizes.
    """
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        if isinstance(spec, MambaSpec) and spec.mamba_cache_mode == "align":
            if num_nodes >= spec.block_size:
                raise ValueError(
                    f"Speculative method {method!r}: num_speculative_tokens={num_nodes} with "
                    "prefix caching on a target with recurrent states, legal: less than a block, "
                    f"{spec.block_size} tokens. Lower num_speculative_tokens, raise block_size or "
                    "set enable_prefix_caching=False (--no-enable-prefix-caching)."
                )


def _without_draft_states(stock: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def get_kv_cache_spec(vllm_config: Any) -> Any:
        return replace(stock(vllm_config), num_speculative_blocks=0)

    return get_kv_cache_spec


def without_draft_states(original: Callable[[Any], None]) -> Callable[[Any, Any], None]:
    """Wraps `Platform.update_block_size_for_backend`, which pads pages to the size of a state.

    Seam: state_rows.
    """
    # Unbound: a platform that inherits it decides by its own class.
    stock: Callable[[Any, Any], None] = original.__func__  # type: ignore[attr-defined]

    def update(platform: Any, vllm_config: Any) -> None:
        spec = vllm_config.speculative_config
        if getattr(spec, "plugin_method", None) is None:
            return stock(type(platform), vllm_config)
        vllm_config.speculative_config = None
        try:
            return stock(type(platform), vllm_config)
        finally:
            vllm_config.speculative_config = spec

    return update
