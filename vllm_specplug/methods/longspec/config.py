# SPDX-License-Identifier: Apache-2.0
"""Configuration of a LongSpec draft layer, from its `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from vllm_specplug.drafting.checkpoint_files import open_config
from vllm_specplug.drafting.head_config import (
    OTHER_TARGET,
    check_layer_shape,
    config_field,
    require,
)
from vllm_specplug.methods.block.layer_config import read_rotary
from vllm_specplug.methods.block.rotary import Rotary
from vllm_specplug.options import is_integer

DEFAULT_WINDOW = 512
MAX_WINDOW = 65536
# Fields that must be the target's.
_OF_TARGET = (
    "hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "rope_theta", "rope_scaling",
)  # fmt: skip


@dataclass(frozen=True)
class LongSpecConfig:
    """Shape of one LongSpec draft layer.

    The layer reads the cached keys of the target's last layer, so heads, head size and rotary
    embedding are the target's. `rope_theta` and `rope_scaling` describe that rotary embedding;
    `rope_scaling` is None for the default. `window_size` is the number of tokens before a query
    that its self-attention reads. `final_norm` says that there is a norm before the LM head
    (published heads have none).
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    window_size: int = DEFAULT_WINDOW
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    attention_bias: bool = True
    final_norm: bool = False

    def __post_init__(self) -> None:
        check_layer_shape(self)
        check_window("draft head config: window_size", self.window_size)
        self.rotary.check()

    @property
    def rotary(self) -> Rotary:
        """The target's rotary embedding."""
        scaling = dict(self.rope_scaling or {})
        kind = scaling.pop("rope_type", "default")
        return Rotary(self.rope_theta, self.head_dim, self.head_dim, kind, scaling or None)

    @classmethod
    def for_target(
        cls,
        target: Any,
        *,
        window_size: int = DEFAULT_WINDOW,
        draft_vocab_size: int | None = None,
        intermediate_size: int | None = None,
        final_norm: bool = True,
    ) -> LongSpecConfig:
        """Returns the shape of a layer for a target's config (an object or a mapping)."""
        hidden = config_field(target, "hidden_size")
        heads = config_field(target, "num_attention_heads")
        theta, scaling = rotary_of(target)
        vocab = config_field(target, "vocab_size")
        return cls(
            hidden_size=hidden,
            intermediate_size=intermediate_size or config_field(target, "intermediate_size"),
            num_attention_heads=heads,
            num_key_value_heads=config_field(target, "num_key_value_heads", None) or heads,
            head_dim=config_field(target, "head_dim", None) or hidden // heads,
            vocab_size=vocab,
            draft_vocab_size=draft_vocab_size or vocab,
            window_size=window_size,
            rms_norm_eps=config_field(target, "rms_norm_eps", 1e-5),
            rope_theta=theta,
            rope_scaling=scaling,
            final_norm=final_norm,
        )

    @classmethod
    def from_pretrained(cls, directory: str | Path) -> LongSpecConfig:
        """Reads `directory/config.json`: this project's keys, or a one-layer target-like config.

        Raises:
            ValueError: field, value, legal values and remedy.
        """
        with open_config(directory) as raw:
            for name in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"):
                require(isinstance(raw.get(name), int), name, raw.get(name), "an integer")
            layers = raw.get("num_hidden_layers", 1)
            require(layers == 1, "num_hidden_layers", layers, "1 (LongSpec drafts with one layer)")
            return cls.for_target(
                raw,
                window_size=raw.get("window_size", raw.get("sliding_window") or DEFAULT_WINDOW),
                draft_vocab_size=raw.get("draft_vocab_size"),
                final_norm=bool(raw.get("final_norm", False)),
            )

    def to_dict(self) -> dict[str, Any]:
        """Returns a `config.json` object, which `from_pretrained` reads back unchanged."""
        raw = asdict(self)
        raw["rope_scaling"] = dict(self.rope_scaling) if self.rope_scaling else None
        return {
            "architectures": ["LongSpecDraftModel"],
            "model_type": "longspec",
            "num_hidden_layers": 1,
            "dtype": "bfloat16",
            **raw,
        }

    def on_target(self, target: Any) -> LongSpecConfig:
        """Returns the layer's shape on a target. A target may be served with YaRN although the head
        was trained without: then the head's angles are the target's.

        Raises:
            ValueError: unless the layer can read this target's last layer.
        """
        theirs = self.for_target(target, intermediate_size=self.intermediate_size)
        config = self
        if self.rope_scaling is None and theirs.rotary.kind == "yarn":
            config = replace(self, rope_scaling=theirs.rope_scaling)
        for name in _OF_TARGET:
            value, legal = getattr(config, name), getattr(theirs, name)
            if value != legal:
                raise ValueError(
                    f"draft head config: {name} = {value!r}, legal: {legal!r} (the target's, whose "
                    f"last layer's keys the head reads); {OTHER_TARGET}"
                )
        check_last_layer(target)
        return config


def check_window(field: str, window: object) -> None:
    """Raises ValueError unless `window` is an integer from 1 to `MAX_WINDOW`."""
    if not is_integer(window) or not 1 <= window <= MAX_WINDOW:
        raise ValueError(
            f"{field} = {repr(window)[:200]}, legal: an integer within 1..{MAX_WINDOW}; 512 is "
            "usual"
        )


def check_last_layer(target: Any) -> None:
    """Raises ValueError for a target whose last layer only keeps a window of its keys."""
    kinds = config_field(target, "layer_types", None)
    if kinds and kinds[-1] != "full_attention":
        raise ValueError(
            f"target config: layer_types[-1] = {kinds[-1]!r}, legal: 'full_attention' (LongSpec "
            "reads the last layer's keys of the whole context); use another method, e.g. "
            "ngram_tree"
        )


def rotary_of(config: Any) -> tuple[float, Mapping[str, Any] | None]:
    """Returns base and scaling (None for the default) of a model's rotary embedding."""
    names = ("rope_theta", "rope_parameters", "rope_scaling", "partial_rotary_factor")
    rotary = read_rotary({name: config_field(config, name, None) for name in names})
    partial = rotary["partial_rotary_factor"]
    require(partial == 1, "partial_rotary_factor", partial, "1.0")
    return rotary["rope_theta"], rotary["rope_scaling"]
