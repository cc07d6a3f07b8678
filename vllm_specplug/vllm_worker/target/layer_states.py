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

# Of the norm of the model's output; bfloat16 rounds to 0.4 %.
_MOST_ROUNDING = 0.05


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
    decoder, body = _decoder_layers(model, config.hf_text_config.num_hidden_layers, method)
    # Ranks may be given rows of their own for padding.
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
            # In the forward that vLLM measures memory with, before any is captured.
            is_checked = _check_last(last.get_buffer(_BUFFER)[:count], body, output, model, method)
        # The next forward, of drafts perhaps, writes over them.
        return output, [layer.get_buffer(_BUFFER)[:count].clone() for layer in chosen]

    model.register_forward_hook(with_states)
    return True


def _keep(layer: nn.Module, _args: Any, output: Any) -> None:
    """A layer returns its output, or what its last part adds and the residual to add it to."""
    value = output
    if isinstance(output, tuple):
        value = output[0] if output[1] is None else output[0] + output[1]
    states = getattr(layer, _BUFFER)
    # Another shape stays out, and `_check_last` says so: an error here would be the compiler's.
    if value.shape[1:] == states.shape[1:]:
        states[: value.shape[0]].copy_(value)


def _check_last(
    # [T, H] kept of the last layer, and the model's output
    kept: torch.Tensor,
    body: nn.Module,
    output: torch.Tensor,
    model: nn.Module,
    method: str,
) -> bool:
    """Whether it is now known that layers return what `_keep` takes it for.

    A residual that the next layer does not add looks no different.

    Raises:
        ValueError: where no norm of `body` makes the model's output of what was kept.
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
    if min(float((x.float() - output.float()).norm() / size) for x in made) > _MOST_ROUNDING:
        raise ValueError(
            f"Speculative method {method!r} reads outputs of the target's layers, and those of "
            f"{type(model).__name__} could not be told: what its last layer returns, normed, is "
            "not the model's output. Use another target, or a method without a head: "
            f"{', '.join(headless_methods())}."
        )
    return True


def _decoder_layers(model: nn.Module, count: int, method: str) -> tuple[nn.ModuleList, nn.Module]:
    """The decoder's layers, and the module that runs them."""
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
    name, layers = found[0]
    return layers, model.get_submodule(name.rpartition(".")[0])
