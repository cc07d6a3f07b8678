# SPDX-License-Identifier: Apache-2.0
"""TokenSwift's three chained residual heads, and their checkpoints (safetensors only).

h_0 is the output of the target's last decoder layer, before its final norm, at the position of
the last known token t. The base logits lm_head(norm(h_0)) predict token t + 1; head i adds

    h_i = h_{i-1} + W_i RMSNorm_in,i(h_{i-1}),    logits_i = lm_head(RMSNorm_post,i(h_i)),

and predicts token t + 1 + i (TokenSwift, arXiv 2502.18890, section 3.2).

Published checkpoints hold the whole target; only `model.medusa_layers.*` is read from them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vllm_specplug.drafting.checkpoint_files import (
    HeadTables,
    check_tensors,
    is_positive,
    load_module,
    module_shapes,
    open_config,
    save_head,
)
from vllm_specplug.drafting.head_config import check_target, require, require_size, required_size
from vllm_specplug.methods.block.checkpoint import read_tensors

_MAP = "d2t"
_READ = ("medusa_layers.", _MAP)


@dataclass(frozen=True)
class TokenSwiftConfig:
    """Shape of the heads.

    `draft_vocab_size` is smaller than `vocab_size` if the heads only score the target tokens that
    the checkpoint's `d2t` names, an addition to the published format.
    """

    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    medusa_heads: int = 3
    rms_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        require_size("draft_vocab_size", self.draft_vocab_size, self.vocab_size)
        require_size("medusa_heads", self.medusa_heads, 16)
        require(
            is_positive(self.rms_norm_eps), "rms_norm_eps", self.rms_norm_eps, "a positive number"
        )

    @classmethod
    def from_pretrained(cls, directory: str | Path) -> TokenSwiftConfig:
        """Reads config.json.

        Raises:
            ValueError: if the file or one of its fields is missing or out of range.
        """
        with open_config(directory) as raw:
            vocab_size = required_size(raw, "vocab_size")
            return cls(
                hidden_size=required_size(raw, "hidden_size"),
                vocab_size=vocab_size,
                draft_vocab_size=raw.get("draft_vocab_size") or vocab_size,
                medusa_heads=required_size(raw, "medusa_heads"),
                rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
            )

    def to_dict(self) -> dict[str, Any]:
        """Returns the config.json object of a checkpoint that only has heads."""
        return {"architectures": ["TokenSwiftHeads"], "model_type": "tokenswift", **asdict(self)}


class ResidualHead(nn.Module):
    """One head's parameters, under their published names."""

    def __init__(self, config: TokenSwiftConfig) -> None:
        super().__init__()
        self.linear = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class TokenSwiftHeads(nn.Module):
    """All heads."""

    def __init__(self, config: TokenSwiftConfig) -> None:
        super().__init__()
        self.config = config
        # Any: torch types what a list holds as plain modules.
        self.medusa_layers: Any = nn.ModuleList(
            ResidualHead(config) for _ in range(config.medusa_heads)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """h_0 [T, H] -> each head's input of the LM head [K, T, H]."""
        outputs = []
        for head in self.medusa_layers:
            hidden = hidden + head.linear(head.input_layernorm(hidden))
            outputs.append(head.post_layernorm(hidden))
        return torch.stack(outputs)


def inspect_heads(directory: str | Path, target_config: Any) -> TokenSwiftConfig:
    """Checks heads against their target from config and tensor headers, without the weights.

    Raises:
        ValueError: for heads of another target, missing or misshapen tensors, pickled weights.
    """
    return _read(Path(directory), target_config, headers_only=True)[0]


def load_heads(
    directory: str | Path, target_config: Any
) -> tuple[TokenSwiftHeads, torch.Tensor | None]:
    """Reads heads and checks them against their target.

    Args:
        directory: folder with config.json and safetensors. Only the heads' tensors are read.
        target_config: the target's text config, with `hidden_size` and `vocab_size`.

    Returns:
        The heads, and the target token of each draft id int64 [V']; None for the full vocabulary.

    Raises:
        ValueError: see `inspect_heads`.
    """
    config, tensors = _read(Path(directory), target_config, headers_only=False)
    heads = load_module(lambda: TokenSwiftHeads(config), tensors)
    return heads, HeadTables.of(tensors, config.vocab_size).target_ids


def save_heads(
    directory: str | Path,
    heads: TokenSwiftHeads,
    *,
    target_ids: torch.Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Path:
    """Writes heads with the published tensor names; see `save_head`."""
    published = {f"model.{name}": tensor for name, tensor in heads.state_dict().items()}
    return save_head(
        directory, published, heads.config.to_dict(), target_ids=target_ids, dtype=dtype
    )


def _read(
    directory: Path, target_config: Any, headers_only: bool
) -> tuple[TokenSwiftConfig, dict[str, torch.Tensor]]:
    config = TokenSwiftConfig.from_pretrained(directory)
    check_target(config, target_config)
    tensors = read_tensors(directory, headers_only=headers_only, prefixes=_READ)
    expected = module_shapes(lambda: TokenSwiftHeads(config))
    if config.draft_vocab_size < config.vocab_size:
        expected[_MAP] = (config.draft_vocab_size,)
    check_tensors(f"draft head {str(directory)!r}", expected, tensors)
    return config, tensors
