# SPDX-License-Identifier: Apache-2.0
"""Reads windows and rotary embedding of a draft layer from a head's config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_specplug.drafting.checkpoint_files import MAX_SIZE, is_positive, is_size
from vllm_specplug.drafting.head_config import require
from vllm_specplug.methods.block.rotary import KINDS, Rotary

_KINDS = ("full_attention", "sliding_attention")
# M-RoPE gives a token three positions, which are equal for text. A draft is text.
_MROPE = ("mrope_section", "mrope_interleaved")
_NOT_SCALING = ("rope_theta", "type", "rope_type", "partial_rotary_factor", *_MROPE)


def read_windows(
    raw: Mapping[str, Any], container: Mapping[str, Any], num_layers: int
) -> dict[str, Any]:
    """Returns each layer's sliding window and the default mask inside the block of such layers; no
    entries without a window."""
    types = raw.get("layer_types") or []
    require(
        isinstance(types, list) and (not types or len(types) >= num_layers),
        "layer_types",
        types,
        f"one kind for each of the {num_layers} draft layers",
    )
    other = {i: kind for i, kind in enumerate(types[:num_layers]) if kind not in _KINDS}
    require(not other, "layer_types", other, f"{' or '.join(_KINDS)} for every draft layer")
    sliding = [kind == "sliding_attention" for kind in types[:num_layers]]
    everywhere = bool(container.get("use_swa")) and not any(sliding)
    if not everywhere and not any(sliding):
        flag = raw.get("use_sliding_window")
        legal = "absent or false if layer_types names no sliding layer"
        require(not flag, "use_sliding_window", flag, legal)
        return {}
    flag = raw.get("use_sliding_window")
    require(
        flag in (None, True) or everywhere,
        "use_sliding_window",
        flag,
        "absent or true if layer_types names sliding layers",
    )
    window = container.get("swa_window_size") or raw.get("sliding_window")
    require(is_size(window), "sliding_window", window, f"an integer from 1 to {MAX_SIZE}")
    return {
        "windows": tuple(window if everywhere or slides else None for slides in sliding)
        or (window,) * num_layers,
        "sliding_causal": not everywhere,
    }


def written_windows(windows: Sequence[int | None]) -> dict[str, Any]:
    """Returns the fields of a config that `read_windows` reads."""
    return {
        "layer_types": [_KINDS[window is not None] for window in windows],
        "sliding_window": next((window for window in windows if window is not None), None),
    }


def read_rotary(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns base, kind and settings of the rotary embedding, from any of their keys."""
    theta, partial = raw.get("rope_theta"), raw.get("partial_rotary_factor")
    scaling: dict[str, Any] | None = None
    for name in ("rope_parameters", "rope_scaling"):
        rope = raw.get(name) or {}
        require(isinstance(rope, Mapping), name, rope, "an object")
        nested = sorted(key for key, value in rope.items() if isinstance(value, Mapping))
        require(not nested, name, nested, "one rotary embedding for all layers")
        kind = rope.get("rope_type") or rope.get("type") or "default"
        kind = "default" if kind == "mrope" or _is_plain_dynamic(kind, rope) else kind
        require(
            kind in KINDS,
            f"{name}.rope_type",
            kind,
            f"{', '.join(KINDS)}, mrope, dynamic with only a factor (angles that do not change "
            "with the length)",
        )
        if rope.get("rope_theta") is not None:
            theta = rope["rope_theta"]
        if rope.get("partial_rotary_factor") is not None:
            partial = rope["partial_rotary_factor"]
        if kind != "default":
            scaling = {k: v for k, v in rope.items() if k not in _NOT_SCALING}
            scaling["rope_type"] = kind
    theta = 10000.0 if theta is None else theta
    require(is_positive(theta), "rope_theta", theta, "a positive number")
    return {
        "rope_theta": float(theta),
        "rope_scaling": scaling,
        "partial_rotary_factor": 1.0 if partial is None else partial,
        "max_position_embeddings": raw.get("max_position_embeddings") or 0,
    }


def _is_plain_dynamic(kind: Any, rope: Mapping[str, Any]) -> bool:
    """Returns whether vLLM serves dynamic scaling with the default's angles: unless the config sets
    `alpha` or `max_trained_positions`."""
    others = {"alpha", "max_trained_positions"}
    return kind == "dynamic" and is_positive(rope.get("factor")) and others.isdisjoint(rope)


def rotary_of(values: Mapping[str, Any], head_dim: int) -> Rotary:
    """Returns the rotary embedding of a layer; `values` has the entries of `read_rotary`.

    Raises:
        ValueError: for a factor that rotates nothing.
    """
    scaling = dict(values["rope_scaling"] or {})
    return Rotary(
        values["rope_theta"],
        head_dim,
        _rotated_size(values["partial_rotary_factor"], head_dim),
        scaling.pop("rope_type", "default"),
        scaling or None,
        values["max_position_embeddings"],
    )


def _rotated_size(factor: Any, head_dim: int) -> int:
    """Returns the number of leading dimensions of a head that `partial_rotary_factor` rotates.

    Raises:
        ValueError: for a factor that rotates none of them, or an odd number.
    """
    rotated = int(head_dim * factor) if is_positive(factor) and factor <= 1 else 0
    require(
        rotated >= 2 and rotated % 2 == 0,
        "partial_rotary_factor",
        factor,
        f"a number up to 1 that rotates an even number of {head_dim} dimensions",
    )
    return rotated
