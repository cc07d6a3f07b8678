# SPDX-License-Identifier: Apache-2.0
"""TokenSwift's three chained residual heads, and their checkpoints (safetensors only).

h_0 is the output of the target's last decoder layer, before its final norm, at the position of
the last known token t. The base logits lm_head(norm(h_0)) predict token t + 1; head i adds

    h_i = h_{i-1} + W_i RMSNorm_in,i(h_{i-1}),    logits_i = lm_head(RMSNorm_post,i(h_i)),

and predicts token t + 1 + i (TokenSwift, arXiv 2502.18890, section 3.2).

Published checkpoints hold the whole target; only `model.medusa_layers.*` is read from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from vllm_specplug.drafting.checkpoint_files import (
    MAX_SIZE,
    WEIGHTS_NAME,
    check_tensors,
    draft_token_ids,
    is_positive,
    is_size,
    module_shapes,
    read_json_object,
    tensors_to_save,
    write_checkpoint,
)
from vllm_specplug.drafting.head_config import config_field
from vllm_specplug.methods.block.checkpoint import read_tensors

_MAP = "d2t"
_READ = ("medusa_layers.", _MAP)


@dataclass(frozen=True)
class TokenSwiftConfig:
    """Shape of the heads.

    `draft_vocab_size` is smaller than `vocab_size` where the heads only score the target tokens
    that the checkpoint's `d2t` names, an addition to the published format.
    """

    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    medusa_heads: int = 3
    rms_norm_eps: float = 1e-6

    @classmethod
    def from_pretrained(cls, directory: str | Path) -> TokenSwiftConfig:
        """Reads config.json.

        Raises:
            ValueError: when the file or one of its fields is missing or out of range.
        """
        path = Path(directory) / "config.json"
        if not path.is_file():
            raise ValueError(
                f"draft head {str(directory)!r} has no config.json; give the folder of a "
                "TokenSwift checkpoint"
            )
        data = read_json_object(path, "a config")
        missing = [n for n in ("hidden_size", "vocab_size", "medusa_heads") if n not in data]
        if missing:
            raise ValueError(
                f"{path} has no {', '.join(missing)}; legal: the config of a TokenSwift "
                'checkpoint, which has "medusa_heads". Use heads made for method tokenswift'
            )
        config = cls(
            hidden_size=data["hidden_size"],
            vocab_size=data["vocab_size"],
            draft_vocab_size=data.get("draft_vocab_size") or data["vocab_size"],
            medusa_heads=data["medusa_heads"],
            rms_norm_eps=data.get("rms_norm_eps", 1e-6),
        )
        sizes = f"an integer from 1 to {MAX_SIZE}"
        for name, test, legal in (
            ("hidden_size", is_size, sizes),
            ("vocab_size", is_size, sizes),
            ("draft_vocab_size", lambda n: is_size(n) and n <= config.vocab_size, "1..vocab_size"),
            ("medusa_heads", lambda n: is_size(n) and n <= 16, "1..16"),
            ("rms_norm_eps", is_positive, "a number > 0"),
        ):
            value = getattr(config, name)
            if not test(value):
                raise ValueError(
                    f"{path}: {name} = {repr(value)[:200]}, legal: {legal}; use another checkpoint"
                )
        return config

    def to_dict(self) -> dict[str, Any]:
        """config.json of a checkpoint that only has heads."""
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
        """h_0 [T, H] -> what each head gives the LM head, [K, T, H]."""
        outputs = []
        for head in self.medusa_layers:
            hidden = hidden + head.linear(head.input_layernorm(hidden))
            outputs.append(head.post_layernorm(hidden))
        return torch.stack(outputs)


def inspect_heads(directory: str | Path, target_config: Any) -> TokenSwiftConfig:
    """Checks heads against their target from config and tensor headers, reading no weights.

    Raises:
        ValueError: for heads of another target, missing or misshapen tensors, pickled weights.
    """
    config = TokenSwiftConfig.from_pretrained(directory)
    _check_target(config, target_config)
    _check_tensors(
        Path(directory), config, read_tensors(Path(directory), headers_only=True, prefixes=_READ)
    )
    return config


def load_heads(
    directory: str | Path, target_config: Any
) -> tuple[TokenSwiftHeads, torch.Tensor | None]:
    """Reads heads and checks them against their target.

    Args:
        directory: folder with config.json and safetensors; other tensors than the heads' are
            not read.
        target_config: the target's text config, with `hidden_size` and `vocab_size`.

    Returns:
        The heads, and int64 [draft_vocab] the target token of each draft id; None when the heads
        score the whole vocabulary.

    Raises:
        ValueError: see `inspect_heads`.
    """
    directory = Path(directory)
    config = TokenSwiftConfig.from_pretrained(directory)
    _check_target(config, target_config)
    tensors = read_tensors(directory, prefixes=_READ)
    _check_tensors(directory, config, tensors)
    target_ids = None
    if _MAP in tensors:
        target_ids = draft_token_ids(tensors.pop(_MAP), config.vocab_size)
    with torch.device("meta"):
        heads = TokenSwiftHeads(config)
    heads.load_state_dict(tensors, assign=True)
    heads.requires_grad_(False)
    return heads.eval(), target_ids


def save_heads(
    directory: str | Path,
    heads: TokenSwiftHeads,
    *,
    target_ids: torch.Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Path:
    """Writes config.json and model.safetensors with the published tensor names.

    Both files are replaced atomically. Returns the weights' path.
    """
    directory = Path(directory)
    published = {f"model.{name}": tensor for name, tensor in heads.state_dict().items()}
    tensors = tensors_to_save(published, dtype)
    if target_ids is not None:
        assert len(target_ids) == heads.config.draft_vocab_size
        tensors[_MAP] = target_ids.cpu().long() - torch.arange(len(target_ids))
    return write_checkpoint(
        directory / WEIGHTS_NAME, directory / "config.json", tensors, heads.config.to_dict()
    )


def _check_target(config: TokenSwiftConfig, target: Any) -> None:
    for name in ("hidden_size", "vocab_size"):
        legal = int(config_field(target, name))
        if getattr(config, name) != legal:
            raise ValueError(
                f"draft head config: {name} = {getattr(config, name)}, legal: {legal} (the "
                "target's); these heads were trained for another target, use those made for it"
            )


def _check_tensors(
    directory: Path, config: TokenSwiftConfig, tensors: Mapping[str, torch.Tensor]
) -> None:
    expected = module_shapes(lambda: TokenSwiftHeads(config))
    if config.draft_vocab_size < config.vocab_size:
        expected[_MAP] = (config.draft_vocab_size,)
    check_tensors(f"draft head {str(directory)!r}", expected, tensors)


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """[..., H] with the norm's weight [H]."""
    return F.rms_norm(hidden, (hidden.shape[-1],), weight, eps)
