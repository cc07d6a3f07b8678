# SPDX-License-Identifier: Apache-2.0
"""Collects outputs of decoder layers, which heads read, if the target's class does not return them.

vLLM's classes for EAGLE-3 return these outputs from their forward. In other classes, hooks copy
them to buffers, because a compiled forward or a captured graph cannot return more than it did.

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

# Relative to the norm of the model's output; bfloat16 rounds to 0.4 %.
_MAX_ROUNDING = 0.05


def collect_layer_states(
    model: nn.Module, layers: tuple[int, ...], vllm_config: Any, method: str
) -> bool:
    """Makes `model` return (hidden [T, H], outputs of `layers`, each [T, H]), as vLLM's classes for
    EAGLE-3 do. Returns False, and changes nothing, for a model of such a class.

    Call it before the first forward, which may be compiled.

    Args:
        layers: in vLLM's numbering; the output of decoder layer i is i + 1.

    Raises:
        ValueError: for a target whose decoder layers cannot be found.
    """
    if supports_eagle3(model):
        return False
    config = vllm_config.model_config
    decoder, body = _decoder_layers(model, config.hf_text_config.num_hidden_layers, method)
    # Ranks may pad their rows.
    rows = (
        vllm_config.scheduler_config.max_num_batched_tokens
        + vllm_config.parallel_config.tensor_parallel_size
    )
    hidden = config.hf_text_config.hidden_size
    device = next(model.parameters()).device
    # In the order of the model, as vLLM's classes return them.
    chosen = [decoder[i - 1] for i in sorted(set(layers))]
    last = decoder[-1]
    for layer in dict.fromkeys([*chosen, last]):
        states = torch.zeros(rows, hidden, dtype=config.dtype, device=device)
        layer.register_buffer(_BUFFER, states, persistent=False)
        layer.register_forward_hook(_keep)

    is_checked = False

    def with_states(_module: nn.Module, _args: Any, output: torch.Tensor) -> Any:
        nonlocal is_checked
        count = output.shape[0]
        if not is_checked:
            # In vLLM's memory profile, before any forward is captured.
            is_checked = _check_last(last.get_buffer(_BUFFER)[:count], body, output, model, method)
        # Cloned: the next forward, perhaps of drafts, overwrites the buffers.
        return output, [layer.get_buffer(_BUFFER)[:count].clone() for layer in chosen]

    model.register_forward_hook(with_states)
    return True


def _keep(layer: nn.Module, _args: Any, output: Any) -> None:
    """Copies a layer's output, which is one tensor or a sum of two: the last block's output and the
    residual."""
    value = output
    if isinstance(output, tuple):
        value = output[0] if output[1] is None else output[0] + output[1]
    states = getattr(layer, _BUFFER)
    # `_check_last` reports another shape. An error here would come from the compiler.
    if value.shape[1:] == states.shape[1:]:
        states[: value.shape[0]].copy_(value)


def _check_last(
    # [T, H] copied output of the last layer
    kept: torch.Tensor,
    body: nn.Module,
    output: torch.Tensor,
    model: nn.Module,
    method: str,
) -> bool:
    """Returns whether this forward proves that `_keep` copies the layers' outputs.

    It cannot detect a residual that the next layer does not add.

    Raises:
        ValueError: if no norm of `body` computes the model's output from the copied one.
    """
    if not bool(output.isfinite().all()):
        return False
    made = [kept]
    for part in body.children():
        if any(p.shape == output.shape[1:] for p in part.parameters(recurse=False)):
            normed = part(kept.clone())
            made.append(normed[0] if isinstance(normed, tuple) else normed)
    size = output.float().norm()
    if size == 0:
        return False
    if min(float((x.float() - output.float()).norm() / size) for x in made) > _MAX_ROUNDING:
        raise ValueError(
            f"Speculative method {method!r} reads outputs of the target's layers, and those of "
            f"{type(model).__name__} could not be found: the normed output of its last layer is "
            "not the model's output. Use another target, or a method without a head: "
            f"{', '.join(headless_methods())}."
        )
    return True


def _decoder_layers(model: nn.Module, count: int, method: str) -> tuple[nn.ModuleList, nn.Module]:
    """Returns the decoder's layers and the module that runs them."""
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module) == count
        and all(any(isinstance(m, AttentionLayerBase) for m in x.modules()) for x in module)
    ]
    # vLLM does not call forward hooks of a class that it compiles completely.
    if len(found) != 1 or hasattr(model, "do_not_compile"):
        raise ValueError(
            f"Speculative method {method!r} reads outputs of the target's layers, and "
            f"{type(model).__name__} has {len(found)} lists of {count} layers with attention "
            f"({', '.join(name for name, _ in found) or 'none'}); needed: exactly 1, below a "
            "class that vLLM does not compile. Use another target, or a method without a head: "
            f"{', '.join(headless_methods())}."
        )
    name, layers = found[0]
    return layers, model.get_submodule(name.rpartition(".")[0])
