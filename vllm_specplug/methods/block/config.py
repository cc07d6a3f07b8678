# SPDX-License-Identifier: Apache-2.0
"""Configuration of a block draft head, from a z-lab/JetSpec or speculators `config.json`."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from vllm_specplug.drafting.checkpoint_files import MAX_SIZE, is_size, open_config
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
from vllm_specplug.methods.block.rotary import Rotary
from vllm_specplug.methods.block.speculators_format import HeadTarget, head_fields, layer_fields
from vllm_specplug.options import is_integer

logger = logging.getLogger(__name__)

# Far beyond any head. Larger values would take memory before a tensor is read.
_MAX_VALUES = {"num_hidden_layers": 256, "block_size": 4096, "target_layer_ids": 1024}

_CONTAINERS = ("jetspec_config", "dflash_config", "dspark_config", "domino_config")
_UNSUPPORTED_FLAGS = {
    "markov_rank": "scores only come from the block; method dspark_tree adds a Markov head's",
    "enable_confidence_head": "heads with a confidence head are those of method dspark_tree",
    "final_logit_softcapping": "logits are those of the LM head as they are",
    "attention_sink_bias": "attention sinks are not implemented",
    "attention_value_scale": "value scaling is not implemented",
}
# Trainers' names of the heads that this reader supports. Other heads have tensors of the same names
# and shapes but draft in another way.
ARCHITECTURES = (
    "DFlashDraftModel", "Qwen3DFlashDraftModel", "QwenDFlashDraftModel", "Qwen3DSparkModel",
    "DSparkDraftModel",
)  # fmt: skip
# Kinds of heads on the same backbone that this reader refuses, with the reason.
_OTHER_KINDS = {
    "dflash2": "DFlash2: heads with a candidate selector are those of method dflash2_tree",
    "lilicorr": "LiLiCorr: a transformer over the candidates of all slots picks a path through "
    "them; vLLM's own method dflash drafts chains with such heads",
    "xpress": "XPress: a refiner mixes all tokens before a slot, and its form for branches is "
    "missing; vLLM 0.33's own method dflash drafts chains with such heads",
    "domino": "Domino: method dspark_tree serves those of SpecForge",
    "dspine": "DSpine: candidates of neighbouring slots exchange messages",
    "dflare": "DFlare: each layer weighs the target's layers by itself, and projects the context "
    "by matrices of its own",
    "dspark": "heads with a Markov head are those of method dspark_tree",
    "jetspec": "JetSpec of speculators: its rows read the drafted tokens, not masks, so a tree "
    "needs a forward pass per level",
}
OTHER_ARCHITECTURES = {
    "DFlash2DraftModel": "dflash2", "LiLiCorrDraftModel": "lilicorr", "Qwen3XPressModel": "xpress",
    "DFlashQwen3XPressModel": "xpress", "DominoDraftModel": "domino", "DSpineDraftModel": "dspine",
    "QwenDFlareDraftModel": "dflare",
}  # fmt: skip
# Prefixes of settings that only such heads have. Their other names may not tell.
_OTHER_SETTINGS = {
    "lilicorr_": "lilicorr", "xpress_": "xpress", "selector_": "dflash2", "conv_": "dflash2",
}  # fmt: skip
# Heads that predict from the anchor's own slot on even if their config does not say so. With the
# wrong slot, every draft would be off by one. DeepSpec also uses these names for its DFlash heads,
# which have no Markov head.
_ANCHOR_ARCHITECTURES = ("Qwen3DSparkModel", "DSparkDraftModel")
# Names of that flag in speculators and vLLM, and in SpecForge.
ANCHOR_FLAGS = ("sample_from_anchor", "shift_label")
SPECULATORS_ARCHITECTURES = ("DFlashSpeculator", "DFlashDraftModel")
_AUX_LAYERS_NAME = "eagle_aux_hidden_state_layer_ids"
# Fields that have their own names in a `config.json`.
_WRITTEN = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "draft_vocab_size", "rms_norm_eps",
    "rope_theta", "partial_rotary_factor", "max_position_embeddings", "attention_bias",
    "block_size",
)  # fmt: skip
_LAYER_NAMES = ("target_layer_ids", "dspark_target_layer_ids", _AUX_LAYERS_NAME)
_MASK_ID_NAMES = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")


def default_target_layer_ids(num_target_layers: int, num_draft_layers: int) -> tuple[int, ...]:
    """Returns the zero-based target layers of a config that names none: evenly spread from 1 to
    n - 3, rounded; the middle layer for a head of one layer."""
    if num_draft_layers == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    return tuple(round(1 + i * span / (num_draft_layers - 1)) for i in range(num_draft_layers))


@dataclass(frozen=True)
class BlockHeadConfig:
    """Shape of a JetSpec/DFlash head.

    `target_layer_ids` are zero-based: id i is the output of the target's decoder layer i.
    `block_size` counts the anchor's slot. Slot j predicts the token at j, so a block drafts
    `block_size - 1` tokens. With `sample_from_anchor` it predicts the next token, and the anchor's
    slot drafts too.
    `causal` is the mask inside a block: true for JetSpec, false for DFlash. `windows` has each
    layer's sliding window, None for full attention; it is empty if all layers have full attention.
    A row at position p attends positions p - window + 1 to p of the context, and its block with
    mask `sliding_causal`.
    `rope_scaling` holds the settings of a rotary embedding other than the default.
    `conv_kernel_size` is the number of taps of the layers' convolutions along the block, 0 without
    them; `conv_group_size` channels share a correction of the kernel.
    `input_embedding_scale` multiplies the embeddings of the anchor and the masks.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    target_layer_ids: tuple[int, ...]
    block_size: int = 16
    causal: bool = True
    sample_from_anchor: bool = False
    mask_token_id: int | None = None
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    partial_rotary_factor: float = 1.0
    max_position_embeddings: int = 0
    windows: tuple[int | None, ...] = ()
    sliding_causal: bool = True
    attention_bias: bool = False
    conv_kernel_size: int = 0
    conv_group_size: int = 0
    input_embedding_scale: float = 1.0

    renamed_tensors: ClassVar[Mapping[str, str]] = {}
    """Trainers' names of tensors, and the names that the reader uses for them."""

    def __post_init__(self) -> None:
        require_size("num_hidden_layers", self.num_hidden_layers, _MAX_VALUES["num_hidden_layers"])
        check_layer_shape(self)
        require(
            is_integer(self.block_size) and 2 <= self.block_size <= _MAX_VALUES["block_size"],
            "block_size",
            self.block_size,
            "an integer >= 2 (the anchor and at least one drafted token), at most "
            f"{_MAX_VALUES['block_size']}",
        )
        require(
            1 <= len(self.target_layer_ids) <= _MAX_VALUES["target_layer_ids"],
            "target_layer_ids",
            self.target_layer_ids,
            f"1 to {_MAX_VALUES['target_layer_ids']} layer ids",
        )
        require(
            self.mask_token_id is None or is_integer(self.mask_token_id),
            "mask_token_id",
            self.mask_token_id,
            "an integer",
        )
        self.rotary.check()
        require(
            len(self.windows) in (0, self.num_hidden_layers)
            and all(window is None or is_size(window) for window in self.windows),
            "sliding_window",
            self.windows,
            f"an integer from 1 to {MAX_SIZE}",
        )

    @property
    def rotary(self) -> Rotary:
        """The head's rotary embedding."""
        return rotary_of(vars(self), self.head_dim)

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """Each layer's sliding window, None for full attention."""
        return self.windows or (None,) * self.num_hidden_layers

    @property
    def layer_causal(self) -> tuple[bool, ...]:
        """Each layer's mask inside the block."""
        return tuple(
            self.causal if window is None else self.sliding_causal for window in self.layer_windows
        )

    @property
    def num_draft_tokens(self) -> int:
        """Drafted depth D of one block."""
        return self.block_size - self.first_slot

    @property
    def first_slot(self) -> int:
        """The slot of a block that predicts the token after the anchor."""
        return 0 if self.sample_from_anchor else 1

    @property
    def attention_scale(self) -> float:
        """Factor on q.k before the softmax."""
        return float(self.head_dim**-0.5)

    @property
    def extra_tensors(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors that a method's heads have beyond the block head's."""
        return {}

    @classmethod
    def from_pretrained(
        cls, directory: str | Path, *, num_target_layers: int | None = None
    ) -> Self:
        """Reads `directory/config.json`; see `from_dict`."""
        with open_config(directory) as raw:
            return cls.from_dict(raw, num_target_layers=num_target_layers)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], *, num_target_layers: int | None = None) -> Self:
        """Returns the config from a parsed `config.json` of either format.

        Args:
            raw: the JSON object.
            num_target_layers: decoder layers of the target, for a config that names no layers.

        Raises:
            ValueError: field, value, legal values and remedy.
        """
        if raw.get("speculators_model_type") is not None or "transformer_layer_config" in raw:
            return cls(**_from_speculators(raw))
        return cls(**_from_zlab(raw, num_target_layers))

    def to_dict(self) -> dict[str, Any]:
        """Returns a z-lab/JetSpec `config.json` object, which `from_dict` reads back unchanged."""
        own = {
            "mask_token_id": self.mask_token_id,
            "target_layer_ids": list(self.target_layer_ids),
            "target_hidden_size": self.target_hidden_size,
            "causal_head": self.causal,
            **({"sample_from_anchor": True} if self.sample_from_anchor else {}),
        }
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            **{name: getattr(self, name) for name in _WRITTEN},
            "rope_scaling": None if self.rope_scaling is None else dict(self.rope_scaling),
            "hidden_act": "silu",
            **written_windows(self.layer_windows),
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
            "dflash_config": own,
        }

    def to_speculators(self, target: HeadTarget) -> dict[str, Any]:
        """Returns a speculators `config.json` object of a bidirectional head whose masks read a
        token. `from_dict` reads it back unchanged unless `unlike_speculators` says why not."""
        return {
            **head_fields("dflash", "DFlashDraftModel", self.num_draft_tokens, target),
            "transformer_layer_config": layer_fields(self, "qwen3", self.layer_windows),
            "draft_vocab_size": self.draft_vocab_size,
            "block_size": self.block_size,
            # The embedding counts as 0.
            "aux_hidden_state_layer_ids": [i + 1 for i in self.target_layer_ids],
            "mask_token_id": self.mask_token_id,
            "sample_from_anchor": self.sample_from_anchor,
            "sliding_window_non_causal": not (self.windows and self.sliding_causal),
        }


def _stated_names(raw: Mapping[str, Any]) -> list[str]:
    stated = raw.get("architectures") or []
    require(isinstance(stated, list), "architectures", stated, "a list of names")
    return list(stated)


def _check_architecture(raw: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Refuses heads with an unknown architecture. A head without one is judged by its tensors."""
    stated = _stated_names(raw)
    kind = next((OTHER_ARCHITECTURES[name] for name in stated if name in OTHER_ARCHITECTURES), "")
    unknown = "heads of other kinds draft in another way, even where tensors look alike"
    reason = _OTHER_KINDS.get(kind, unknown)
    legal = all(name in known for name in stated)
    require(legal, "architectures", stated, f"{', '.join(known)} ({reason})")


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    projector = raw.get("projector_type")
    reason = _OTHER_KINDS.get(str(projector), "others draft in another way")
    legal = f"absent or 'dflash' ({reason})"
    require(projector in (None, "dflash"), "projector_type", projector, legal)
    for prefix, kind in _OTHER_SETTINGS.items():
        name = next((name for name in raw if name.startswith(prefix) and raw[name]), "")
        require(not name, name, raw.get(name), f"absent ({_OTHER_KINDS[kind]})")
    for name, reason in _UNSUPPORTED_FLAGS.items():
        require(not raw.get(name), name, raw.get(name), f"absent or false ({reason})")
    require_only(raw, is_neox_style=True, attention_mode="gqa", logit_scale=1, hidden_act="silu")


def _layer_shape(raw: Mapping[str, Any], container: Mapping[str, Any]) -> dict[str, Any]:
    sizes = read_sizes(raw)
    # Checked before anything is created per layer.
    layers = required_size(raw, "num_hidden_layers", _MAX_VALUES["num_hidden_layers"])
    _refuse_unsupported(raw)
    return {
        **sizes,
        "num_hidden_layers": layers,
        **read_rotary(raw),
        **read_windows(raw, container, layers),
        "attention_bias": bool(raw.get("attention_bias", False)),
    }


def _from_zlab(raw: Mapping[str, Any], num_target_layers: int | None) -> dict[str, Any]:
    container = block_containers(raw)
    _check_architecture(raw, ARCHITECTURES)
    shape = _layer_shape(raw, container)
    _refuse_unsupported(container)
    causal = stated_mask(raw, container)
    if causal is None:
        logger.info(
            "The head's config does not say whether its block is causal; it is taken as "
            'bidirectional, as DFlash trains. "is_causal" in its config.json says otherwise'
        )
    elif "windows" in shape:
        shape["sliding_causal"] = causal
    stated_layers = raw.get("num_target_layers")
    require(
        None in (stated_layers, num_target_layers) or stated_layers == num_target_layers,
        "num_target_layers",
        stated_layers,
        f"{num_target_layers} (the target's layers)",
    )
    layer_ids = _stated_layers(raw, container)
    if layer_ids is None:
        num_target_layers = num_target_layers or raw.get("num_target_layers")
        require(
            num_target_layers is not None,
            "target_layer_ids",
            None,
            "a list of zero-based target layers",
        )
        assert num_target_layers is not None
        layer_ids = default_target_layer_ids(num_target_layers, shape["num_hidden_layers"])
    block_size = raw.get("block_size")
    if block_size is None:
        block_size = container.get("block_size")
    masks = [source.get(name) for source in (container, raw) for name in _MASK_ID_NAMES]
    return {
        **shape,
        "draft_vocab_size": raw.get("draft_vocab_size")
        or container.get("draft_vocab_size")
        or shape["vocab_size"],
        "target_hidden_size": container.get("target_hidden_size")
        or raw.get("target_hidden_size")
        or shape["hidden_size"],
        "target_layer_ids": layer_ids,
        "block_size": block_size,
        "causal": bool(causal),
        "sample_from_anchor": _samples_from_anchor(
            (container, raw), any(name in _ANCHOR_ARCHITECTURES for name in _stated_names(raw))
        ),
        "mask_token_id": next((value for value in masks if value is not None), None),
    }


def _samples_from_anchor(sources: Sequence[Mapping[str, Any]], default: bool) -> bool:
    for name in ANCHOR_FLAGS:
        for source in sources:
            value = source.get(name)
            if value is not None:
                require(isinstance(value, bool), name, value, "true or false")
                return bool(value)
    return default


def _stated_layers(raw: Mapping[str, Any], container: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Returns the zero-based target layers, under any of their names; None if not stated."""
    found: dict[str, tuple[int, ...]] = {}
    for source in (container, raw):
        for name in _LAYER_NAMES:
            # An empty list means "not stated" under vLLM's names, and is an error under the
            # trainers' name.
            if source.get(name) is not None and (source[name] != [] or name == _LAYER_NAMES[0]):
                ids = _layer_ids(name, source[name])
                if name == _AUX_LAYERS_NAME:
                    ids = tuple(i - 1 for i in ids)  # it counts the embedding as 0
                for other, known in found.items():
                    legal = f"absent, or the same layers as {other} = {list(known)} (zero-based)"
                    require(ids == known, name, source[name], legal)
                found[name] = ids
    return next(iter(found.values()), None)


def _layer_ids(name: str, value: object) -> tuple[int, ...]:
    listed = isinstance(value, list | tuple) and all(is_integer(i) for i in value)
    require(listed, name, value, "a list of integers")
    assert isinstance(value, list | tuple)
    return tuple(value)


def block_containers(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the method's part of a config, merged from all containers. JetSpec's values win; the
    others must agree."""
    container: dict[str, Any] = {}
    for name in _CONTAINERS:
        part = raw.get(name) or {}
        require(isinstance(part, Mapping), name, part, "an object")
        for key, value in part.items():
            if value is None:
                continue
            known = container.setdefault(key, value)
            agreed = known == value or (raw.get("jetspec_config") or {}).get(key) is not None
            legal = f"absent, or {repr(known)[:100]} as in another part of the config"
            require(agreed, f"{name}.{key}", value, legal)
    return container


def stated_mask(raw: Mapping[str, Any], container: Mapping[str, Any]) -> bool | None:
    """Returns whether the block is causal by the config or by the method that wrote it; None if
    neither tells."""
    for name, source in (
        ("is_causal", raw),
        ("causal_head", container),
        ("causal", container),
        ("is_causal", container),
        ("causal_head", raw),
        ("causal", raw),
    ):
        value = source.get(name)
        if value is not None:
            require(isinstance(value, bool), name, value, "true or false")
            return bool(value)
    return True if raw.get("jetspec_config") is not None else None


def _from_speculators(raw: Mapping[str, Any]) -> dict[str, Any]:
    kind = raw.get("speculators_model_type")
    other = _OTHER_KINDS.get(str(kind))
    legal = "'dflash'" + (f" ({other})" if other else "")
    require(kind == "dflash", "speculators_model_type", kind, legal)
    _check_architecture(raw, SPECULATORS_ARCHITECTURES)
    layer = raw.get("transformer_layer_config")
    require(isinstance(layer, Mapping), "transformer_layer_config", layer, "an object")
    assert isinstance(layer, Mapping)
    shape = _layer_shape(layer, {})
    _refuse_unsupported(raw)
    # `sliding_window_non_causal`, false by default, only concerns sliding-window layers. Full
    # attention is always trained bidirectionally. A user may state another mask for both.
    causal = stated_mask(raw, {})
    if "windows" in shape:
        by_flag = raw.get("sliding_window_non_causal") is not True
        shape["sliding_causal"] = by_flag if causal is None else causal
    aux = raw.get("aux_hidden_state_layer_ids")
    require(bool(aux), "aux_hidden_state_layer_ids", aux, "a list of layer ids, each >= 1")
    assert aux is not None
    # These ids count the embedding as 0, so decoder layer i is i + 1.
    layer_ids = tuple(i - 1 for i in _layer_ids("aux_hidden_state_layer_ids", aux))
    return {
        **shape,
        "draft_vocab_size": raw.get("draft_vocab_size") or shape["vocab_size"],
        "target_hidden_size": raw.get("target_hidden_size") or shape["hidden_size"],
        "target_layer_ids": layer_ids,
        "block_size": 8 if raw.get("block_size") is None else raw["block_size"],
        "causal": bool(causal),
        "sample_from_anchor": _samples_from_anchor((raw,), False),
        "mask_token_id": raw.get("mask_token_id"),
    }
