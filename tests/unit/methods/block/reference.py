# SPDX-License-Identifier: Apache-2.0
"""Block heads from their published equations, one block at a time in float64.

Nothing of the package is used: configs are read as the trainers write them, and tensors by their
published names. L selected layers, Ht target hidden size, n context tokens, B slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

Tensors = Mapping[str, torch.Tensor]


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


def layer_config(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Where the sizes of the layers stand: in speculators' format one level down."""
    return raw.get("transformer_layer_config", raw)


def _rotated(x: torch.Tensor, positions: torch.Tensor, raw: Mapping[str, Any]) -> torch.Tensor:
    """x [heads, n, Dh] at `positions` [n]; frequencies and scale are those of transformers."""
    from transformers import Qwen3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    names = ("hidden_size", "num_attention_heads", "head_dim", "rope_theta", "rope_scaling",
             "rope_parameters", "max_position_embeddings", "partial_rotary_factor")  # fmt: skip
    stated = {name: raw[name] for name in names if raw.get(name) is not None}
    config = Qwen3Config(**stated)
    rope = config.rope_parameters
    kind = rope["rope_type"]
    if kind == "default":
        width = int(x.shape[-1] * rope.get("partial_rotary_factor", 1.0))
        frequencies = rope["rope_theta"] ** -(torch.arange(0, width, 2).double() / width)
        scale = 1.0
    else:
        frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    angles = positions.double()[:, None] * frequencies.double()
    cos, sin = (torch.cat((f(angles), f(angles)), -1) * scale for f in (torch.cos, torch.sin))
    width = cos.shape[-1]
    turned, rest = x[..., :width], x[..., width:]
    first, second = turned.chunk(2, -1)
    return torch.cat((turned * cos + torch.cat((-second, first), -1) * sin, rest), -1)


