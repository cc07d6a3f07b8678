# SPDX-License-Identifier: Apache-2.0
"""What vLLM's `custom_class` instantiates: the bridge from the runner to a drafter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size, tensor_model_parallel_all_gather

from vllm_specplug.drafters.base import DrafterOptions, TargetWeights
from vllm_specplug.methods import load_drafter_class
from vllm_specplug.runtime.draft_cache import DraftKVLayer
from vllm_specplug.runtime.linear import packed_linear

if TYPE_CHECKING:
    from vllm_specplug.drafters.base import Drafter


class TreeProposer:
    """Owns the method's drafter and the cache layers it needs in vLLM's pages."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        spec = vllm_config.speculative_config
        self.vllm_config = vllm_config
        self.options = DrafterOptions(
            head_path=spec.head_path,
            num_nodes=spec.num_speculative_tokens,
            tree_depth=spec.draft_depth,
            max_depth=spec.tree_depth or spec.num_speculative_tokens,
            tree_width=spec.tree_width,
            tree_builder=spec.tree_builder,
            hybrid_lambda=spec.hybrid_lambda,
            causal=spec.causal,
            ngram_topk=spec.ngram_topk,
            max_model_len=vllm_config.model_config.max_model_len,
            local_head=spec.local_options,
            beam_widths=tuple(spec.beam_widths) if spec.beam_widths else None,
            window_size=spec.window_size,
            self_draft=spec.self_draft,
            ngram_size=spec.ngram_size,
        )
        self.drafter: Drafter = load_drafter_class(str(spec.plugin_method))(self.options)
        self.cache_layers: list[DraftKVLayer] = []

    def load_model(self, target_model: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        """Loads the head and registers one paged cache per draft layer with vLLM."""
        model_config = self.vllm_config.model_config
        self.drafter.load(
            TargetWeights(
                embed_tokens=_full_vocab_weight(_input_embeddings(target_model), model_config),
                lm_head=_full_vocab_weight(_output_embeddings(target_model), model_config),
                dtype=model_config.dtype,
                device=torch.device(self.vllm_config.device_config.device),
                text_config=model_config.hf_text_config,
                make_linear=packed_linear,
            )
        )
        self.cache_layers = [
            DraftKVLayer(self.vllm_config, f"specplug.draft.layers.{i}.attn", spec)
            for i, spec in enumerate(self.drafter.cache_specs())
        ]

    def propose(self, *args: Any, **kwargs: Any) -> list[list[int]]:
        """Only there because vLLM insists on it; the runner mixin drafts on its own."""
        raise AssertionError("the tree runner overrides propose_draft_token_ids")


def _input_embeddings(model: torch.nn.Module) -> torch.nn.Module:
    return (
        model.get_input_embeddings()
        if hasattr(model, "get_input_embeddings")
        else (model.model.embed_tokens)
    )


def _output_embeddings(model: torch.nn.Module) -> torch.nn.Module:
    return model.lm_head


def _full_vocab_weight(module: Any, model_config: Any) -> torch.Tensor:
    """[V, H] of a vocabulary-parallel embedding or head, gathered from all ranks."""
    weight = module.weight.data
    if get_tensor_model_parallel_world_size() > 1:
        weight = tensor_model_parallel_all_gather(weight, dim=0)
    return weight[: model_config.get_vocab_size()]
