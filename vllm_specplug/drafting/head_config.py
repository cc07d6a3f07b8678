# SPDX-License-Identifier: Apache-2.0
"""Checks of the values in a draft head's `config.json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_specplug.drafting.checkpoint_files import MAX_SIZE, is_positive, is_size

_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "draft_vocab_size",
    "target_hidden_size",
)
# Head sizes of model types that set one, for configs without a head size.
_HEAD_DIMS = {"qwen3": 128}


def require(condition: bool, name: str, value: object, legal: str) -> None:
    """Raises ValueError with field, value, legal values and remedy unless `condition`."""
    if not condition:
        raise ValueError(
            f"draft head config: {name} = {repr(value)[:200]}, legal: {legal}; correct the "
            "head's config.json or use another head"
        )


def require_only(raw: Mapping[str, Any], **fields: Any) -> None:
    """Raises ValueError if a field of a parsed config differs from its given value; it may be
    absent."""
    for name, legal in fields.items():
        require(raw.get(name) in (None, legal), name, raw.get(name), f"absent or {legal!r}")


def require_size(name: str, value: object, max_value: int = MAX_SIZE) -> None:
    """Raises ValueError unless a value is an integer from 1 to `max_value`."""
    is_legal = is_size(value) and value <= max_value
    require(is_legal, name, value, f"an integer from 1 to {max_value}")


def required_size(raw: Mapping[str, Any], name: str, max_value: int = MAX_SIZE) -> int:
    """Returns a field of a parsed config. Raises as `require_size`."""
    require_size(name, raw.get(name), max_value)
    return raw[name]


def read_sizes(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the sizes of a decoder layer and its norms' epsilon from a parsed config.

    Raises:
        ValueError: for the first size that is missing or illegal.
    """
    hidden, heads = required_size(raw, "hidden_size"), required_size(raw, "num_attention_heads")
    model_type, eps = raw.get("model_type"), raw.get("rms_norm_eps")
    usual = _HEAD_DIMS.get(model_type) if isinstance(model_type, str) else None
    head_dim = raw.get("head_dim") or usual or hidden // heads
    require_size("head_dim", head_dim)
    return {
        "hidden_size": hidden,
        "intermediate_size": required_size(raw, "intermediate_size"),
        "num_attention_heads": heads,
        "num_key_value_heads": raw.get("num_key_value_heads") or heads,
        "head_dim": head_dim,
        "vocab_size": required_size(raw, "vocab_size"),
        "rms_norm_eps": 1e-6 if eps is None else eps,
    }


def check_layer_shape(config: Any) -> None:
    """Checks the fields that all decoder layers have.

    Sizes, a norm's epsilon and a rotary base must be positive, heads must form equal groups, the
    head size must be even, and the draft vocabulary must not exceed the target's.

    Raises:
        ValueError: for the first illegal value.
    """
    for name in _SIZES:
        if hasattr(config, name):
            require_size(name, getattr(config, name))
    require(
        config.num_attention_heads % config.num_key_value_heads == 0,
        "num_key_value_heads",
        config.num_key_value_heads,
        f"a divisor of num_attention_heads = {config.num_attention_heads}",
    )
    require(config.head_dim % 2 == 0, "head_dim", config.head_dim, "an even number")
    require(
        config.draft_vocab_size <= config.vocab_size,
        "draft_vocab_size",
        config.draft_vocab_size,
        f"1..{config.vocab_size} (vocab_size)",
    )
    for name in ("rope_theta", "rms_norm_eps"):
        if hasattr(config, name):
            value = getattr(config, name)
            require(is_positive(value), name, value, "a positive number")


OTHER_TARGET = "this head was trained for another target; use the head made for this model"


def check_target(config: Any, target: Any, remedy: str = OTHER_TARGET) -> None:
    """Raises ValueError unless a head's config has the target's hidden size and vocabulary."""
    hidden = "target_hidden_size" if hasattr(config, "target_hidden_size") else "hidden_size"
    for name, field in ((hidden, "hidden_size"), ("vocab_size", "vocab_size")):
        value, legal = getattr(config, name), int(config_field(target, field))
        if value != legal:
            raise ValueError(
                f"draft head config: {name} = {value}, legal: {legal} (the target's {field}); "
                f"{remedy}"
            )


def check_target_layers(layer_ids: Sequence[int], target: Any, remedy: str = OTHER_TARGET) -> None:
    """Raises ValueError unless the target has all zero-based layers that a head reads."""
    last = int(config_field(target, "num_hidden_layers")) - 1
    outside = [i for i in layer_ids if not 0 <= i <= last]
    if outside:
        raise ValueError(
            f"draft head config: target_layer_ids = {list(layer_ids)}, {outside} outside the "
            f"legal 0..{last} (zero-based layers of the target); {remedy}"
        )


def config_field(config: Any, name: str, *default: Any) -> Any:
    """Returns a field of a config, which is an object or a mapping; `default` if it has none.

    Raises:
        ValueError: if there is neither.
    """
    is_mapping = isinstance(config, Mapping)
    if default or (name in config if is_mapping else hasattr(config, name)):
        return config.get(name, *default) if is_mapping else getattr(config, name, *default)
    raise ValueError(f"model config: {name} is missing; {OTHER_TARGET}, or another method")
