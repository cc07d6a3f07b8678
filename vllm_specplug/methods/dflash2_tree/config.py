# SPDX-License-Identifier: Apache-2.0
"""Configuration of a DFlash2 head: a block head's config, and the candidate selector's values.

It reads `config.json` files of z-lab, SpecForge and speculators. `methods.block.config` reads and
checks the block head's part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from vllm_specplug.drafting.checkpoint_files import is_positive, is_size
from vllm_specplug.drafting.head_config import require, require_size
from vllm_specplug.methods.block.config import BlockHeadConfig
from vllm_specplug.methods.block.recognise import (
    SELECTOR_ARCHITECTURE,
    SELECTOR_KEYS,
    as_dflash,
    stated_values,
)
from vllm_specplug.methods.local.settings import LOCAL_CANDIDATES

_SCALES = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")
PREDECESSORS = "candidate_selector.predecessor_codebook"
SUCCESSORS = "candidate_selector.successor_codebook"
PROJECTION = "candidate_selector.hidden_projection.weight"


@dataclass(frozen=True)
class DFlash2Config(BlockHeadConfig):
    """Shape of a DFlash2 head.

    `selector_rank` is r of the selector, and `selector_top_k` the number of candidates of a depth.
    The block's scores are multiplied by `output_multiplier`, then capped to
    `final_logit_softcapping` * tanh(score / `final_logit_softcapping`) unless that is 0.
    """

    selector_rank: int = 0
    selector_top_k: int = 0
    output_multiplier: float = 1.0
    final_logit_softcapping: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_size("conv_kernel_size", self.conv_kernel_size, self.block_size)
        group = self.conv_group_size
        require(
            is_size(group) and self.hidden_size % group == 0,
            "conv_group_size",
            group,
            f"a divisor of hidden_size = {self.hidden_size}",
        )
        require_size("selector_rank", self.selector_rank)
        # The selector gathers a row of a codebook for each candidate of each slot.
        most = min(LOCAL_CANDIDATES, self.draft_vocab_size)
        require_size("selector_top_k", self.selector_top_k, most)
        for name in ("input_embedding_scale", "output_multiplier"):
            value = getattr(self, name)
            require(is_positive(value), name, value, "a positive number")
        cap = self.final_logit_softcapping
        require(
            cap == 0 or is_positive(cap), "final_logit_softcapping", cap, "0 or a positive number"
        )

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], *, num_target_layers: int | None = None) -> Self:
        """Returns the config from a parsed `config.json`; see `BlockHeadConfig.from_dict`."""
        block = BlockHeadConfig.from_dict(_block_part(raw), num_target_layers=num_target_layers)
        own = stated_values(raw, SELECTOR_KEYS)
        # As in vLLM: a top-level value is of the target config that the head was made from.
        inner = raw.get("dflash_config")
        inner = inner if isinstance(inner, Mapping) else {}
        for key in _SCALES:
            own.pop(key, None)
            if inner.get(key) is not None:
                own[key] = inner[key]
        projector = own.pop("projector_type", "dflash2")
        require(projector == "dflash2", "projector_type", projector, "absent or 'dflash2'")
        return cls(**{**vars(block), **own})

    def to_dict(self) -> dict[str, Any]:
        """Returns a z-lab `config.json` object, which `from_dict` reads back unchanged."""
        config = super().to_dict()
        own = {key: getattr(self, key) for key in SELECTOR_KEYS if hasattr(self, key)}
        config["dflash_config"].update(own)
        return {**config, "architectures": [SELECTOR_ARCHITECTURE]}

    @property
    def extra_tensors(self) -> dict[str, tuple[int, ...]]:
        # Both codebooks have a row per target token.
        codebook = (self.vocab_size, self.selector_rank)
        projection = (self.selector_rank, self.hidden_size)
        return {PREDECESSORS: codebook, SUCCESSORS: codebook, PROJECTION: projection}


def _block_part(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config of the block head, for its own reader."""
    part = as_dflash(raw, SELECTOR_KEYS, SELECTOR_ARCHITECTURE)
    if part.get("speculators_model_type") == "dflash2":
        part["speculators_model_type"] = "dflash"
    return part
