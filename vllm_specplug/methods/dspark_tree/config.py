# SPDX-License-Identifier: Apache-2.0
"""Configuration of a DSpark head: a block head's config, and the Markov head's values.

It reads `config.json` files of DeepSpec, SpecForge, speculators and Model-Optimizer.
`methods.block.config` reads and checks the block head's part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from vllm_specplug.drafting.checkpoint_files import MAX_SIZE, is_size
from vllm_specplug.drafting.head_config import require
from vllm_specplug.methods.block.config import (
    ANCHOR_FLAGS,
    BlockHeadConfig,
    block_containers,
)
from vllm_specplug.methods.block.recognise import MARKOV_KEYS, stated_values, without_keys

MARKOV_INPUT = "markov_head.markov_w1.weight"
MARKOV_OUTPUT = "markov_head.markov_w2.weight"
CONFIDENCE_WEIGHT, CONFIDENCE_BIAS = "confidence_head.proj.weight", "confidence_head.proj.bias"
# Model-Optimizer's names of these tensors.
FLAT_NAMES = {
    "markov_w1.weight": MARKOV_INPUT,
    "markov_w2.weight": MARKOV_OUTPUT,
    "confidence_proj.weight": CONFIDENCE_WEIGHT,
    "confidence_proj.bias": CONFIDENCE_BIAS,
}

# vLLM uses the last name for both formats.
_ARCHITECTURES = ("DSparkSpeculator", "DSparkDraftModel", "Qwen3DSparkModel")


@dataclass(frozen=True)
class DSparkConfig(BlockHeadConfig):
    """Shape of a DSpark head.

    `markov_rank` is r of the Markov head, 0 without one. `confidence_size` is the number of inputs
    of the confidence head, 0 without one.
    """

    markov_rank: int = 0
    confidence_size: int = 0

    renamed_tensors: ClassVar[Mapping[str, str]] = FLAT_NAMES

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], *, num_target_layers: int | None = None) -> Self:
        """Returns the config from a parsed `config.json`; see `BlockHeadConfig.from_dict`."""
        own = stated_values(raw, MARKOV_KEYS)
        block = BlockHeadConfig.from_dict(
            _block_part(raw, own), num_target_layers=num_target_layers
        )
        rank = own.get("markov_rank") or 0
        require(rank == 0 or is_size(rank), "markov_rank", rank, f"an integer from 0 to {MAX_SIZE}")
        kind = own.get("markov_head_type") or "vanilla"
        require(
            rank == 0 or kind == "vanilla",
            "markov_head_type",
            kind,
            "'vanilla' (others read the block's hidden states at every node of a tree)",
        )
        size = _confidence_inputs(own, block.hidden_size, rank)
        return cls(**vars(block), markov_rank=rank, confidence_size=size)

    def to_dict(self) -> dict[str, Any]:
        """Returns DeepSpec's `config.json` object, which `from_dict` reads back unchanged."""
        config = super().to_dict()
        # Readers take a Markov head without this field to sample from the anchor's slot.
        config["dflash_config"]["sample_from_anchor"] = self.sample_from_anchor
        return {
            **config,
            "architectures": ["Qwen3DSparkModel"],
            "markov_rank": self.markov_rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": self.confidence_size > 0,
            "confidence_head_with_markov": self.confidence_size > self.hidden_size,
        }

    @property
    def extra_tensors(self) -> dict[str, tuple[int, ...]]:
        # W_1 has a row per target token, W_2 per draft id.
        shapes: dict[str, tuple[int, ...]] = {}
        if self.markov_rank:
            shapes[MARKOV_INPUT] = (self.vocab_size, self.markov_rank)
            shapes[MARKOV_OUTPUT] = (self.draft_vocab_size, self.markov_rank)
        if self.confidence_size:
            shapes[CONFIDENCE_WEIGHT] = (1, self.confidence_size)
            shapes[CONFIDENCE_BIAS] = (1,)
        return shapes


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
    part = without_keys(raw, MARKOV_KEYS)
    if raw.get("speculators_model_type") == "dspark":
        part["speculators_model_type"] = "dflash"
        _rename(part, "DFlashSpeculator")
        return part
    projector = own.get("projector_type")
    require(
        projector in (None, "dspark", "dflash"),
        "projector_type",
        projector,
        "'dspark' (others draft in another way)",
    )
    stated = [source.get(flag) for source in (raw, block_containers(raw)) for flag in ANCHOR_FLAGS]
    is_dspark = projector == "dspark" or own.get("markov_rank")
    if is_dspark and all(flag is None for flag in stated):
        # SpecForge and DeepSpec train all DSpark heads in this way and vLLM drafts in this way. The
        # architecture may be DFlash's.
        part["sample_from_anchor"] = True
    return part


def _rename(part: dict[str, Any], name: str) -> None:
    stated = part.get("architectures") or []
    for architecture in stated:
        require(
            architecture in _ARCHITECTURES,
            "architectures",
            stated,
            f"{', '.join(_ARCHITECTURES)} in speculators' format",
        )
    part["architectures"] = [name]
