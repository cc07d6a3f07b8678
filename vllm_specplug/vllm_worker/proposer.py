# SPDX-License-Identifier: Apache-2.0
"""The class that vLLM's `custom_class` instantiates: it connects the runner to a drafter."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed import (
    get_pp_group,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
)
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

from vllm_specplug.drafting.caches import DRAFT_LAYERS
from vllm_specplug.drafting.drafter import DrafterOptions, TargetWeights
from vllm_specplug.drafting.target_head import TargetHead
from vllm_specplug.registry import get_method, headless_methods
from vllm_specplug.vllm_attention.layer_support import check_target_layers
from vllm_specplug.vllm_worker.memory.draft_cache import DraftKVLayer
from vllm_specplug.vllm_worker.target.linear import draft_linear, expert_products
from vllm_specplug.vllm_worker.target.state_layers import StateLayers, prepare_state_layers
from vllm_specplug.vllm_worker.target.weight_updates import kept_asleep

if TYPE_CHECKING:
    from vllm_specplug.drafting.drafter import Drafter

# Number of unit vectors that a quantised LM head scores at once.
_UNIT_ROWS = 256


class DrafterHost:
    """Owns the method's drafter and the cache layers it needs in vLLM's pages."""

    def __init__(self, vllm_config: Any) -> None:
        spec = vllm_config.speculative_config
        self.vllm_config = vllm_config
        self.options = DrafterOptions(
            head_path=spec.head_path,
            num_nodes=spec.num_speculative_tokens,
            tree_depth=spec.draft_depth,
            max_depth=spec.tree_depth or spec.num_speculative_tokens,
            tree_width=spec.tree_width,
            ngram_topk=spec.ngram_topk,
            max_model_len=vllm_config.model_config.max_model_len,
            settings=spec.plan.settings,
            vocab_size=vllm_config.model_config.get_vocab_size(),
        )
        method = get_method(str(spec.plugin_method))
        self.drafter: Drafter = method.load_drafter(spec.plan)(self.options)
        # The target's embedding and LM head, each None if another pipeline stage has it. None if
        # the drafter reads neither.
        self.tables: tuple[torch.nn.Module | None, torch.nn.Module | None] | None = None
        self.heads: list[TargetHead] = []
        self.cache_layers: list[DraftKVLayer] = []
        self.state_layers = StateLayers()

    def load_model(self, target_model: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        """Checks the target's layers, loads the head and registers one paged cache per draft layer
        with vLLM. Only the last pipeline stage loads the head."""
        model_config = self.vllm_config.model_config
        method = self.vllm_config.speculative_config.plugin_method
        layers = self.vllm_config.compilation_config.static_forward_context
        self.state_layers = prepare_state_layers(layers, method)
        check_target_layers(layers, method, ignored=(DraftKVLayer, MambaBase))
        if model_config.use_mla and self.vllm_config.device_config.device_type == "cpu":
            # Imported here: other targets do not need these classes of vLLM.
            from vllm_specplug.vllm_worker.target.latent_layers import (
                check_compiled_routing,
                check_latent_rotary,
            )

            check_latent_rotary(target_model, method)
            if not model_config.enforce_eager:
                check_compiled_routing(target_model, method)
        _check_forward(target_model, method)
        if self.drafter.reads_target_weights:
            self.tables = vocabulary_tables(target_model, model_config, method)
        if not get_pp_group().is_last_rank:
            self._exchange_embedding()
            return
        with kept_asleep(model_config):
            target = self._target_weights()
            self.drafter.load(target)
        self.heads = target.heads
        # Weak: heads with their own embedding drop the target's.
        self._embed_tokens = weakref.ref(target.embed_tokens)
        self.cache_layers = [
            DraftKVLayer(self.vllm_config, f"{DRAFT_LAYERS}.{i}.attn", spec)
            for i, spec in enumerate(self.drafter.cache_specs())
        ]

    def _target_weights(self) -> TargetWeights:
        config = self.vllm_config.model_config
        lm_head = torch.empty(0)
        if self.tables is not None and self.tables[1] is not None:
            lm_head = full_vocab_weight(self.tables[1], config)
        return TargetWeights(
            embed_tokens=self._exchange_embedding(),
            lm_head=lm_head,
            dtype=config.dtype,
            device=torch.device(self.vllm_config.device_config.device),
            text_config=config.hf_text_config,
            make_linear=draft_linear(
                self.vllm_config.speculative_config.draft_weights, config.dtype
            ),
            multiply_experts=expert_products(),
        )

    def _exchange_embedding(self) -> torch.Tensor:
        """Returns the target's token embedding [V, H]; empty if the drafter reads none, and on
        middle pipeline stages.

        The first stage sends it to the last stage, so both must call this method.
        """
        if self.tables is None:
            return torch.empty(0)
        config, pp = self.vllm_config.model_config, get_pp_group()
        if pp.is_first_rank:
            assert self.tables[0] is not None
            weight = full_vocab_weight(self.tables[0], config).to(config.dtype)
            if pp.world_size > 1:
                pp.send(weight.contiguous(), pp.world_size - 1)
            return weight
        if not pp.is_last_rank:
            return torch.empty(0)
        size = config.get_vocab_size(), config.hf_text_config.hidden_size
        return pp.recv(torch.Size(size), config.dtype, 0)

    @torch.inference_mode()
    def follow_target(self) -> None:
        """Updates what the drafter copied from the target's weights, which vLLM has replaced."""
        if self.tables is None:
            return
        if not get_pp_group().is_last_rank:
            self._exchange_embedding()
            return
        target, embed_tokens = self._target_weights(), self._embed_tokens()
        if embed_tokens is not None:
            embed_tokens.copy_(target.embed_tokens)
        for head in self.heads:
            head.follow_target(target.lm_head)
        self.drafter.follow_target(target)

    def propose(self, *args: Any, **kwargs: Any) -> list[list[int]]:
        """Never called: vLLM requires the method, and the runner mixin drafts itself."""
        raise AssertionError("the tree runner overrides propose_draft_token_ids")


