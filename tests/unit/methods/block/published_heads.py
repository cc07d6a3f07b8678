# SPDX-License-Identifier: Apache-2.0
"""Heads with published configs and names, random weights, ready to draft without an engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.unit.dense_trees import DenseCache
from tests.unit.drafters import load_drafter, requests_of
from tests.unit.methods.block.published import MODELOPT_NAMES, TINY_TARGET
from tests.unit.methods.block.reference import block_hidden, layer_config
from vllm_specplug.drafting.committed_tokens import CommittedTokens
from vllm_specplug.drafting.method import Method, TargetInfo
from vllm_specplug.drafting.requests import DraftRequests

CONTEXT = 9
ANCHOR = 7


class Shared:
    """Options that every method has."""

    def __init__(self, model: Path, nodes: int, width: int) -> None:
        self.model, self.num_speculative_tokens, self.tree_width = str(model), nodes, width
        self.tree_depth, self.ngram_topk = None, 0


def settings_of(config: dict[str, Any]) -> dict[str, Any]:
    """Everything that a config says beside its layers' sizes, whichever container says it."""
    settings = dict(config)
    for name in ("dflash_config", "dspark_config", "domino_config"):
        settings.update(config.get(name) or {})
    return settings


def num_target_layers(config: dict[str, Any]) -> int:
    """How many of the target's layers the head reads."""
    ids = settings_of(config).get("target_layer_ids") or config["aux_hidden_state_layer_ids"]
    return len(ids)