def _convolved(
    # [B, H]
    x: torch.Tensor,
    # [B, H] the sublayer's normed input
    source: torch.Tensor,
    tensors: Tensors,
    # of a convolution, "layers.0.mlp_conv." for instance
    prefix: str,
    # 0 before the sublayer, 1 behind it
    side: int,
) -> torch.Tensor:
    """DFlash2's convolution over the slots of a block, channel by channel; `x` without one.

    out[j, c] = sum over t <= j of (base[t, c] + delta[j, t, group of c]) x[j - t, c], where delta
    is a projection of the sublayer's input at slot j.
    """
    if prefix + "base_kernel" not in tensors:
        return x
    base = tensors[prefix + "base_kernel"].double()[side]
    taps, hidden = base.shape
    delta = source @ tensors[prefix + "kernel_projection.weight"].double().T
    delta = delta.view(len(x), 2, taps, -1)[:, side]
    size = hidden // delta.shape[-1]
    out = torch.zeros_like(x)
    for slot in range(len(x)):
        for tap in range(min(taps, slot + 1)):
            for channel in range(hidden):
                weight = base[tap, channel] + delta[slot, tap, channel // size]
                out[slot, channel] += weight * x[slot - tap, channel]
    return out


def block_hidden(
    raw: Mapping[str, Any],
    tensors: Tensors,
    # [n, L * Ht] selected layer outputs of the tokens before the anchor
    context: torch.Tensor,
    # [B, H] embeddings of the anchor and the masks
    slots: torch.Tensor,
    *,
    causal: bool,
    windows: list[int | None] | None = None,
    causal_layers: list[bool] | None = None,
) -> torch.Tensor:
    """Normed states [B, H] of all slots of a block.

    `windows` holds each layer's sliding window, None for full attention; `causal_layers` each
    layer's mask inside the block, where they differ.
    """
    layer = layer_config(raw)
    t = {name.removeprefix("model."): tensor.double() for name, tensor in tensors.items()}
    eps, size = layer["rms_norm_eps"], layer["head_dim"]
    heads, kv_heads = layer["num_attention_heads"], layer["num_key_value_heads"]
    n, count = len(context), len(slots)
    features = _norm(context.double() @ t["fc.weight"].T, t["hidden_norm.weight"], eps)
    positions = torch.arange(n + count)
    x = slots.double()
    for i in range(layer["num_hidden_layers"]):
        prefix = f"layers.{i}."
        source = _norm(x, t[prefix + "input_layernorm.weight"], eps)
        conv = prefix + "attention_conv."
        normed = _convolved(source, source, t, conv, 0)
        q, k, v = (
            (inputs @ t[f"{prefix}self_attn.{name}_proj.weight"].T)
            .unflatten(-1, (-1, size))
            .transpose(0, 1)
            for name, inputs in (
                ("q", normed),
                ("k", torch.cat((features, normed))),
                ("v", torch.cat((features, normed))),
            )
        )
        q = _norm(q, t[prefix + "self_attn.q_norm.weight"], eps)
        k = _norm(k, t[prefix + "self_attn.k_norm.weight"], eps)
        q, k = _rotated(q, positions[n:], layer), _rotated(k, positions, layer)
        k, v = (y.repeat_interleave(heads // kv_heads, 0) for y in (k, v))
        scores = q @ k.transpose(1, 2) / size**0.5
        distance = positions[n:, None] - positions
        seen = torch.ones(count, n + count, dtype=torch.bool)
        if causal if causal_layers is None else causal_layers[i]:
            seen &= distance >= 0
        window = None if windows is None else windows[i]
        if window is not None:
            seen &= distance < window
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        mixed = (weights @ v).transpose(0, 1).flatten(1)
        mixed = mixed @ t[prefix + "self_attn.o_proj.weight"].T
        x = x + _convolved(mixed, source, t, conv, 1)
        source = _norm(x, t[prefix + "post_attention_layernorm.weight"], eps)
        conv = prefix + "mlp_conv."
        normed = _convolved(source, source, t, conv, 0)
        gate = torch.nn.functional.silu(normed @ t[prefix + "mlp.gate_proj.weight"].T)
        gated = gate * (normed @ t[prefix + "mlp.up_proj.weight"].T)
        x = x + _convolved(gated @ t[prefix + "mlp.down_proj.weight"].T, source, t, conv, 1)
    return _norm(x, t["norm.weight"], eps)


def markov_log_probs(
    # [D, V'] the block's scores of each depth
    logits: torch.Tensor,
    tensors: Tensors,
    # target tokens of a branch, the anchor first
    branch: list[int],
    # [D, H] the block's states at each depth, for heads that read them
    hidden: torch.Tensor | None = None,
) -> torch.Tensor:
    """Log-probabilities [V'] of the token after `branch`, for every kind of Markov head."""
    w1, w2 = (tensors[f"markov_head.markov_w{i}.weight"].double() for i in (1, 2))
    rank = w1[branch[-1]]
    for name in ("gate_proj", "joint_proj"):
        if f"markov_head.{name}.weight" not in tensors:
            continue
        assert hidden is not None
        weight, bias = (tensors[f"markov_head.{name}.{p}"].double() for p in ("weight", "bias"))
        if name == "gate_proj":
            gate = weight @ torch.cat((hidden[len(branch) - 1], rank)) + bias
            rank = gate.sigmoid() * rank
            continue
        state = torch.zeros_like(rank)
        for slot, token in enumerate(branch):
            read = torch.cat((state, w1[token], hidden[slot]))
            gate, new, output = (weight @ read + bias).chunk(3)
            state = gate.sigmoid() * state + (1 - gate.sigmoid()) * new.tanh()
            rank = output.tanh()
    return (logits[len(branch) - 1] + w2 @ rank).log_softmax(-1)


def domino_log_probs(
    # [D, V'] the block's scores and [D, H] its states at each depth
    logits: torch.Tensor,
    hidden: torch.Tensor,
    tensors: Tensors,
    # [V, H] embeddings of the target
    embed: torch.Tensor,
    # depths without a correction
    prefix: int,
    # target tokens of a branch, the anchor first
    branch: list[int],
) -> torch.Tensor:
    """Log-probabilities [V'] of the token after `branch`, by Domino's recurrent head."""
    depth = len(branch) - 1
    if depth < prefix:
        return logits[depth].log_softmax(-1)
    w_ih, w_hh = (tensors[f"prefix_gru.weight_{part}_l0"].double() for part in ("ih", "hh"))
    state = torch.zeros(w_hh.shape[1], dtype=torch.float64)
    for token in branch:
        reset_x, update_x, new_x = (w_ih @ embed[token].double()).chunk(3)
        reset_h, update_h, new_h = (w_hh @ state).chunk(3)
        update = (update_x + update_h).sigmoid()
        new = (new_x + (reset_x + reset_h).sigmoid() * new_h).tanh()
        state = (1 - update) * new + update * state
    inner, outer = (tensors[f"embed_proj.{i}.weight"].double() for i in (0, 2))
    rank = torch.nn.functional.silu(inner @ torch.cat((hidden[depth], state)))
    return (logits[depth] + outer @ rank).log_softmax(-1)


def selector_scores(
    # [D, V] the block's scores of each depth, scaled and capped
    logits: torch.Tensor,
    # [D, H] the block's states at each depth
    hidden: torch.Tensor,
    tensors: Tensors,
    top_k: int,
    # target tokens of a branch, the anchor first
    branch: list[int],
) -> dict[int, float]:
    """DFlash2's scores of the `top_k` candidates of the token after `branch`, best unary first."""
    depth = len(branch) - 1
    a, b = (tensors[f"candidate_selector.{name}_codebook"].double()
            for name in ("predecessor", "successor"))  # fmt: skip
    gate = tensors["candidate_selector.hidden_projection.weight"].double() @ hidden[depth]
    unary, ids = logits[depth].topk(top_k)
    return {
        token: float(score + (a[branch[-1]] * gate) @ b[token])
        for score, token in zip(unary, ids.tolist(), strict=True)
    }


def log_confidence(
    # [D, H] the block's states at each depth
    hidden: torch.Tensor,
    tensors: Tensors,
    # target tokens of a branch, the anchor first
    branch: list[int],
) -> float:
    """Log of the confidence head's probability for the token after `branch`; 0 without one."""
    weight = tensors.get("confidence_head.proj.weight")
    if weight is None:
        return 0.0
    state = hidden[len(branch) - 1]
    if weight.shape[1] > len(state):
        row = tensors["markov_head.markov_w1.weight"][branch[-1]].double()
        state = torch.cat((state, row))
    logit = weight[0].double() @ state + tensors["confidence_head.proj.bias"][0].double()
    return float(logit.sigmoid().log())
