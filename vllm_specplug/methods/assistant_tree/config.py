# SPDX-License-Identifier: Apache-2.0
"""Shape of an assistant, from its `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_specplug.drafting.caches import TargetCacheSpec
from vllm_specplug.drafting.checkpoint_files import is_positive, open_config
from vllm_specplug.drafting.head_config import (
    OTHER_TARGET,
    check_target,
    config_field,
    require,
    require_only,
    required_size,
)
from vllm_specplug.methods.block.rotary import Rotary

MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
_FULL, _SLIDING = "full_attention", "sliding_attention"
_ROTARY_KINDS = ("default", "proportional")
MAX_LAYERS = 64


@dataclass(frozen=True)
class AssistantLayer:
    """One layer: the target's cache that it attends, and its rotary embedding."""

    cache: TargetCacheSpec
    rotary: Rotary


@dataclass(frozen=True)
class Centroids:
    """Groups of equal size that divide the vocabulary. A row scores only the tokens of its `chosen`
    best groups."""

    count: int
    chosen: int


@dataclass(frozen=True)
class AssistantConfig:
    """Shape of an assistant.

    `target_hidden_size` is the size of the target's embeddings and states. Without `centroids` a
    row scores the whole vocabulary.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    vocab_size: int
    target_hidden_size: int
    rms_norm_eps: float
    layers: tuple[AssistantLayer, ...]
    centroids: Centroids | None

    @property
    def scored_tokens(self) -> int:
        """Number of tokens that a row scores."""
        if self.centroids is None:
            return self.vocab_size
        return self.vocab_size // self.centroids.count * self.centroids.chosen

    @classmethod
    def from_pretrained(cls, directory: str | Path) -> AssistantConfig:
        """Reads `directory/config.json`.

        Raises:
            ValueError: for fields without support or with illegal values.
        """
        with open_config(directory) as raw:
            return cls.from_dict(raw)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> AssistantConfig:
        """Returns the config from a parsed `config.json`."""
        kind, text = raw.get("model_type"), raw.get("text_config")
        require(kind in MODEL_TYPES, "model_type", kind, " or ".join(MODEL_TYPES))
        require(isinstance(text, Mapping), "text_config", text, "an object")
        assert isinstance(text, Mapping)
        require_only(
            text,
            hidden_activation="gelu_pytorch_tanh",
            attention_bias=False,
            final_logit_softcapping=None,
            attn_logit_softcapping=None,
            enable_moe_block=False,
            use_double_wide_mlp=False,
            hidden_size_per_layer_input=0,
        )
        require_only(raw, tie_word_embeddings=True)
        # "vision" concerns images, which a draft does not see.
        name = "use_bidirectional_attention"
        require(text.get(name) in (None, "vision"), name, text.get(name), "absent or 'vision'")
        eps, vocab = text.get("rms_norm_eps", 1e-6), required_size(text, "vocab_size")
        require(is_positive(eps), "rms_norm_eps", eps, "a positive number")
        return cls(
            hidden_size=required_size(text, "hidden_size"),
            intermediate_size=required_size(text, "intermediate_size"),
            num_attention_heads=required_size(text, "num_attention_heads"),
            vocab_size=vocab,
            target_hidden_size=required_size(raw, "backbone_hidden_size"),
            rms_norm_eps=eps,
            layers=_layers(text),
            centroids=_centroids(raw, vocab) if raw.get("use_ordered_embeddings") else None,
        )

    def check_target(self, target: Any) -> None:
        """Raises ValueError unless the target has the assistant's state size, vocabulary, windows
        and numbers of KV heads. The shapes of its caches are checked once they exist."""
        check_target(self, target)
        kv_heads = _kv_heads(target)
        legal = config_field(target, "sliding_window", None)
        for layer in self.layers:
            if layer.cache.window not in (None, legal):
                raise ValueError(
                    f"draft head config: sliding_window = {layer.cache.window}, legal: {legal} "
                    f"(the target's); {OTHER_TARGET}"
                )
            # Ranks with a copy of a head cannot tell the number from their caches.
            kind, heads = _SLIDING if layer.cache.window else _FULL, layer.cache.num_kv_heads
            if kv_heads.get(kind, heads) != heads:
                raise ValueError(
                    f"draft head config: num_key_value_heads = {heads} in layers of {kind}, legal: "
                    f"{kv_heads[kind]} (the target's); {OTHER_TARGET}"
                )


def _kv_heads(target: Any) -> dict[str, int]:
    """Returns the number of KV heads of the last layer of each kind that has keys of its own."""
    layers = config_field(target, "per_layer_config", None) or ()
    shared = config_field(target, "num_kv_shared_layers", None) or 0
    kinds = config_field(target, "layer_types", None) or ()
    pairs = list(zip(kinds, layers, strict=False))
    return {kind: layer.num_key_value_heads for kind, layer in pairs[: len(pairs) - shared]}


def _layers(text: Mapping[str, Any]) -> tuple[AssistantLayer, ...]:
    count = required_size(text, "num_hidden_layers", MAX_LAYERS)
    kinds = text.get("layer_types")
    require(
        isinstance(kinds, list)
        and len(kinds) == count
        and all(kind in (_FULL, _SLIDING) for kind in kinds),
        "layer_types",
        kinds,
        f"{_FULL} or {_SLIDING} for each of the {count} layers",
    )
    assert isinstance(kinds, list)
    return tuple(_layer(text, i, kind) for i, kind in enumerate(kinds))


def _layer(text: Mapping[str, Any], index: int, kind: str) -> AssistantLayer:
    shape = {**text, **_own_shape(text, index, kind)}
    heads, kv_heads = (
        required_size(shape, name) for name in ("num_attention_heads", "num_key_value_heads")
    )
    legal = f"a divisor of num_attention_heads = {heads}"
    require(heads % kv_heads == 0, f"num_key_value_heads of layer {index}", kv_heads, legal)
    dim = required_size(shape, "head_dim")
    require(dim % 2 == 0, f"head_dim of layer {index}", dim, "an even number")
    window = None if kind == _FULL else required_size(text, "sliding_window")
    return AssistantLayer(
        # Gemma 4 does not scale scores.
        TargetCacheSpec(kv_heads, dim, scale=1.0, window=window),
        _rotary(text, kind, dim),
    )


def _own_shape(text: Mapping[str, Any], index: int, kind: str) -> Mapping[str, Any]:
    """Returns the layer's own `head_dim` and `num_key_value_heads` where they differ from the text
    config's."""
    by_layer = text.get("per_layer_config")
    if by_layer is not None:
        require(isinstance(by_layer, Mapping), "per_layer_config", by_layer, "an object")
        own = by_layer.get(str(index), {})
        require(isinstance(own, Mapping), f"per_layer_config.{index}", own, "an object")
        return own
    if kind != _FULL:
        return {}
    own = {"head_dim": required_size(text, "global_head_dim")}
    if text.get("attention_k_eq_v") and text.get("num_global_key_value_heads") is not None:
        own["num_key_value_heads"] = text["num_global_key_value_heads"]
    return own


