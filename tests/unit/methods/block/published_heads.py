# SPDX-License-Identifier: Apache-2.0
"""Heads with published configs and names, random weights, ready to draft without an engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.unit.drafters import load_drafter, requests_of
from tests.unit.methods.block.dense_cache import DenseCache, committed
from tests.unit.methods.block.published import MODELOPT_NAMES, TINY_TARGET
from tests.unit.methods.block.reference import block_hidden, layer_config
from vllm_specplug.drafting.method import Method, TargetInfo
from vllm_specplug.drafting.requests import DraftRequests

CONTEXT = 9
ANCHOR = 7


class Shared:
    """Options that every method has."""

    def __init__(self, model: Path, nodes: int, width: int) -> None:
        self.model, self.num_speculative_tokens, self.tree_width = str(model), nodes, width
        self.tree_depth, self.ngram_topk = None, 0


class PublishedHead:
    """A head in the layout of a published `config`, its target's tables, and a context."""

    def __init__(self, folder: Path, config: dict[str, Any], *, tables: bool = False) -> None:
        self.folder, self.raw = folder, config
        layer = layer_config(config)
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        hidden, width, vocab = (
            layer[name] for name in ("hidden_size", "intermediate_size", "vocab_size")
        )
        size = layer["head_dim"]
        heads, kv_heads = layer["num_attention_heads"] * size, layer["num_key_value_heads"] * size
        inner = config.get("dflash_config") or {}
        own = {**config, **inner, **(config.get("dspark_config") or {})}
        self.layers = len(
            inner.get("target_layer_ids")
            or config.get("target_layer_ids")
            or config["aux_hidden_state_layer_ids"]
        )
        self.tensors = {
            "fc.weight": random(hidden, self.layers * hidden) * 0.2,
            "hidden_norm.weight": random(hidden),
            "norm.weight": random(hidden),
        }
        for i in range(layer["num_hidden_layers"]):
            shapes = {
                "self_attn.q_proj": (heads, hidden), "self_attn.k_proj": (kv_heads, hidden),
                "self_attn.v_proj": (kv_heads, hidden), "self_attn.o_proj": (hidden, heads),
                "self_attn.q_norm": (size,), "self_attn.k_norm": (size,),
                "mlp.gate_proj": (width, hidden), "mlp.up_proj": (width, hidden),
                "mlp.down_proj": (hidden, width), "input_layernorm": (hidden,),
                "post_attention_layernorm": (hidden,),
            }  # fmt: skip
            for name, shape in shapes.items():
                self.tensors[f"layers.{i}.{name}.weight"] = random(*shape) * 0.5
            for name in ("attention_conv", "mlp_conv") if own.get("conv_kernel_size") else ():
                taps, groups = own["conv_kernel_size"], hidden // own["conv_group_size"]
                conv = f"layers.{i}.{name}."
                self.tensors[conv + "base_kernel"] = random(2, taps, hidden)
                projection = random(2 * taps * groups, hidden) * 0.2
                self.tensors[conv + "kernel_projection.weight"] = projection
        self.draft_vocab = config.get("draft_vocab_size") or vocab
        if selector := own.get("selector_rank"):
            for name in ("predecessor", "successor"):
                self.tensors[f"candidate_selector.{name}_codebook"] = random(vocab, selector)
            projection = random(selector, hidden) * 0.3
            self.tensors["candidate_selector.hidden_projection.weight"] = projection
        rank = own.get("markov_rank") or 0
        if rank:
            self.tensors["markov_head.markov_w1.weight"] = random(vocab, rank)
            self.tensors["markov_head.markov_w2.weight"] = random(self.draft_vocab, rank)
        # Model-Optimizer's head reads the Markov row whatever else is said.
        flat = bool(own.get("use_confidence_head"))
        if flat or own.get("enable_confidence_head"):
            inputs = hidden + (rank if flat or own["confidence_head_with_markov"] else 0)
            self.tensors["confidence_head.proj.weight"] = random(1, inputs)
            self.tensors["confidence_head.proj.bias"] = random(1)
        self.target_ids = torch.arange(vocab)
        if self.draft_vocab < vocab:
            self.target_ids = torch.randperm(vocab, generator=generator)[: self.draft_vocab]
            self.target_ids = self.target_ids.sort().values
            self.tensors["d2t"] = self.target_ids - torch.arange(self.draft_vocab)
        self.embed, self.lm_head = random(vocab, hidden), random(vocab, hidden)
        if tables:
            self.tensors["embed_tokens.weight"] = self.embed
            self.tensors["lm_head.weight"] = self.lm_head[self.target_ids]
        self.mask = inner.get("mask_token_id", config.get("mask_token_id"))
        self.context = random(CONTEXT, self.layers * hidden)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        names = MODELOPT_NAMES if flat else {}
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
            method.load_drafter(), plan.head_path, plan.settings, self.lm_head, self.embed,
            TINY_TARGET, num_nodes=24, tree_depth=plan.depth, max_depth=24,
        )  # fmt: skip
        drafter.bind_cache(DenseCache([spec.window for spec in drafter.cache_specs()]))
        drafter.observe(committed(self.context, self.layers))
        return drafter, requests_of([[1] * CONTEXT + [ANCHOR]], 24, 4, plan.depth)
