# SPDX-License-Identifier: Apache-2.0
"""The parts of a target that training needs: config, embedding, LM head, single layers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open


@dataclass(frozen=True)
class TargetTables:
    """embed_tokens [V, H], lm_head [V, H] and final_norm [H] of a target, frozen."""

    config: dict[str, Any]
    embed_tokens: torch.Tensor
    lm_head: torch.Tensor
    final_norm: torch.Tensor


class TargetWeights:
    """Named tensors of a Llama-like target folder, read one at a time."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        if not (self.folder / "config.json").is_file():
            raise ValueError(
                f"target {str(folder)!r} has no config.json; give the folder of a "
                "Hugging Face model"
            )
        self.config = json.loads((self.folder / "config.json").read_text(encoding="utf-8"))
        self._files: dict[str, Path] = {}
        for path in sorted(self.folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as handle:
                self._files.update(dict.fromkeys(handle.keys(), path))
        if not self._files:
            raise ValueError(
                f"target {str(folder)!r} has no *.safetensors; training reads weights "
                "from safetensors only"
            )

    @property
    def end_token_ids(self) -> list[int]:
        """Tokens that end a turn, by the config: none, one or several."""
        ids = self.config.get("eos_token_id")
        return ids if isinstance(ids, list) else [] if ids is None else [ids]

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def get(self, name: str) -> torch.Tensor:
        """One tensor by its full name."""
        if name not in self._files:
            raise ValueError(
                f"target {str(self.folder)!r} has no tensor {name!r}; training reads "
                "Llama-like models (model.layers.i.self_attn.q_proj.weight, ...)"
            )
        with safe_open(self._files[name], framework="pt") as handle:
            return handle.get_tensor(name)

    def tables(self) -> TargetTables:
        """The frozen tables of the draft head."""
        embed = self.get("model.embed_tokens.weight")
        head = self.get("lm_head.weight") if "lm_head.weight" in self else embed
        return TargetTables(self.config, embed, head, self.get("model.norm.weight"))