def _check_forward(model: torch.nn.Module, method: str) -> None:
    """Refuses a target whose forward reads neighbouring rows outside of attention, or whose rows
    depend on more than their token and position."""
    depth = getattr(model, "token_lookback_depth", 0)
    # V2 reads this attribute before it takes its own model state.
    own_state = getattr(model, "get_model_state_cls", None)
    if depth:
        reason = (
            f"it reads the {depth} tokens before each row (token_lookback_depth={depth}), and in a "
            "tree those are not a node's ancestors"
        )
    elif own_state is not None:
        reason = (
            f"its inputs are made by a class of its own, {own_state().__name__}, which may take "
            "the rows of a request for consecutive tokens, and in a tree they are not"
        )
    elif getattr(model, "supports_realtime", False):
        reason = (
            "vLLM may add embeddings to the tokens that it decodes, row by row "
            "(supports_realtime), and a node's depth is not its row"
        )
    else:
        return
    raise ValueError(
        f"Speculative method {method!r} cannot verify trees in {type(model).__name__}: {reason}. "
        "Use another target, or a chain method of vLLM's own."
    )


def vocabulary_tables(
    model: torch.nn.Module, model_config: Any, method: str
) -> tuple[torch.nn.Module | None, torch.nn.Module | None]:
    """Returns the target's token embedding and LM head, both of V tokens by H. An entry is None if
    another pipeline stage has that module.

    It finds them by shape, whatever their names, quantised or not.

    Raises:
        ValueError: when there is none, or more than one.
    """
    hidden = model_config.hf_text_config.hidden_size
    vocab_size = model_config.get_vocab_size()
    inputs: list[torch.nn.Module] = []
    outputs: list[torch.nn.Module] = []
    for module in model.modules():
        if not isinstance(module, VocabParallelEmbedding) or module.org_vocab_size < vocab_size:
            continue
        # By the layer's sizes, not its weight: a quantised weight has another shape, and a model
        # whose LM head is overlooked would pass for a tied one.
        if module.embedding_dim == hidden:
            (outputs if isinstance(module, ParallelLMHead) else inputs).append(module)
    pp = get_pp_group()
    tables: list[torch.nn.Module | None] = []
    # Tied models have no LM head, or one that shares the embedding's weight.
    for what, found, is_here in (
        ("token embedding", inputs, pp.is_first_rank),
        ("LM head", outputs or inputs, pp.is_last_rank),
    ):
        if is_here and len(found) != 1:
            raise ValueError(
                f"Speculative method {method!r} needs the target's {what}, and "
                f"{type(model).__name__} has {len(found)} of {vocab_size} tokens "
                f"by hidden_size={hidden}; needed: exactly 1. Use another target, or a method "
                f"without a head: {', '.join(headless_methods())}."
            )
        tables.append(found[0] if is_here else None)
    return tables[0], tables[1]


def full_vocab_weight(module: Any, model_config: Any) -> torch.Tensor:
    """Returns the weight [V, H] of a vocabulary-parallel embedding or head, gathered from all
    ranks."""
    weight = dense_weight(module, model_config.dtype)
    if get_tensor_model_parallel_world_size() > 1:
        weight = tensor_model_parallel_all_gather(weight, dim=0)
    return weight[: model_config.get_vocab_size()]


@torch.inference_mode()
def dense_weight(module: Any, dtype: torch.dtype) -> torch.Tensor:
    """Returns this rank's rows [V, H] of an embedding or head.

    It reads a quantised layer through the layer's own computation, whatever the scheme: a head's
    scores of the unit vectors are its columns, and an embedding's lookups are its rows.
    """
    weight = getattr(module, "weight", None)
    shape = (module.num_embeddings_per_partition, module.embedding_dim)
    if weight is not None and weight.is_floating_point() and tuple(weight.shape) == shape:
        plain = isinstance(module.quant_method, UnquantizedEmbeddingMethod)
        # An fp8 weight has the same shape, but needs its scales.
        if plain or weight.dtype == dtype:
            return weight.data
    device = next(iter([*module.parameters(), *module.buffers()])).device
    method = module.quant_method
    if isinstance(module, ParallelLMHead):
        # In parts: schemes that quantise their inputs copy them.
        units = torch.eye(module.embedding_dim, dtype=dtype, device=device).split(_UNIT_ROWS)
        return torch.cat([method.apply(module, part) for part in units]).t().contiguous()
    return method.embedding(module, torch.arange(shape[0], device=device)).to(dtype)