def _rotary(text: Mapping[str, Any], kind: str, dim: int) -> Rotary:
    parameters = text.get("rope_parameters")
    rope = parameters.get(kind) if isinstance(parameters, Mapping) else None
    name = f"rope_parameters.{kind}"
    require(isinstance(rope, Mapping), name, rope, "an object")
    assert isinstance(rope, Mapping)
    theta, factor = rope.get("rope_theta"), rope.get("partial_rotary_factor", 1.0)
    require(is_positive(theta), f"{name}.rope_theta", theta, "a positive number")
    rope_kind = rope.get("rope_type", "default")
    require(rope_kind in _ROTARY_KINDS, f"{name}.rope_type", rope_kind, " or ".join(_ROTARY_KINDS))
    require_only(rope, factor=1.0)
    proportional = rope_kind == "proportional"
    require(
        is_positive(factor) and factor <= 1 and (proportional or factor == 1),
        f"{name}.partial_rotary_factor",
        factor,
        "a number up to 1 (1 for rope_type default)",
    )
    rotary = Rotary(
        float(theta),  # type: ignore[arg-type]  # checked
        dim,
        dim,
        rope_kind,
        {"partial_rotary_factor": factor} if proportional else None,
    )
    rotary.check()
    return rotary


def _centroids(raw: Mapping[str, Any], vocab: int) -> Centroids:
    count = required_size(raw, "num_centroids")
    legal = f"a divisor of vocab_size = {vocab}"
    require(vocab % count == 0, "num_centroids", count, legal)
    return Centroids(count, required_size(raw, "centroid_intermediate_top_k", count))
