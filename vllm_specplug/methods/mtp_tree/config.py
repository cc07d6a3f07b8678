# SPDX-License-Identifier: Apache-2.0
"""Shape of a target's multi-token-prediction module, from the target's `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_specplug.drafting.checkpoint_files import open_config
from vllm_specplug.drafting.head_config import check_layer_shape, require
from vllm_specplug.methods.block.layer_config import read_rotary, rotated_size
from vllm_specplug.methods.block.mlp import ExpertsConfig
from vllm_specplug.methods.block.rotary import DEFAULT_MAX_POSITIONS, Rotary
from vllm_specplug.methods.mtp_tree.recognise import layer_config, module_count

# Model types whose module is one layer of full attention over the target's last state.
_QWEN_EXPERTS = ("qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text")
_QWEN = ("qwen3_5", "qwen3_5_text", *_QWEN_EXPERTS)
MODEL_TYPES = ("mimo", *_QWEN)


@dataclass(frozen=True)
class MtpConfig:
    """Shape of an MTP module, which has the shape of one layer of its target.

    `is_qwen` distinguishes Qwen's modules from MiMo's. Qwen stores norm weights minus one, norms
    queries and keys, has the embedding before the state in its projection, and reads the token
    after the first one. `gated` says that a sigmoid gate scales each head's output. With `experts`,
    `intermediate_size` is the width of one expert.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rotary: Rotary
    attention_bias: bool = True
    # A drafted token's state is the module's normed output.
    norm_output: bool = True
    is_qwen: bool = False
    gated: bool = False
    experts: ExpertsConfig | None = None

    def __post_init__(self) -> None:
        check_layer_shape(self)
        self.rotary.check()

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are normed."""
        return self.is_qwen

    @property
    def draft_vocab_size(self) -> int:
        """The vocabulary size: the module has no reduced draft vocabulary."""
        return self.vocab_size

    @classmethod
    def from_pretrained(cls, directory: str | Path) -> MtpConfig:
        """Reads `directory/config.json`.

        Raises:
            ValueError: for a target without a module, or with one of another kind.
        """
        with open_config(directory, "target", "the weights") as raw:
            return cls.from_dict(raw)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> MtpConfig:
        """Returns the config from a parsed `config.json`."""
        name, count = module_count(raw)
        stated = raw.get(name)
        raw = layer_config(raw)
        kind = raw.get("model_type")
        require(
            kind in MODEL_TYPES,
            "model_type",
            kind,
            f"{', '.join(MODEL_TYPES)} (modules of other targets have other routers, MLA, linear "
            "or sliding-window layers, and only run in vLLM's own method mtp)",
        )
        require(count > 0, name, stated, "1 or more (the target ships no module)")
        is_qwen = kind in _QWEN
        for key, legal in {
            "hidden_act": (None, "silu"),
            "use_sliding_window": (None, False),
            "layer_scale": (None, False),
            "mtp_use_dedicated_embeddings": (None, False),
            "attention_bias" if is_qwen else "qk_norm": (None, False),
        }.items():
            require(raw.get(key) in legal, key, raw.get(key), f"absent or {legal[1]!r}")
        hidden, heads = raw.get("hidden_size"), raw.get("num_attention_heads")
        rope = read_rotary(raw)
        scaling = dict(rope["rope_scaling"] or {})
        dim = raw.get("head_dim")
        if dim is None and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
            dim = hidden // heads
        require(isinstance(dim, int), "head_dim", dim, "an integer")
        assert isinstance(dim, int)
        rotated = rotated_size(rope["partial_rotary_factor"], dim)
        experts = ExpertsConfig.from_dict(raw) if kind in _QWEN_EXPERTS else None
        return cls(
            hidden_size=hidden,  # type: ignore[arg-type]  # checked with all sizes
            intermediate_size=experts.width if experts else raw.get("intermediate_size"),  # type: ignore[arg-type]
            num_attention_heads=heads,  # type: ignore[arg-type]
            num_key_value_heads=raw.get("num_key_value_heads") or heads,  # type: ignore[arg-type]
            head_dim=dim,
            vocab_size=raw.get("vocab_size"),  # type: ignore[arg-type]
            rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
            rotary=Rotary(
                rope["rope_theta"],
                dim,
                rotated,
                scaling.pop("rope_type", "default"),
                scaling or None,
                rope["max_position_embeddings"] or DEFAULT_MAX_POSITIONS,
            ),
            attention_bias=not is_qwen and raw.get("attention_bias", True) is not False,
            is_qwen=is_qwen,
            gated=is_qwen and raw.get("attn_output_gate", True) is not False,
            experts=experts,
        )
