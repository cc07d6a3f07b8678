# SPDX-License-Identifier: Apache-2.0
"""The draft vocabulary of a head: which of the target's tokens it can draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import convert_to_fp32, send_to_device
from safetensors import safe_open

from vllm_specplug.train.features import Features

VOCABULARY_NAME = "draft_ids.pt"
# Rows whose logits are computed at once.
_ROWS = 1024


@dataclass(frozen=True)
class DraftTables:
    """The target's embeddings [V, H], the rows of its LM head for the draft vocabulary [V', H], and
    their tokens, int64 [V'] on the CPU."""

    embed_tokens: torch.Tensor
    lm_head: torch.Tensor
    target_ids: torch.Tensor

    def to(self, to: torch.device | torch.dtype | str) -> DraftTables:
        """Returns a copy with both tables on a device or of a dtype."""
        return DraftTables(self.embed_tokens.to(to), self.lm_head.to(to), self.target_ids)

    def autocast(self) -> torch.autocast:
        """Returns the context in which forwards multiply in the tables' dtype."""
        is_low = self.lm_head.dtype == torch.bfloat16
        return torch.autocast(self.lm_head.device.type, torch.bfloat16, enabled=is_low)

    def inputs(self, batch: Any) -> Any:
        """Returns a batch on the device of the tables, and in float32 if they are."""
        moved = send_to_device(batch, self.lm_head.device)
        return convert_to_fp32(moved) if self.lm_head.dtype == torch.float32 else moved

    def draft_ids(self) -> torch.Tensor:
        """Returns the draft id of each target token, int64 [V]; -1 for others."""
        ids = torch.full((len(self.embed_tokens),), -1, dtype=torch.int64)
        ids[self.target_ids] = torch.arange(len(self.target_ids))
        return ids

    def likeliest(
        self, hidden: torch.Tensor, added: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Returns the draft id with the largest logit of final hidden states [..., H], int64.

        Args:
            added: vectors [..., r] and a table [V', r], whose products are added to the logits.
        """
        rows = hidden.to(self.lm_head.dtype).flatten(0, -2)
        best = []
        # Logits of all rows would not fit beside a training.
        for at in range(0, len(rows), _ROWS):
            logits = rows[at : at + _ROWS] @ self.lm_head.t()
            if added is not None:
                vectors, table = (given.to(rows.dtype) for given in added)
                part = vectors.flatten(0, -2)[at : at + _ROWS]
                logits = torch.addmm(logits, part, table.t())
            best.append(logits.argmax(-1))
        return torch.cat(best).view(hidden.shape[:-1])


def draft_vocabulary(
    store: Features, size: int, vocab_size: int, always: Sequence[int] = ()
) -> torch.Tensor:
    """Returns the `size` most frequent answer tokens including `always` (end-of-turn ids): int64
    [size], ascending."""
    # Low ids, which are frequent merges of a BPE vocabulary, complete the list of a small corpus.
    ranked = answer_token_counts(store, vocab_size).argsort(descending=True, stable=True)
    chosen = list(dict.fromkeys([*always, *ranked.tolist()]))[:size]
    return torch.tensor(sorted(chosen), dtype=torch.int64)


def answer_token_counts(store: Features, vocab_size: int) -> torch.Tensor:
    """Returns how often each token is in an answer, int64 [vocab_size].

    Raises:
        ValueError: for a token outside the vocabulary.
    """
    counts = np.zeros(vocab_size, np.int64)
    for answer in store.answers():
        tokens = np.asarray(answer)
        if tokens.max(initial=0) >= vocab_size:
            raise ValueError(
                f"{store.folder} holds token {tokens.max()}, legal: 0..{vocab_size - 1} (the "
                "target's vocabulary); it was made with another tokenizer"
            )
        np.add.at(counts, tokens, 1)
    return torch.from_numpy(counts)


def vocabulary_coverage(store: Features, ids: torch.Tensor, vocab_size: int) -> float:
    """Returns the share of the answer tokens that are in `ids`."""
    counts = answer_token_counts(store, vocab_size)
    return float(counts[ids].sum() / counts.sum().clamp_min(1))


def vocabulary_of(folder: str) -> torch.Tensor:
    """Returns the target token of each draft id of a head, int64 [V'].

    Raises:
        ValueError: if the head drafts over the whole vocabulary, or cannot be read.
    """
    d2t: torch.Tensor | None = None
    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(file, framework="pt") as handle:
            if "d2t" in handle.keys():  # noqa: SIM118 - not a mapping
                d2t = handle.get_tensor("d2t")
    if d2t is None:
        raise ValueError(
            f"--vocab-from {folder!r} has no reduced draft vocabulary (tensor 'd2t'); leave it out "
            "or name another head"
        )
    return d2t.to(torch.int64) + torch.arange(len(d2t))
