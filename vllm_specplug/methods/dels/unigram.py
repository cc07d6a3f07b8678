# SPDX-License-Identifier: Apache-2.0
"""The unigram prior of DeLS-Spec: how often each token is a training target.

Both scores of the fusion contain the frequency of a token, so its prior is subtracted once. Only
supervised tokens (the loss mask) are counted, and counts are smoothed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from vllm_specplug.drafting.checkpoint_files import MAX_SIZE, write_safetensors
from vllm_specplug.drafting.pickle_files import check_plain, load_pickle

logger = logging.getLogger(__name__)

UNIGRAM_NAME = "unigram.safetensors"
# Added to every count, so that a token that was never seen has a probability.
_SMOOTHING = 1.0
RELEASED_UNIGRAM_NAME = "loss_mask_unigram.pt"


def log_prior(counts: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Returns natural log-probabilities float32 [vocab_size] of smoothed counts int64 [n].

    Counts are indexed by token id; tokens without a count have count 0.

    Raises:
        ValueError: for more counts than tokens.
    """
    n = len(counts)
    if n > vocab_size:
        raise ValueError(
            f"unigram counts: {n} tokens, legal: at most {vocab_size} (the target's "
            "vocabulary); they were made with another tokenizer, count again with this one"
        )
    if n < vocab_size:
        logger.info("Unigram counts cover %d of %d tokens; the others have count 0", n, vocab_size)
    smoothed = torch.full((vocab_size,), _SMOOTHING, dtype=torch.float64)
    smoothed[:n] += counts
    return (smoothed / smoothed.sum()).log().float()


def save_unigram(path: str | Path, counts: torch.Tensor) -> Path:
    """Writes counts int64 [V] as safetensors, replaced atomically."""
    path = Path(path)
    return write_safetensors(path, {"counts": _checked(path, counts)})


def load_unigram(path: str | Path) -> torch.Tensor:
    """Returns the counts int64 [n] in our safetensors, or in a released `.pt` file (weights only).

    Raises:
        ValueError: for a file that cannot be read safely, or has no counts.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise ValueError(
            f"unigram counts {str(path)!r}: there is no such file; `specplug train dels` writes "
            "them beside the head"
        )
    counts: Any
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as handle:
                _check_length(path, handle.get_slice("counts").get_shape())
                counts = handle.get_tensor("counts")
        elif path.suffix == ".pt":
            counts = load_pickle(path, "it")["counts"]
            check_plain(path, "it", {"counts": counts})
        else:
            raise ValueError("legal: .safetensors, .pt")
    except Exception as error:  # safetensors and pickle have their own errors
        raise ValueError(_unreadable(path, error)) from None
    return _checked(path, counts)


def _unreadable(path: Path, error: Exception) -> str:
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return (
        f"unigram counts {str(path)!r} cannot be read ({reason}); legal: a tensor 'counts' [V] in "
        "safetensors or a weights-only .pt. `specplug train dels` writes them beside the head"
    )


def _check_length(path: Path, shape: Sequence[int]) -> None:
    if max(shape, default=0) > MAX_SIZE:
        raise ValueError(
            f"unigram counts {str(path)!r}: {list(shape)}, legal: integers [V] of at most "
            f"{MAX_SIZE} tokens"
        )


def _checked(path: Path, counts: torch.Tensor) -> torch.Tensor:
    kinds = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    if counts.dim() != 1 or counts.dtype not in kinds or not len(counts):
        raise ValueError(
            f"unigram counts {str(path)!r}: {counts.dtype} {list(counts.shape)}, "
            "legal: integers [V]"
        )
    _check_length(path, counts.shape)
    counts = counts.to("cpu", torch.int64).contiguous()
    if int(counts.min()) < 0:
        raise ValueError(
            f"unigram counts {str(path)!r}: {int(counts.min())} is negative, legal: at least 0"
        )
    return counts
