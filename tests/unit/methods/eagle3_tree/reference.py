# SPDX-License-Identifier: Apache-2.0
"""An EAGLE-3 head in plain torch, from the public equations, on tensors by their public names.

It knows nothing of the package: whole sequences, no cache, a softmax written out. For a sequence
of tokens t_0 .. t_n with states g_0 .. g_(n-1), row i reads the embedding of t_(i+1) and g_i at
rotary position i, and attends rows 0 .. i, or of a sliding window w only rows i - w + 1 .. i. Only
the first layer reads embedding and state; the others read the output of the layer before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotate(
    x: torch.Tensor, positions: torch.Tensor, theta: float, share: float = 1.0
) -> torch.Tensor:
    """x [T, heads, Dh]; of its first R = share * Dh dimensions pairs (i, i + R / 2) turn by
    position * theta^(-2 i / R)."""
    half = int(x.shape[-1] * share) // 2
    angle = positions[:, None].double() * theta ** (-torch.arange(half).double() / half)
    cos, sin = angle.cos()[:, None].to(x.dtype), angle.sin()[:, None].to(x.dtype)
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)


class ReferenceHead:
    """`tensors` have the names of the checkpoint, 'midlayer.' or 'layers.0.'."""

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        self.config = config
        self.w = {k.replace("midlayer.", "layers.0."): v for k, v in tensors.items()}
        self.eps = config["rms_norm_eps"]

    def fuse(self, aux: list[torch.Tensor]) -> torch.Tensor:
        """Target states of L layers, [T, Ht] each -> g [T, H]."""
        if self.config.get("fc_norm"):
            aux = [rms(a, self.w[f"fc_norm.{i}.weight"], self.eps) for i, a in enumerate(aux)]
        joined = torch.cat(aux, -1)
        if self.config.get("norm_before_fc"):
            joined = rms(joined, self.w["input_norm.weight"], self.eps)
        return joined @ self.w["fc.weight"].T

    def run(
        self, embeds: torch.Tensor, states: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All rows of one sequence, [T, H] twice: what the LM head reads and the next states."""
        c, first = self.config, "layers.0."
        normed = rms(states, self.w[first + "hidden_norm.weight"], self.eps)
        residual = normed if c.get("norm_before_residual") else states
        x = torch.cat((rms(embeds, self.w[first + "input_layernorm.weight"], self.eps), normed), -1)
        h = self._layer(0, x, residual, positions)
        for i in range(1, c["num_hidden_layers"]):
            x = rms(h, self.w[f"layers.{i}.input_layernorm.weight"], self.eps)
            h = self._layer(i, x, h, positions)
        out = rms(h, self.w["norm.weight"], self.eps)
        return out, out if c.get("norm_output") else h

    def _layer(
        self, index: int, x: torch.Tensor, residual: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        c, prefix = self.config, f"layers.{index}."
        w = {k[len(prefix) :]: v for k, v in self.w.items() if k.startswith(prefix)}
        heads, kv, dim = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]

        def project(name: str, count: int) -> torch.Tensor:
            out = x @ w[f"self_attn.{name}_proj.weight"].T
            out = out + w.get(f"self_attn.{name}_proj.bias", torch.zeros(1))
            out = out.view(len(x), count, dim)
            if f"self_attn.{name}_norm.weight" in w:
                out = rms(out, w[f"self_attn.{name}_norm.weight"], self.eps)
            return out

        theta = c.get("rope_theta", 10000.0)
        share = (c.get("rope_parameters") or {}).get("partial_rotary_factor")
        share = share or c.get("partial_rotary_factor", 1.0)
        q = rotate(project("q", heads), positions, theta, share)
        k = rotate(project("k", kv), positions, theta, share).repeat_interleave(heads // kv, 1)
        v = project("v", kv).repeat_interleave(heads // kv, 1)
        scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(dim)
        unseen = torch.ones(len(x), len(x)).triu(1).bool()
        if "sliding_attention" in (c.get("layer_types") or [])[index : index + 1]:
            unseen |= torch.ones(len(x), len(x)).tril(-c["sliding_window"]).bool()
        mixed = torch.einsum("hij,jhd->ihd", scores.masked_fill(unseen, -math.inf).softmax(-1), v)
        h = residual + mixed.reshape(len(x), -1) @ w["self_attn.o_proj.weight"].T
        h = h + w.get("self_attn.o_proj.bias", torch.zeros(1))
        y = rms(h, w["post_attention_layernorm.weight"], self.eps)
        gate = torch.nn.functional.silu(y @ w["mlp.gate_proj.weight"].T)
        return h + (gate * (y @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T

    def along(
        self, tokens: torch.Tensor, branch: list[int], aux: list[torch.Tensor], embed: torch.Tensor
    ) -> torch.Tensor:
        """[H] for the LM head after the tokens of a branch, drafted one by one as a chain. A head
        with a mask token reads this token and its state for each of them.

        Args:
            tokens: [n + 1] committed tokens, the anchor last; aux: states of the first n.
        """
        states = self.fuse([a[: len(tokens) - 1] for a in aux])
        inputs = tokens[1:].tolist()
        out = following = torch.empty(0)
        mask = self.config.get("mask_token_id")
        for token in [None, *branch]:
            if token is not None and mask is not None:
                state = self.w["mask_hidden"].flatten()[None].chunk(len(aux), -1)
                inputs.append(mask)
                states = torch.cat((states, self.fuse([*state])))
            elif token is not None:
                inputs.append(token)
                states = torch.cat((states, following[-1:]))
            rows = torch.arange(len(inputs))
            out, following = self.run(embed[torch.tensor(inputs)], states, rows)
        return out[-1]
