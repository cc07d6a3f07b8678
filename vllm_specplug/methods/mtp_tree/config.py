# SPDX-License-Identifier: Apache-2.0
"""Shape of a target's multi-token-prediction module, from the target's `config.json`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vllm_specplug.drafting.checkpoint_files import is_positive, open_config
from vllm_specplug.drafting.head_config import (
    check_layer_shape,
    read_sizes,
    require,
    require_only,
    required_size,
)
from vllm_specplug.methods.block.latent import LatentConfig
from vllm_specplug.methods.block.layer_config import read_rotary, rotary_of
from vllm_specplug.methods.block.mlp import ExpertsConfig
from vllm_specplug.methods.block.rotary import Rotary
from vllm_specplug.methods.mtp_tree.recognise import layer_config, module_count

# Model types whose module is one layer of full attention over the target's last state.
_QWEN_EXPERTS = ("qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text")
Family = Literal["mimo", "qwen", "glm", "deepseek"]
# Families whose module is stored as the layer after the target's last one.
_LAYERS = ("glm", "deepseek")
FAMILIES: dict[str, Family] = {
    "mimo": "mimo",
    "qwen3_5": "qwen",
    "qwen3_5_text": "qwen",
    **dict.fromkeys(_QWEN_EXPERTS, "qwen"),
    "glm4_moe": "glm",
    "glm4_moe_lite": "glm",
    "deepseek_v3": "deepseek",
}
# Fields of a family's configs that must be absent or have this value.
_ONLY: dict[Family, dict[str, Any]] = {
    "mimo": {"qk_norm": False},
    "qwen": {"attention_bias": False},
    "glm": {},
    "deepseek": {},
}


@dataclass(frozen=True)
class MtpConfig:
    """Shape of an MTP module, which has the shape of one layer of its target.

    MiMo's projection takes the state before the embedding, the others' the embedding first. Qwen
    stores norm weights minus one and reads the token after the first one; the others' modules were
    trained without it. `norm_output` says that a drafted token's state is the module's output after
    the final norm, not before it. `gated` says that a sigmoid gate scales each head's output. With
    `experts`, `intermediate_size` is the width of one expert. `layer` is the number of the module's
    layer in GLM's and DeepSeek's checkpoints, and 0 for the others. With `latent`, every head has
    its own keys and values in the cache, and `head_dim` is the size of a query.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rotary: Rotary
    family: Family
    attention_bias: bool
    qk_norm: bool
    norm_output: bool
    gated: bool = False
    experts: ExpertsConfig | None = None
    layer: int = 0
    latent: LatentConfig | None = None

    def __post_init__(self) -> None:
        check_layer_shape(self)
        self.rotary.check()

    @property
    def draft_vocab_size(self) -> int:
        """The vocabulary size: the module has no reduced draft vocabulary."""
        return self.vocab_size

    @property
    def query_factor(self) -> float:
        """The factor of latent attention's scores under YaRN."""
        if self.latent is None or self.rotary.kind != "yarn":
            return 1.0
        scaling = self.rotary.scaling or {}
        strength = 0.1 * (scaling.get("mscale_all_dim") or 0.0)
        return float((strength * math.log(max(1.0, scaling["factor"])) + 1.0) ** 2)

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
            kind in FAMILIES,
            "model_type",
            kind,
            f"{', '.join(FAMILIES)} (modules of other targets have another router, linear or "
            "sparse attention or a sliding window, and run only in vLLM's own method mtp)",
        )
        require(count > 0, name, stated, "1 or more (the target ships no module)")
        family = FAMILIES[str(kind)]
        require_only(
            raw,
            hidden_act="silu",
            use_sliding_window=False,
            layer_scale=False,
            mtp_use_dedicated_embeddings=False,
            **_ONLY[family],
        )
        latent = None
        if raw.get("kv_lora_rank") is not None:
            require_only(raw, attention_bias=False, rope_interleave=True)
            latent = LatentConfig.of(raw)
            raw = {**raw, "head_dim": latent.head_dim, "num_key_value_heads": None}
        halved = family == "glm" and latent is None
        rope = read_rotary({"partial_rotary_factor": 0.5, **raw} if halved else raw)
        experts = None
        if family in _LAYERS:
            experts = ExpertsConfig.of_glm(raw)
        elif kind in _QWEN_EXPERTS:
            experts = ExpertsConfig.of_qwen(raw)
        sizes = read_sizes(raw if experts is None else {**raw, "intermediate_size": experts.width})
        # MiMo's layers have biases by default, GLM's do not.
        bias = raw.get("attention_bias")
        bias = family == "mimo" if bias is None else bias is not False
        rotary = rotary_of(rope, sizes["head_dim"] if latent is None else latent.qk_rope_head_dim)
        if latent is not None:
            _check_latent_rotary(raw, rotary, rope["partial_rotary_factor"])
        return cls(
            **sizes,
            rotary=rotary,
            family=family,
            attention_bias=bias,
            qk_norm=family == "qwen" or raw.get("use_qk_norm") is True,
            norm_output=family != "glm",
            gated=family == "qwen" and raw.get("attn_output_gate", True) is not False,
            experts=experts,
            layer=required_size(raw, "num_hidden_layers") if family in _LAYERS else 0,
            latent=latent,
        )


def _check_latent_rotary(raw: Mapping[str, Any], rotary: Rotary, partial: Any) -> None:
    """Refuses rotary embeddings that vLLM computes in another way for latent attention."""
    stated = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind, scaling = stated.get("rope_type") or stated.get("type"), rotary.scaling or {}
    is_legal = kind in (None, "default", "yarn")
    require(is_legal, "rope_scaling.rope_type", kind, "default or yarn with MLA")
    is_legal = rotary.rotated == rotary.head_dim
    require(is_legal, "partial_rotary_factor", partial, "absent or 1 with MLA")
    given = scaling.get("attention_factor")
    require(given is None, "rope_scaling.attention_factor", given, "absent with MLA")
    strength = scaling.get("mscale_all_dim")
    is_legal = not strength or is_positive(strength)
    require(is_legal, "rope_scaling.mscale_all_dim", strength, "absent, 0 or a positive number")
    is_legal = ("mscale" in scaling) == ("mscale_all_dim" in scaling)
    legal = "set if mscale_all_dim is set, else absent"
    require(is_legal, "rope_scaling.mscale", scaling.get("mscale"), legal)
