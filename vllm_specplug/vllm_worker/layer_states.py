# SPDX-License-Identifier: Apache-2.0
"""Outputs of decoder layers, of targets whose class in vLLM gives none.

Heads read them. vLLM's classes for EAGLE-3 return them from their forward; beside others, layers
leave them in buffers here, as neither a compiled forward nor a captured graph can return what it
was not written to.

Seams: layer_states.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.models.interfaces import supports_eagle3

from vllm_specplug.registry import headless_methods

_BUFFER = "specplug_states"


def collect_layer_states(
    model: nn.Module, layers: tuple[int, ...], vllm_config: Any, method: str
) -> bool:
    """From here on `model` returns (hidden [T, H], outputs of `layers`, each [T, H]), as vLLM's
    classes for EAGLE-3 do; nothing changes, and the answer is False, where it is one of those.

    Call before the first forward, which may be compiled.

    Args:
        layers: in vLLM's numbering; the output of decoder layer i is i + 1.

    Raises:
        ValueError: for a target whose decoder layers cannot be told.
    """
    if supports_eagle3(model):
        return False
    config = vllm_config.model_config
    decoder = _decoder_layers(model, config.hf_text_config.num_hidden_layers, method)
    # Ranks may be given rows of their own for padding.
    rows = (
        vllm_config.scheduler_config.max_num_batched_tokens
        + vllm_config.parallel_config.tensor_parallel_size
    )
    hidden = config.hf_text_config.hidden_size
    device = next(model.parameters()).device
    # In the order of the model, as vLLM's classes return them.
    chosen = [decoder[i - 1] for i in sorted(set(layers))]
    for layer in chosen:
        states = torch.zeros(rows, hidden, dtype=config.dtype, device=device)
        layer.register_buffer(_BUFFER, states, persistent=False)
        layer.register_forward_hook(_keep)

    def with_states(_module: nn.Module, _args: Any, output: torch.Tensor) -> Any:
        # The next forward, of drafts perhaps, writes over them.
        count = output.shape[0]
        return output, [layer.get_buffer(_BUFFER)[:count].clone() for layer in chosen]

    model.register_forward_hook(with_states)
    return True


def _keep(layer: nn.Module, _args: Any, output: Any) -> None:
    """A layer returns its output, or what its last part adds and the residual to add it to."""
    value = output[0] + output[1] if isinstance(output, tuple) else output
    getattr(layer, _BUFFER)[: value.shape[0]].copy_(value)


def _decoder_layers(model: nn.Module, count: int, method: str) -> nn.ModuleList:
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module) == count
        and all(any(isinstance(m, AttentionLayerBase) for m in x.modules()) for x in module)
    ]
    # Forward hooks of a class that vLLM compiles whole would not be called.
    if len(found) != 1 or hasattr(model, "do_not_compile"):
        raise ValueError(
            f"Speculative method {method!r} reads outputs of the target's layers, and "
            f"{type(model).__name__} has {len(found)} lists of {count} layers with attention "
            f"({', '.join(name for name, _ in found) or 'none'}); needed: exactly 1, below a "
            "class that vLLM does not compile. Use another target, or a method without a head: "
            f"{', '.join(headless_methods())}."
        )
    return found[0][1]
