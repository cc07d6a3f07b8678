# SPDX-License-Identifier: Apache-2.0
"""Training data of a local head, which predicts the token after each token of a block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch

from vllm_specplug.train.features import FeatureSequence, TokenSequence
from vllm_specplug.train.online import OnlineFeatures
from vllm_specplug.train.order import random_subset

TextSequence = TokenSequence | FeatureSequence


class Texts(OnlineFeatures):
    """Answers without states of the target, for a loss that reads only tokens."""

    runs_target: ClassVar[bool] = False
    reads_layers: ClassVar[bool] = False

    def forward(
        self, texts: Sequence[TokenSequence], device: torch.device | str, is_training: bool
    ) -> list[Any]:
        return list(texts)


class FinalStates(OnlineFeatures):
    """Answers with the target's final states only, for a loss that reads its distribution."""

    reads_layers: ClassVar[bool] = False


class LocalBatch(NamedTuple):
    """A blocks of L = block size - 1 inputs. tokens int64 [A, L]: the anchor and the tokens after
    it; labels int64 [A, L]: the token after each; valid bool [A, L]: whether that token exists;
    teacher [A * L, Ht] or None: the target's states that predict the labels."""

    tokens: torch.Tensor
    labels: torch.Tensor
    valid: torch.Tensor
    teacher: torch.Tensor | None


def local_anchors(sequence: TextSequence, limit: int, generator: torch.Generator) -> torch.Tensor:
    """Returns at most `limit` random anchors, int64 ascending: supervised positions whose next
    token is supervised too."""
    legal = torch.arange(sequence.prompt_len, len(sequence.tokens) - 1)
    return random_subset(legal, limit, generator)


def pack_local(
    sequences: Sequence[TextSequence], anchors: list[torch.Tensor], block_size: int
) -> LocalBatch:
    """Returns the blocks at the anchors of several sequences. Tokens past the end of a sequence
    repeat its last token and are not valid."""
    tokens, labels, valid, teacher = [], [], [], []
    for sequence, at in zip(sequences, anchors, strict=True):
        slots = at[:, None] + torch.arange(block_size)
        inside = slots[:, 1:] < len(sequence.tokens)
        slots = slots.clamp_max(len(sequence.tokens) - 1)
        tokens.append(sequence.tokens[slots[:, :-1]])
        labels.append(sequence.tokens[slots[:, 1:]])
        valid.append(inside)
        if isinstance(sequence, FeatureSequence):
            # Row p - 1 of the final hidden states predicts token p.
            teacher.append(sequence.hidden[(slots[:, 1:] - 1).flatten()])
    return LocalBatch(
        torch.cat(tokens),
        torch.cat(labels),
        torch.cat(valid),
        torch.cat(teacher) if teacher else None,
    )
