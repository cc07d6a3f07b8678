# SPDX-License-Identifier: Apache-2.0
"""The assistant: decoder layers whose only attention reads the target's keys and values.

Shapes: T tree nodes, H hidden size of the assistant, Ht of the target, Hq query heads, Dh head
size, R requests, V vocabulary, C groups of S tokens.

A row takes a token's embedding and a state, both of the target's size. Below the root the state is
the assistant's own output for the node's parent. All nodes of a tree stand at the position before
the anchor, the last one whose keys and values the target has computed, and attend the same
context. So a branch differs from another one only by its tokens and states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from vllm_specplug.drafting.drafter import LinearFactory
from vllm_specplug.kernels import rms_norm, top_candidates
from vllm_specplug.kernels.row_ops import norm_rotate_heads
from vllm_specplug.methods.assistant_tree.config import AssistantConfig, AssistantLayer
from vllm_specplug.methods.block.fused_parts import (
    RotaryTables,
    joined_weights,
    plain_linear,
    tables_of_angles,
)
from vllm_specplug.methods.block.head import GatedMLP, RMSNorm

# q [T, Hq, Dh] -> [T, Hq, Dh]
ContextAttend = Callable[[torch.Tensor], torch.Tensor]


class _Attention(nn.Module):
    """Projections and norm of queries; keys and values are the target's."""

    def __init__(self, config: AssistantConfig, layer: AssistantLayer) -> None:
        super().__init__()
        inner = config.num_attention_heads * layer.cache.head_dim
        self.q_proj = nn.Linear(config.hidden_size, inner, bias=False)
        self.o_proj = nn.Linear(inner, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(layer.cache.head_dim, config.rms_norm_eps)


class _Layer(nn.Module):
    def __init__(self, config: AssistantConfig, layer: AssistantLayer) -> None:
        super().__init__()
        norm = (config.hidden_size, config.rms_norm_eps)
        self.self_attn = _Attention(config, layer)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = RMSNorm(*norm)
        self.post_attention_layernorm = RMSNorm(*norm)
        self.pre_feedforward_layernorm = RMSNorm(*norm)
        self.post_feedforward_layernorm = RMSNorm(*norm)
        self.layer_scalar = nn.Parameter(torch.ones(1))


class _MaskedEmbedding(nn.Module):
    """The groups of the vocabulary: a vector for each, and their tokens one after the other."""

    def __init__(self, config: AssistantConfig) -> None:
        super().__init__()
        assert config.centroids is not None
        self.centroids = nn.Linear(config.hidden_size, config.centroids.count, bias=False)
        self.register_buffer("token_ordering", torch.zeros(config.vocab_size, dtype=torch.int64))


class AssistantHead(nn.Module):
    """The weights of an assistant under their published names. `embed_tokens` is its LM head: it
    reads the target's embedding."""

    def __init__(self, config: AssistantConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.pre_projection = nn.Linear(
            2 * config.target_hidden_size, config.hidden_size, bias=False
        )
        self.post_projection = nn.Linear(config.hidden_size, config.target_hidden_size, bias=False)
        self.layers: Any = nn.ModuleList(_Layer(config, layer) for layer in config.layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if config.centroids is not None:
            # Any: torch types what a module holds as tensors or modules.
            self.masked_embedding: Any = _MaskedEmbedding(config)


class _FusedLayer:
    """Serving form of one layer."""

    def __init__(self, layer: _Layer, eps: float, make_linear: LinearFactory) -> None:
        attn, mlp = layer.self_attn, layer.mlp
        self.eps = eps
        self.query = make_linear(attn.q_proj.weight, None)
        self.output = make_linear(attn.o_proj.weight, None)
        self.gate_up = make_linear(*joined_weights(mlp.gate_proj, mlp.up_proj))
        self.down = make_linear(mlp.down_proj.weight, None)
        dim = len(attn.q_norm.weight)
        heads = attn.q_proj.out_features // dim
        # [Hq, Dh]
        self.query_norm = attn.q_norm.weight.expand(heads, -1).contiguous()
        self.input_norm = layer.input_layernorm.weight
        self.attended_norm = layer.post_attention_layernorm.weight
        self.mlp_norm = layer.pre_feedforward_layernorm.weight
        self.output_norm = layer.post_feedforward_layernorm.weight
        self.scale = layer.layer_scalar

    def __call__(
        self,
        x: torch.Tensor,
        rotations: RotaryTables,
        requests: torch.Tensor,
        attend: ContextAttend,
    ) -> torch.Tensor:
        """x [T, H], the rotations of each request, and the request of each row [T] -> [T, H]."""
        query = self.query(self._norm(x, self.input_norm)).view(len(x), *self.query_norm.shape)
        query = norm_rotate_heads(
            query, self.query_norm, rotations.cos, rotations.sin, requests, self.eps
        )
        x = x + self._norm(self.output(attend(query).flatten(1)), self.attended_norm)
        gate, up = self.gate_up(self._norm(x, self.mlp_norm)).chunk(2, dim=-1)
        mixed = self.down(F.gelu(gate, approximate="tanh") * up)
        return (x + self._norm(mixed, self.output_norm)) * self.scale

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, weight, self.eps)


class FusedAssistant:
    """Serving form of an `AssistantHead` on its device and in its dtype.

    Args:
        make_linear: makes a linear layer from a weight and a bias.
    """

    def __init__(self, head: AssistantHead, make_linear: LinearFactory = plain_linear) -> None:
        config = head.config
        self.eps, self.norm = config.rms_norm_eps, head.norm.weight
        self.layers = [_FusedLayer(layer, self.eps, make_linear) for layer in head.layers]
        # Layers over one cache have one rotary embedding.
        self.kinds = [layer.cache for layer in config.layers]
        # [Dh / 2] each
        self.frequencies = {
            layer.cache: layer.rotary.frequencies()[0].to(self.norm.device)
            for layer in config.layers
        }
        self.input = make_linear(head.pre_projection.weight, None)
        self.output = make_linear(head.post_projection.weight, None)
        # Rounded as the target rounds the factor of its own embeddings.
        self.embed_scale = torch.tensor(config.target_hidden_size**0.5).to(self.norm)

    def rotations(self, positions: torch.Tensor) -> list[RotaryTables]:
        """Returns the rotations by positions [R], of each layer."""
        made = {
            kind: tables_of_angles(positions.float()[:, None] * frequencies, self.norm)
            for kind, frequencies in self.frequencies.items()
        }
        return [made[kind] for kind in self.kinds]

    def __call__(
        self,
        embeds: torch.Tensor,
        states: torch.Tensor,
        rotations: Sequence[RotaryTables],
        requests: torch.Tensor,
        attend: Sequence[ContextAttend],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns states [T, H] for the LM head, and states [T, Ht] for the next level.

        Args:
            embeds: [T, Ht], rows of the target's embedding.
            states: [T, Ht].
            rotations: by the positions of the requests, see `rotations`.
            requests: [T], the request of each row.
            attend: attention over the context, of each layer.
        """
        x = self.input(torch.cat((embeds * self.embed_scale, states), dim=-1))
        for layer, tables, attend_context in zip(self.layers, rotations, attend, strict=True):
            x = layer(x, tables, requests, attend_context)
        x = rms_norm(x, self.norm, self.eps)
        return x, self.output(x)


class GroupedVocabulary:
    """Scores of the tokens in the best groups of a vocabulary."""

    def __init__(self, head: AssistantHead, make_linear: LinearFactory = plain_linear) -> None:
        groups = head.config.centroids
        assert groups is not None
        self.chosen = groups.chosen
        self.centroids = make_linear(head.masked_embedding.centroids.weight, None)
        # [C, S]
        self.tokens = head.masked_embedding.token_ordering.view(groups.count, -1)
        # [C, S, H]: the rows of a group are read together.
        self.embeddings = head.embed_tokens.weight[self.tokens]

    @property
    def row_size(self) -> int:
        """Numbers that are read for one row."""
        return self.chosen * self.embeddings[0].numel()

    def likeliest(self, hidden: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the likeliest tokens after states [T, H] and their log-probabilities, see
        `HeadDrafter.likeliest`. Tokens of other groups have probability 0."""
        groups = self.centroids(hidden).topk(self.chosen).indices
        scores = torch.einsum("th,tgsh->tgs", hidden, self.embeddings[groups]).flatten(1)
        found, log_probs = top_candidates(scores, width)
        return self.tokens[groups].flatten(1).gather(1, found), log_probs
