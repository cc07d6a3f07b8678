# SPDX-License-Identifier: Apache-2.0
"""Prompts with answers as tokens: the data of local heads and of the unigram prior."""

from __future__ import annotations

import logging
import random
from dataclasses import replace
from pathlib import Path

import torch

from vllm_specplug.train.answers import (
    MIN_ANSWER_TOKENS,
    answer_shards,
    keep_answer,
    read_answers,
)
from vllm_specplug.train.features import (
    FeatureStore,
    SequenceStore,
    TokenSequence,
    count_sources,
)
from vllm_specplug.train.options import REPETITIVE_SHARE

logger = logging.getLogger(__name__)


class TextStore(SequenceStore):
    """The answers of a folder made by `specplug data generate`, or by `specplug data features`
    (which also holds the target's states).

    Args:
        min_supervised: shorter answers are skipped.
        repetitive_share: share of the answers ending in a loop that is kept. Features were
            filtered when they were made.

    Raises:
        ValueError: for a folder without answers and features, or without long enough answers.
    """

    def __init__(
        self,
        folder: str | Path,
        min_supervised: int = 2,
        repetitive_share: float = REPETITIVE_SHARE,
    ):
        self.folder = Path(folder)
        self.features: FeatureStore | None = None
        self._texts: list[TokenSequence] = []
        files = answer_shards(self.folder)
        if files:
            rng, left_out = random.Random(0), 0
            for answer in (a for path in files for a in read_answers(path)):
                is_kept = keep_answer(answer, rng, repetitive_share)
                if is_kept and len(answer.answer_ids) >= min_supervised:
                    self._texts.append(TokenSequence.of(answer))
                else:
                    left_out += 1
            self._length = len(self._texts)
        else:
            try:
                self.features = FeatureStore(folder)
            except ValueError:
                raise ValueError(
                    f"data folder {str(folder)!r} holds neither answers nor features; make them "
                    "with `specplug data generate` or `specplug data features`"
                ) from None
            shards = self.features.shards
            self._rows = [
                index
                for index, (shard, i) in enumerate(self.features.items)
                if self.features.length(index) - int(shards[shard].prompt_lens[i]) >= min_supervised
            ]
            self._length = len(self._rows)
            left_out = len(self.features) - self._length
        if left_out:
            logger.warning(
                "%s: %d of %d answers left out: shorter than %d tokens, or ending in a loop (a "
                "share of %s of those stays)",
                folder, left_out, left_out + self._length, max(min_supervised, MIN_ANSWER_TOKENS),
                repetitive_share,
            )  # fmt: skip
        if not self._length:
            raise ValueError(
                f"data folder {str(folder)!r} holds no answer of {min_supervised} tokens or more; "
                "make longer ones, or lower min_supervised"
            )

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> TokenSequence:
        if self.features is None:
            text = self._texts[index]
            return replace(text, tokens=text.tokens.long())
        row = self.features[self._rows[index]]
        return TokenSequence(row.tokens, row.prompt_len, row.source, hidden=row.hidden)

    def sources(self) -> dict[str, int]:
        """Returns the number of sequences by the first part of their source."""
        if self.features is None:
            return count_sources(text.source for text in self._texts)
        return self.features.sources(self._rows)

    def answer_counts(self, vocab_size: int) -> torch.Tensor:
        """Returns how often each token is supervised, int64 [vocab_size].

        Raises:
            ValueError: for a token outside the vocabulary.
        """
        counts = torch.zeros(vocab_size, dtype=torch.int64)
        for index in range(len(self)):
            sequence = self[index]
            answer = sequence.tokens[sequence.prompt_len :]
            if int(answer.max()) >= vocab_size:
                raise ValueError(
                    f"data folder {str(self.folder)!r} holds token {int(answer.max())}, legal: "
                    f"0..{vocab_size - 1} (the target's vocabulary); it was made with another "
                    "tokenizer"
                )
            counts += torch.bincount(answer, minlength=vocab_size)
        return counts
