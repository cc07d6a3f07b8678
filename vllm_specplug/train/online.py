# SPDX-License-Identifier: Apache-2.0
"""The target beside the trainer: its states are computed when a step needs them, and not stored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from vllm_specplug.train.features import (
    TOKENS_PER_BATCH,
    Features,
    FeatureSequence,
    TokenSequence,
    forward_features,
    length_batches,
)


class OnlineFeatures(Features):
    """Answers as `FeatureSequence`, like a `FeatureStore` of the same answers.

    Args:
        model: the frozen target; None for a subclass that does not run it.
        device: of the states of a step's sequences. Sequences read by index have states on the CPU,
            as stored sequences do.
        is_sharded: whether processes share the target's layers, so that all of them must read
            sequences at the same time.
    """

    runs_target: ClassVar[bool] = True
    """Whether `forward` runs the target."""
    reads_layers: ClassVar[bool] = True
    """Whether a step reads outputs of the target's layers, not only its final states."""

    def __init__(
        self,
        folder: Path,
        sequences: Iterable[TokenSequence],
        model: nn.Module | None,
        target_layer_ids: tuple[int, ...],
        device: torch.device | str = "cpu",
        is_sharded: bool = False,
    ):
        self.folder, self.model, self.device = folder, model, device
        self.is_sharded = is_sharded
        self.target_layer_ids = target_layer_ids
        self._sequences = list(sequences)

    def __len__(self) -> int:
        return len(self._sequences)

    def __getitem__(self, index: int) -> Any:
        return self._run([self.text(index)], "cpu", is_training=False)[0]

    def text(self, index: int) -> TokenSequence:
        stored = self._sequences[index]
        return replace(stored, tokens=stored.tokens.long(), index=index)

    def with_states(self, sequences: list[Any]) -> list[Any]:
        return self._run(sequences, self.device, is_training=True)

    def answers(self) -> Iterator[torch.Tensor]:
        for stored in self._sequences:
            yield stored.tokens[stored.prompt_len :]

    def stored_bytes(self) -> int:
        """Returns what the states of all sequences would take on a disk."""
        one = self[0]
        tensors = (part for part in vars(one).values() if isinstance(part, torch.Tensor))
        states = sum(part.nbytes for part in tensors if part.dtype == torch.bfloat16)
        tokens = sum(len(sequence.tokens) for sequence in self._sequences)
        return tokens * states // len(one.tokens)

    def source_names(self) -> Iterable[str]:
        return (stored.source for stored in self._sequences)

    def _run(
        self, texts: Sequence[TokenSequence], device: torch.device | str, is_training: bool
    ) -> list[Any]:
        made: list[Any] = [None] * len(texts)
        batches = list(length_batches([len(text.tokens) for text in texts], TOKENS_PER_BATCH))
        if self.is_sharded:
            # A process that runs fewer batches than another would leave it waiting for weights.
            most = torch.tensor(len(batches), device=self.device)
            dist.all_reduce(most, dist.ReduceOp.MAX)
            batches += batches[:1] * (int(most) - len(batches))
        for rows in batches:
            batch = self.forward([texts[row] for row in rows], device, is_training)
            for row, sequence in zip(rows, batch, strict=True):
                made[row] = sequence
        return made

    def forward(
        self, texts: Sequence[TokenSequence], device: torch.device | str, is_training: bool
    ) -> list[Any]:
        """Returns sequences with their states on a device. A method that needs other states, for
        instance only in training, overrides this."""
        assert self.model is not None
        tokens = [text.tokens for text in texts]
        aux, hidden = forward_features(self.model, tokens, self.target_layer_ids, device)
        return [
            FeatureSequence(text.tokens, text.prompt_len, a, h, text.source)
            for text, a, h in zip(texts, aux, hidden, strict=True)
        ]
