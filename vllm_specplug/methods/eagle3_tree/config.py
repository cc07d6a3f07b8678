# SPDX-License-Identifier: Apache-2.0
"""Configuration of an EAGLE-3 head, from the `config.json` of any of its trainers."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_specplug.drafting.checkpoint_files import MAX_SIZE, open_config
from vllm_specplug.drafting.head_config import (
    check_layer_shape,
    read_sizes,
    require,
    require_only,
    require_size,
    required_size,
)
from vllm_specplug.methods.block.layer_config import (
    read_rotary,
    read_windows,
    rotary_of,
    written_windows,
)
from vllm_specplug.methods.block.rotary import DEFAULT_MAX_POSITIONS, Rotary
from vllm_specplug.methods.block.speculators_format import HeadTarget, head_fields, layer_fields
from vllm_specplug.options import is_integer

logger = logging.getLogger(__name__)

_MAX_AUX_LAYERS = 16
_MAX_LAYERS = 256
AUX_LAYERS_KEY = "eagle_aux_hidden_state_layer_ids"
# Zero-based, in heads of DeepSpec and of this package. The other key's numbering is ambiguous.
_OWN_LAYERS_KEY = "target_layer_ids"
NAME_LAYERS = f"name the layers, counted from 0, under {_OWN_LAYERS_KEY} in the head's config.json"
# Names of a head of Llama-like layers in the public trainers and in vLLM. Some trainers write
# the architecture of the layer's model family; the tensors tell the rest.
_ARCHITECTURES = (
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "Eagle3Qwen3ForCausalLM",
    "Eagle3Qwen2_5vlForCausalLM",
    "Eagle3Qwen3vlForCausalLM",
    "Eagle3MiniMaxM2ForCausalLM",
    "Eagle3Speculator",
    "Eagle3DraftModel",
    "Eagle3LlamaModel",
    "PEagleDraftModel",
    "PEagleSpeculator",
    "PeagleLlamaForCausalLM",
    "PeagleQwen3ForCausalLM",
    "Qwen3Eagle3Model",
    "LlamaForCausalLM",
)
# Names of the mask token of P-EAGLE heads, as vLLM looks for them.
_MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")
MASK_TOKEN = (
    "the mask token of the training run (SpecForge: `model.mask_token_id`, else the tokenizer's)"
)
# Flags of `eagle_config` and the values that this head supports.
_EAGLE_FLAGS: dict[str, tuple[tuple[Any, ...], str]] = {
    "use_aux_hidden_state": ((None, True), "true (the head reads several layers of the target)"),
    "use_input_layernorm_in_first_layer": ((None, True), "true (embeddings are normed)"),
    "use_last_layernorm": ((None, True), "true (a norm stands before the LM head)"),
    "use_mtp_layernorm": ((None, False), "false"),
    "parallel_draft_step": (
        (None, 0, 1),
        "1 (heads with several parallel draft modules are not served)",
    ),
}


def default_target_layers(num_target_layers: int) -> tuple[int, ...]:
    """Returns the zero-based layers of a head whose config names none: an early, the middle and a
    late one, as all trainers choose them."""
    return (1, num_target_layers // 2 - 1, num_target_layers - 4)


@dataclass(frozen=True)
class Eagle3Config:
    """Shape of an EAGLE-3 head.

    `target_layer_ids` are zero-based and ascending: id i is the output of the target's decoder
    layer i. `rope_scaling` is None for the default rotary embedding, which rotates the leading
    `partial_rotary_factor` of each head. `norm_before_fc` is one norm over the joined target
    states, `fc_norm` one norm for each of them. `windows` has each layer's sliding window, None for
    full attention: a row at position p attends positions p - window + 1 to p. `norm_output` says
    that a drafted token's state is fed to the next one after the final norm, not before it. The
    reader takes `qk_norm` and `attention_bias` from the tensors. With `mask_token_id` the head
    drafts in parallel (P-EAGLE): the head reads this token and a trained state in place of each
    drafted token. `num_draft_tokens` is the number of tokens that such a head was trained to draft
    at once; None if its config does not state it.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    target_layer_ids: tuple[int, ...]
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    partial_rotary_factor: float = 1.0
    max_position_embeddings: int = 131072
    windows: tuple[int | None, ...] = (None,)
    mask_token_id: int | None = None
    num_draft_tokens: int | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    qk_norm: bool = False
    attention_bias: bool = False

    def __post_init__(self) -> None:
        check_layer_shape(self)
        self.rotary.check()
        for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
            require(
                isinstance(getattr(self, name), bool), name, getattr(self, name), "true or false"
            )
        layers = self.target_layer_ids
        require(
            _are_ascending(layers),
            AUX_LAYERS_KEY,
            list(layers),
            f"1 to {_MAX_AUX_LAYERS} different layers in ascending order, as the target gives "
            "their outputs",
        )

    @property
    def num_hidden_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.windows)

    @property
    def rotary(self) -> Rotary:
        """The head's rotary embedding."""
        return rotary_of(vars(self), self.head_dim)

    @property
    def feature_size(self) -> int:
        """Width of the joined target states, L * Ht."""
        return len(self.target_layer_ids) * self.target_hidden_size

    @classmethod
    def from_pretrained(cls, directory: str | Path, *, num_target_layers: int) -> Eagle3Config:
        """Reads `directory/config.json`; see `from_dict`."""
        with open_config(directory, weights="the weights") as raw:
            return cls.from_dict(raw, num_target_layers=num_target_layers)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], *, num_target_layers: int) -> Eagle3Config:
        """Returns the config from a parsed `config.json` in the trainers' flat form or
        speculators'.

        Args:
            raw: the JSON object.
            num_target_layers: decoder layers of the target.

        Raises:
            ValueError: field, value, legal values and remedy.
        """
        nested = raw.get("transformer_layer_config")
        is_speculators = raw.get("speculators_model_type") is not None or nested is not None
        kind = raw.get("speculators_model_type")
        require(
            kind in (None, "eagle3", "peagle"),
            "speculators_model_type",
            kind,
            "'eagle3' or 'peagle'",
        )
        layer = nested if is_speculators else raw
        require(isinstance(layer, Mapping), "transformer_layer_config", layer, "an object")
        assert isinstance(layer, Mapping)
        eagle = raw.get("eagle_config") or {}
        require(isinstance(eagle, Mapping), "eagle_config", eagle, "an object")
        _refuse_other_heads(raw, layer, eagle)

        def flag(name: str, default: bool) -> Any:
            for source in (eagle, raw):
                if source.get(name) is not None:
                    return source[name]
            return default

        sizes, rotary = read_sizes(layer), read_rotary(layer)
        vocab = sizes["vocab_size"]
        rotary["max_position_embeddings"] = (
            rotary["max_position_embeddings"] or DEFAULT_MAX_POSITIONS
        )
        return cls(
            **sizes,
            draft_vocab_size=raw.get("draft_vocab_size")
            or raw.get("truncated_vocab_size")
            or vocab,
            target_hidden_size=raw.get("target_hidden_size") or sizes["hidden_size"],
            target_layer_ids=_target_layers(
                raw.get(_OWN_LAYERS_KEY),
                eagle.get(AUX_LAYERS_KEY) or raw.get(AUX_LAYERS_KEY),
                num_target_layers,
                is_speculators,
            ),
            **rotary,
            windows=_windows(layer),
            mask_token_id=_mask_token(raw, vocab),
            num_draft_tokens=_trained_depth(raw) if kind == "peagle" else None,
            # True by default in speculators' format of EAGLE-3 only.
            norm_before_residual=flag("norm_before_residual", is_speculators and kind != "peagle"),
            norm_before_fc=flag("norm_before_fc", False),
            fc_norm=flag("fc_norm", False),
            norm_output=flag("norm_output", False),
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns a `config.json` object in the trainers' flat form, which vLLM's own method reads
        too."""
        unlike = ("target_layer_ids", "qk_norm", "windows", "num_draft_tokens")
        raw = {k: v for k, v in asdict(self).items() if k not in unlike}
        raw["rope_scaling"] = dict(self.rope_scaling) if self.rope_scaling else None
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": self.num_hidden_layers,
            **written_windows(self.windows),
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
            **raw,
            "num_aux_hidden_states": len(self.target_layer_ids),
            **self._layers(),
        }

    def to_speculators(self, target: HeadTarget, depth: int) -> dict[str, Any]:
        """Returns a speculators `config.json` object of a head that drafts token by token, which
        vLLM's own method reads too.

        Args:
            depth: tokens that the head was trained to draft in a row.
        """
        flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
        return {
            **head_fields("eagle3", "Eagle3DraftModel", depth, target),
            "transformer_layer_config": {
                **layer_fields(self, "qwen3" if self.qk_norm else "llama", self.windows),
                # vLLM's own method looks for it there, and takes 3 without it.
                "num_aux_hidden_states": len(self.target_layer_ids),
            },
            "draft_vocab_size": self.draft_vocab_size,
            **{name: getattr(self, name) for name in flags},
            **self._layers(),
        }

    def _layers(self) -> dict[str, Any]:
        return {
            _OWN_LAYERS_KEY: list(self.target_layer_ids),
            # speculators and vLLM count the embedding as 0.
            AUX_LAYERS_KEY: [i + 1 for i in self.target_layer_ids],
        }


def _target_layers(
    own: Any, stated: Any, num_target_layers: int, is_speculators: bool
) -> tuple[int, ...]:
    """Returns the zero-based layers `own`, or those of `stated`, which trainers number in two ways.

    Ids count either the embedding as 0, as in vLLM, or the first layer. Heads of both kinds read
    the output of layer 1 first, so their first id is 2 or 1. speculators counts the embedding, but
    its converter takes over the ids of other trainers' heads, whose layers are the default ones.
    """
    if own:
        require(_are_layers(own), _OWN_LAYERS_KEY, own, "a list of layer numbers")
    if stated:
        require(_are_layers(stated), AUX_LAYERS_KEY, stated, "a list of layer numbers")
    if own:
        agreed = not stated or list(stated) in (list(own), [i + 1 for i in own])
        legal = f"absent, or the same layers as {_OWN_LAYERS_KEY} = {list(own)} (zero-based)"
        require(agreed, AUX_LAYERS_KEY, stated, legal)
        return tuple(own)
    if not stated:
        layers = default_target_layers(num_target_layers)
        legal = f"a list; of {num_target_layers} layers none are read by default: {NAME_LAYERS}"
        require(_are_ascending(layers), AUX_LAYERS_KEY, None, legal)
        return layers
    first_layer_is_zero = min(stated) == 1
    if is_speculators and tuple(stated) != default_target_layers(num_target_layers):
        first_layer_is_zero = False
    layers = tuple(i if first_layer_is_zero else i - 1 for i in stated)
    logger.info(
        "The head's %s = %s are taken as outputs of the target's layers %s, counted from 0; if "
        "that is wrong, replace them: %s",
        AUX_LAYERS_KEY,
        list(stated),
        list(layers),
        NAME_LAYERS,
    )
    return layers


def _mask_token(raw: Mapping[str, Any], vocab_size: int) -> int | None:
    """Returns the mask token of a P-EAGLE head, None for other heads."""
    for name in _MASK_KEYS:
        token = raw.get(name)
        if token is not None:
            require(
                is_integer(token) and 0 <= token < vocab_size,
                name,
                token,
                f"0..{vocab_size - 1}",
            )
            return int(token)
    kinds = [str(raw.get("speculators_model_type")), *(raw.get("architectures") or [])]
    require(
        not any("peagle" in kind.lower() for kind in kinds),
        " / ".join(_MASK_KEYS),
        None,
        f"{MASK_TOKEN}, under one of these names",
    )
    return None


def _trained_depth(raw: Mapping[str, Any]) -> int | None:
    """Returns the number of tokens that a P-EAGLE head drafts at once, as speculators states it."""
    stated = raw.get("speculators_config") or {}
    require(isinstance(stated, Mapping), "speculators_config", stated, "an object")
    proposals = stated.get("proposal_methods") or [{}]
    legal = isinstance(proposals, list) and isinstance(proposals[0], Mapping)
    require(legal, "speculators_config.proposal_methods", proposals, "a list of objects")
    depth = proposals[0].get("speculative_tokens")
    if depth is not None:
        require_size("speculative_tokens", depth)
    return depth


def _windows(layer: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Returns the sliding window of each layer, None for full attention."""
    count = 1
    if layer.get("num_hidden_layers") is not None:
        count = required_size(layer, "num_hidden_layers", _MAX_LAYERS)
    window = layer.get("sliding_window")
    require(
        not window or layer.get("use_sliding_window") is False or bool(layer.get("layer_types")),
        "sliding_window",
        window,
        'absent, or with "layer_types" beside it: "full_attention" or "sliding_attention" for each '
        "layer (programs disagree whether such a head has a window)",
    )
    # Trainers copy a true flag from the target. vLLM reads only layer_types.
    stated = {k: v for k, v in layer.items() if (k, v) != ("use_sliding_window", True)}
    found: tuple[int | None, ...] = read_windows(stated, {}, count).get("windows", (None,) * count)
    return found


def _are_ascending(layers: Sequence[int]) -> bool:
    return 1 <= len(layers) <= _MAX_AUX_LAYERS and list(layers) == sorted(set(layers))


def _are_layers(value: object) -> bool:
    return isinstance(value, list | tuple) and all(
        is_integer(i) and 0 <= i <= MAX_SIZE for i in value
    )


def _refuse_other_heads(
    raw: Mapping[str, Any], layer: Mapping[str, Any], eagle: Mapping[str, Any]
) -> None:
    """Refuses other kinds of heads by their names and settings."""
    stated = raw.get("architectures") or []
    listed = isinstance(stated, list | tuple) and all(isinstance(name, str) for name in stated)
    require(listed, "architectures", stated, "a list of names")
    require(
        all(name in _ARCHITECTURES for name in stated),
        "architectures",
        stated,
        f"{', '.join(_ARCHITECTURES)} (heads with MLA or experts are not served)",
    )
    experts = layer.get("use_moe")
    require(not experts, "use_moe", experts, "absent or false (heads with experts are not served)")
    for name, (legal, why) in _EAGLE_FLAGS.items():
        for source in (eagle, raw):
            require(source.get(name) in legal, name, source.get(name), why)
    require_only(layer, hidden_act="silu", mlp_bias=False, logit_scale=1, is_neox_style=True)
