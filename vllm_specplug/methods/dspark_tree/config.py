# SPDX-License-Identifier: Apache-2.0
"""Configuration of a DSpark or Domino head: a block head's config, and the second head's values.

It reads `config.json` files of DeepSpec, SpecForge, speculators and Model-Optimizer.
`methods.block.config` reads and checks the block head's part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from vllm_specplug.drafting.checkpoint_files import MAX_SIZE, is_size
from vllm_specplug.drafting.head_config import require, require_size
from vllm_specplug.methods.block.config import (
    ANCHOR_FLAGS,
    BlockHeadConfig,
    block_containers,
)
from vllm_specplug.methods.block.recognise import (
    DOMINO_ARCHITECTURE,
    MARKOV_KEYS,
    as_dflash,
    stated_values,
)
from vllm_specplug.methods.block.speculators_format import HeadTarget, head_fields
from vllm_specplug.options import is_integer

MARKOV_INPUT = "markov_head.markov_w1.weight"
MARKOV_OUTPUT = "markov_head.markov_w2.weight"
CONFIDENCE_WEIGHT, CONFIDENCE_BIAS = "confidence_head.proj.weight", "confidence_head.proj.bias"


@dataclass(frozen=True)
class MarkovLayer:
    """Layer of a Markov head that reads more than the row of W_1.

    It has `outputs` times r outputs. `parts` names the layers of a local head whose columns it
    holds, in the checkpoint's order.
    """

    name: str
    outputs: int
    parts: tuple[str, ...]

    def widths(self, rank: int, hidden: int) -> list[int]:
        """Returns the number of columns of each part."""
        return [hidden if part == "slot_proj" else rank for part in self.parts]


MARKOV_LAYERS = {
    "gated": MarkovLayer("markov_head.gate_proj", 1, ("slot_proj", "token_proj")),
    "rnn": MarkovLayer("markov_head.joint_proj", 3, ("state_proj", "token_proj", "slot_proj")),
}
DOMINO_GRU = ("prefix_gru.weight_ih_l0", "prefix_gru.weight_hh_l0")
DOMINO_INPUT, DOMINO_OUTPUT = "embed_proj.0.weight", "embed_proj.2.weight"
_LAYER_TENSORS = tuple(
    f"{layer.name}.{part}" for layer in MARKOV_LAYERS.values() for part in ("weight", "bias")
)
# Model-Optimizer's names of these tensors, then those of early SpecForge heads.
OTHER_NAMES = {
    "markov_w1.weight": MARKOV_INPUT,
    "markov_w2.weight": MARKOV_OUTPUT,
    "confidence_proj.weight": CONFIDENCE_WEIGHT,
    "confidence_proj.bias": CONFIDENCE_BIAS,
    **{name.removeprefix("markov_head."): name for name in _LAYER_TENSORS},
    **{
        f"logit_head.{name}": name
        for name in (
            MARKOV_INPUT, MARKOV_OUTPUT, CONFIDENCE_WEIGHT, CONFIDENCE_BIAS, *_LAYER_TENSORS,
            *DOMINO_GRU, DOMINO_INPUT, DOMINO_OUTPUT,
        )
    },
}  # fmt: skip

_HEAD_TYPES = ("vanilla", "gated", "rnn")
# vLLM uses the last name for both formats.
_ARCHITECTURES = ("DSparkSpeculator", "DSparkDraftModel", "Qwen3DSparkModel")


@dataclass(frozen=True)
class DSparkConfig(BlockHeadConfig):
    """Shape of a DSpark or Domino head.

    `markov_rank` is r of the Markov head, 0 without one, or the rank of Domino's correction.
    `markov_head_type` is "vanilla", "gated", "rnn" or "domino". `gru_hidden_dim` is the state size
    of Domino's GRU, and its first `pure_draft_prefix_len` depths are not corrected.
    `confidence_size` is the number of inputs of the confidence head, 0 without one.
    """

    markov_rank: int = 0
    confidence_size: int = 0
    markov_head_type: str = "vanilla"
    gru_hidden_dim: int = 0
    pure_draft_prefix_len: int = 0

    renamed_tensors: ClassVar[Mapping[str, str]] = OTHER_NAMES

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], *, num_target_layers: int | None = None) -> Self:
        """Returns the config from a parsed `config.json`; see `BlockHeadConfig.from_dict`."""
        own = stated_values(raw, MARKOV_KEYS)
        block = BlockHeadConfig.from_dict(
            _block_part(raw, own), num_target_layers=num_target_layers
        )
        if _is_domino(raw, own):
            return cls(**vars(block), **_domino_values(own, block))
        rank = own.get("markov_rank") or 0
        require(rank == 0 or is_size(rank), "markov_rank", rank, f"an integer from 0 to {MAX_SIZE}")
        kind = str(own.get("markov_head_type") or "vanilla").lower()
        require(
            rank == 0 or kind in _HEAD_TYPES,
            "markov_head_type",
            kind,
            f"one of {_HEAD_TYPES} (others are unknown)",
        )
        require(
            rank == 0 or kind != "rnn" or block.sample_from_anchor,
            "sample_from_anchor",
            block.sample_from_anchor,
            "true (a recurrent Markov head is trained from the anchor's slot)",
        )
        size = _confidence_inputs(own, block.hidden_size, rank)
        return cls(
            **vars(block),
            markov_rank=rank,
            confidence_size=size,
            markov_head_type=kind if rank else "vanilla",
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns DeepSpec's `config.json` object, which `from_dict` reads back unchanged."""
        config = super().to_dict()
        # Readers take a Markov head without this field to sample from the anchor's slot.
        config["dflash_config"]["sample_from_anchor"] = self.sample_from_anchor
        if self.markov_head_type == "domino":
            own = {"projector_type": "domino", "emb_dim": self.markov_rank}
            own |= {key: getattr(self, key) for key in ("gru_hidden_dim", "pure_draft_prefix_len")}
            config["dflash_config"].update(own)
            return {**config, "architectures": [DOMINO_ARCHITECTURE]}
        return {**config, "architectures": ["Qwen3DSparkModel"], **self._markov_fields()}

    def to_speculators(self, target: HeadTarget) -> dict[str, Any]:
        return {
            **super().to_speculators(target),
            **head_fields("dspark", "DSparkDraftModel", self.num_draft_tokens, target),
            **self._markov_fields(),
        }

    def _markov_fields(self) -> dict[str, Any]:
        return {
            "markov_rank": self.markov_rank,
            "markov_head_type": self.markov_head_type,
            "enable_confidence_head": self.confidence_size > 0,
            "confidence_head_with_markov": self.confidence_size > self.hidden_size,
        }

    @property
    def extra_tensors(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        hidden, rank, state = self.hidden_size, self.markov_rank, self.gru_hidden_dim
        if self.markov_head_type == "domino":
            shapes |= zip(DOMINO_GRU, ((3 * state, hidden), (3 * state, state)), strict=True)
            shapes[DOMINO_INPUT] = (rank, hidden + state)
            shapes[DOMINO_OUTPUT] = (self.draft_vocab_size, rank)
        elif rank:
            # W_1 has a row per target token, W_2 per draft id.
            shapes[MARKOV_INPUT] = (self.vocab_size, rank)
            shapes[MARKOV_OUTPUT] = (self.draft_vocab_size, rank)
        if layer := MARKOV_LAYERS.get(self.markov_head_type):
            rows = layer.outputs * rank
            shapes[f"{layer.name}.weight"] = (rows, sum(layer.widths(rank, hidden)))
            shapes[f"{layer.name}.bias"] = (rows,)
        if self.confidence_size:
            shapes[CONFIDENCE_WEIGHT] = (1, self.confidence_size)
            shapes[CONFIDENCE_BIAS] = (1,)
        return shapes


def _is_domino(raw: Mapping[str, Any], own: Mapping[str, Any]) -> bool:
    return _names_domino(raw) or own.get("projector_type") == "domino"


def _names_domino(raw: Mapping[str, Any]) -> bool:
    stated = raw.get("architectures")
    return isinstance(stated, list) and DOMINO_ARCHITECTURE in stated


def _domino_values(own: Mapping[str, Any], block: BlockHeadConfig) -> dict[str, Any]:
    """Returns the fields of a Domino head beside the block's."""
    for key in ("markov_rank", "enable_confidence_head", "use_confidence_head"):
        require(not own.get(key), key, own.get(key), "absent or 0 in a Domino head")
    for key in ("emb_dim", "gru_hidden_dim"):
        require_size(key, own.get(key))
    prefix, most = own.get("pure_draft_prefix_len", 0), block.num_draft_tokens - 1
    require(
        is_integer(prefix) and 0 <= prefix <= most,
        "pure_draft_prefix_len",
        prefix,
        f"an integer from 0 to {most}",
    )
    return {
        "markov_head_type": "domino",
        "markov_rank": own["emb_dim"],
        "gru_hidden_dim": own["gru_hidden_dim"],
        "pure_draft_prefix_len": prefix,
    }


def _confidence_inputs(own: Mapping[str, Any], hidden: int, rank: int) -> int:
    """Returns the number of inputs of the confidence head, 0 without one."""
    stated = own.get("enable_confidence_head")
    if stated is None:
        # SpecForge creates the head if its loss has a weight.
        stated = own.get("use_confidence_head") or (own.get("confidence_head_alpha") or 0) > 0
    if not stated:
        return 0
    # `use_confidence_head` is Model-Optimizer's flag, whose head always reads the Markov row.
    with_markov = own.get("confidence_head_with_markov", own.get("use_confidence_head"))
    return hidden + (rank if with_markov else 0)


def _block_part(raw: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config of the block head without the Markov head, for its own reader."""
    part = as_dflash(raw, MARKOV_KEYS, DOMINO_ARCHITECTURE)
    format_of = raw.get("speculators_model_type")
    require(
        format_of != "domino",
        "speculators_model_type",
        format_of,
        "'dspark' (the tensors logits_correction.* of speculators' Domino heads are not read)",
    )
    if format_of == "dspark":
        stated = raw.get("architectures") or []
        require(
            all(name in _ARCHITECTURES for name in stated),
            "architectures",
            stated,
            f"{', '.join(_ARCHITECTURES)} in speculators' format",
        )
        part["speculators_model_type"] = "dflash"
        part["architectures"] = ["DFlashSpeculator"]
        return part
    projector = own.get("projector_type")
    require(
        projector in (None, "dspark", "domino", "dflash"),
        "projector_type",
        projector,
        "'dspark' or 'domino' (others draft in another way)",
    )
    if _names_domino(raw):
        legal = f"absent or 'domino' in a {DOMINO_ARCHITECTURE}"
        require(projector in (None, "domino"), "projector_type", projector, legal)
    if _is_domino(raw, own):
        return part
    stated = [source.get(flag) for source in (raw, block_containers(raw)) for flag in ANCHOR_FLAGS]
    is_dspark = projector == "dspark" or own.get("markov_rank")
    if is_dspark and all(flag is None for flag in stated):
        # SpecForge and DeepSpec train all DSpark heads in this way and vLLM drafts in this way. The
        # architecture may be DFlash's.
        part["sample_from_anchor"] = True
    return part
