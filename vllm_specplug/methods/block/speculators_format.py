# SPDX-License-Identifier: Apache-2.0
"""The format of the library speculators, which trains and loads draft heads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from vllm_specplug.drafting.checkpoint_files import read_json_object
from vllm_specplug.methods.block.layer_config import written_windows

# The release whose format is written.
VERSION = "0.9.0"
_LAYER = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "rms_norm_eps", "attention_bias",
)  # fmt: skip


@dataclass(frozen=True)
class HeadTarget:
    """The target that a head is written for: a folder or name by which speculators loads it, and
    the architectures of its config."""

    name: str
    architectures: tuple[str, ...]

    @classmethod
    def of(cls, folder: Path, config: Any, target_ids: torch.Tensor | None, option: str) -> Self:
        """Returns the target in `folder`, for a head that drafts `target_ids`.

        Args:
            option: what asked for the format.

        Raises:
            ValueError: if speculators cannot load the head.
        """
        unlike = unlike_speculators(config, target_ids)
        if unlike:
            raise ValueError(
                f"{option} with {unlike} in the format of speculators; leave {option} out"
            )
        config = read_json_object(folder / "config.json", "a target's config")
        return cls(str(folder), tuple(config.get("architectures") or ()))


def unlike_speculators(config: Any, target_ids: torch.Tensor | None) -> str:
    """Returns why speculators cannot load a head: field, value and what it supports; empty if it
    can."""
    wrong = {
        "target_hidden_size": (config.target_hidden_size, config.hidden_size),
        "partial_rotary_factor": (config.partial_rotary_factor, 1),
    }
    for name, (value, legal) in wrong.items():
        if value != legal:
            return f"{name} = {value}, legal: {legal}"
    # It takes the LM head's rows of a mask over the vocabulary.
    if target_ids is not None and bool((target_ids.diff() <= 0).any()):
        return "d2t of tokens in another order, legal: ascending tokens"
    return ""


def layer_fields(config: Any, model_type: str, windows: tuple[int | None, ...]) -> dict[str, Any]:
    """Returns `transformer_layer_config` of a head whose layers are those of `model_type`."""
    longest = config.max_position_embeddings
    return {
        "model_type": model_type,
        **{name: getattr(config, name) for name in _LAYER},
        "rope_parameters": {
            "rope_type": "default",
            **(config.rope_scaling or {}),
            "rope_theta": config.rope_theta,
        },
        **({"max_position_embeddings": longest} if longest else {}),
        **written_windows(windows),
        "use_sliding_window": any(window is not None for window in windows),
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }


def head_fields(kind: str, architecture: str, depth: int, target: HeadTarget) -> dict[str, Any]:
    """Returns the fields that heads of every `kind` have; `depth` is the number of tokens that
    they draft at once."""
    return {
        "architectures": [architecture],
        "speculators_model_type": kind,
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": depth}],
            "verifier": {"name_or_path": target.name, "architectures": [*target.architectures]},
        },
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def token_mask(target_ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Returns `t2d`, bool [V]: whether each of the target's tokens is drafted."""
    mask = torch.zeros(vocab_size, dtype=torch.bool)
    mask[target_ids.cpu()] = True
    return mask


def smaller_vocabulary(target_ids: torch.Tensor | None, vocab_size: int) -> torch.Tensor | None:
    """Returns ascending draft tokens; None for the whole vocabulary, which has no map."""
    return None if target_ids is not None and len(target_ids) == vocab_size else target_ids