def head_shapes(config: dict[str, Any], *, tables: bool = False) -> dict[str, tuple[int, ...]]:
    """Shapes of a head's floating-point tensors by the names that most trainers write.

    Args:
        tables: whether the head ships the embedding and the LM head.
    """
    layer, own = layer_config(config), settings_of(config)
    hidden, width, vocab = (layer[n] for n in ("hidden_size", "intermediate_size", "vocab_size"))
    size = layer["head_dim"]
    heads, kv_heads = layer["num_attention_heads"] * size, layer["num_key_value_heads"] * size
    draft_vocab = config.get("draft_vocab_size") or vocab
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, num_target_layers(config) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for i in range(layer["num_hidden_layers"]):
        parts = {
            "self_attn.q_proj": (heads, hidden), "self_attn.k_proj": (kv_heads, hidden),
            "self_attn.v_proj": (kv_heads, hidden), "self_attn.o_proj": (hidden, heads),
            "self_attn.q_norm": (size,), "self_attn.k_norm": (size,),
            "mlp.gate_proj": (width, hidden), "mlp.up_proj": (width, hidden),
            "mlp.down_proj": (hidden, width), "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }  # fmt: skip
        shapes |= {f"layers.{i}.{name}.weight": shape for name, shape in parts.items()}
        for name in ("attention_conv", "mlp_conv") if own.get("conv_kernel_size") else ():
            taps, groups = own["conv_kernel_size"], hidden // own["conv_group_size"]
            shapes[f"layers.{i}.{name}.base_kernel"] = (2, taps, hidden)
            shapes[f"layers.{i}.{name}.kernel_projection.weight"] = (2 * taps * groups, hidden)
    if rank := own.get("selector_rank"):
        for name in ("predecessor", "successor"):
            shapes[f"candidate_selector.{name}_codebook"] = (vocab, rank)
        shapes["candidate_selector.hidden_projection.weight"] = (rank, hidden)
    rank = own.get("markov_rank") or 0
    if rank:
        shapes["markov_head.markov_w1.weight"] = (vocab, rank)
        shapes["markov_head.markov_w2.weight"] = (draft_vocab, rank)
        if (kind := own["markov_head_type"]) != "vanilla":
            name, rows, columns = {"gated": ("gate", 1, 1), "rnn": ("joint", 3, 2)}[kind]
            layer = f"markov_head.{name}_proj"
            shapes[f"{layer}.weight"] = (rows * rank, columns * rank + hidden)
            shapes[f"{layer}.bias"] = (rows * rank,)
    if own.get("projector_type") == "domino":
        state, rank = own["gru_hidden_dim"], own["emb_dim"]
        shapes["prefix_gru.weight_ih_l0"] = (3 * state, hidden)
        shapes["prefix_gru.weight_hh_l0"] = (3 * state, state)
        shapes["embed_proj.0.weight"] = (rank, hidden + state)
        shapes["embed_proj.2.weight"] = (draft_vocab, rank)
        rank = 0
    # Model-Optimizer's head reads the Markov row whatever else is said.
    flat = bool(own.get("use_confidence_head"))
    if flat or own.get("enable_confidence_head"):
        inputs = hidden + (rank if flat or own["confidence_head_with_markov"] else 0)
        shapes["confidence_head.proj.weight"] = (1, inputs)
        shapes["confidence_head.proj.bias"] = (1,)
    if tables:
        shapes["embed_tokens.weight"] = (vocab, hidden)
        shapes["lm_head.weight"] = (draft_vocab, hidden)
    return shapes


def _scale(name: str) -> float:
    """Keeps the activations of a random head in a range where its drafts differ."""
    if name.startswith("layers.") and "_conv." not in name:
        return 0.5
    if name == "candidate_selector.hidden_projection.weight":
        return 0.3
    if name.startswith(("markov_head.joint", "markov_head.gate", "prefix_gru.", "embed_proj.0.")):
        return 0.4
    return 0.2 if name == "fc.weight" or name.endswith("kernel_projection.weight") else 1.0


class PublishedHead:
    """A head in the layout of a published `config`, its target's tables, and a context."""

    def __init__(self, folder: Path, config: dict[str, Any], *, tables: bool = False) -> None:
        self.folder, self.raw = folder, config
        layer, own = layer_config(config), settings_of(config)
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        hidden, vocab = layer["hidden_size"], layer["vocab_size"]
        self.layers = num_target_layers(config)
        self.tensors = {
            name: random(*shape) * _scale(name) for name, shape in head_shapes(config).items()
        }
        self.draft_vocab = config.get("draft_vocab_size") or vocab
        self.target_ids = torch.arange(vocab)
        if self.draft_vocab < vocab:
            self.target_ids = torch.randperm(vocab, generator=generator)[: self.draft_vocab]
            self.target_ids = self.target_ids.sort().values
            self.tensors["d2t"] = self.target_ids - torch.arange(self.draft_vocab)
        self.embed, self.lm_head = random(vocab, hidden), random(vocab, hidden)
        if tables:
            self.tensors["embed_tokens.weight"] = self.embed
            self.tensors["lm_head.weight"] = self.lm_head[self.target_ids]
        self.mask = own.get("mask_token_id")
        self.context = random(CONTEXT, self.layers * hidden)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        names = MODELOPT_NAMES if own.get("use_confidence_head") else {}
        self.written = {names.get(name, name): tensor for name, tensor in self.tensors.items()}
        save_file(self.written, folder / "model.safetensors")

    def hidden(self, *, first: int, causal: bool, **masks: Any) -> torch.Tensor:
        """The block's states [D, H] by the published equations; slot `first` gives depth 1."""
        slots = torch.stack([self.embed[ANCHOR]] + [self.embed[self.mask]] * 4)
        hidden = block_hidden(self.raw, self.tensors, self.context, slots, causal=causal, **masks)
        return hidden[first:]

    def logits(self, *, first: int, causal: bool, **masks: Any) -> torch.Tensor:
        """The block's scores [D, V'] of these states."""
        hidden = self.hidden(first=first, causal=causal, **masks)
        return hidden @ self.lm_head[self.target_ids].double().T

    def drafter(self, method: Method, **options: Any) -> tuple[Any, DraftRequests]:
        """The method's drafter after its own checks, with the context observed, and a request."""
        shared = Shared(self.folder, 24, 4)
        plan = method.parse_options(options).resolve(
            method.name, shared, TargetInfo(TINY_TARGET, 64, None)
        )
        assert len(plan.hidden_layers) == self.layers
        drafter = load_drafter(
            method.load_drafter(plan), plan.head_path, plan.settings, self.lm_head, self.embed,
            TINY_TARGET, num_nodes=24, tree_depth=plan.depth, max_depth=24,
        )  # fmt: skip
        drafter.bind_cache(DenseCache(drafter.cache_specs()))
        at = torch.arange(CONTEXT)
        drafter.observe(CommittedTokens(list(self.context.chunk(self.layers, -1)), at, at, at))
        return drafter, requests_of([[1] * CONTEXT + [ANCHOR]], 24, 4, plan.depth)
