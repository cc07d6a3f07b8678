# SPDX-License-Identifier: Apache-2.0
"""DeLS and DDTree drafters over tiny checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.unit.methods.block.tiny_drafters import VOCAB, tiny_drafter
from vllm_specplug.drafting.drafter import Drafter
from vllm_specplug.methods.dels.resolve import DelsSettings


def load_drafter(
    cls: type[Drafter], folder: Path, weights: tuple[float, ...], **options: Any
) -> Any:
    local = DelsSettings(
        **{
            "path": str(folder / "local" / "model.safetensors"),
            "unigram_path": str(folder / "local" / "unigram.safetensors"),
            "alpha": weights, "beta": weights, "anchor_input": False,
            "num_candidates": VOCAB, "gate_table_bytes": 1 << 20, **options,
        }
    )  # fmt: skip
    return tiny_drafter(cls, folder / "head", local)
