# SPDX-License-Identifier: Apache-2.0
"""The target's hidden states for its own answers, computed once and read as memory maps.

A shard is a folder of flat files over the concatenated tokens of its sequences (T tokens, n
sequences, L layers, Ht target hidden size):

    tokens.npy int32 [T] · offsets.npy int64 [n+1] · prompt_lens.npy int32 [n]
    aux.bf16 [T, L*Ht]    outputs of the selected layers, the head's context input
    hidden.bf16 [T, Ht]   the final normed hidden states: row p times the LM head gives the
                          teacher's distribution of token p + 1, over any draft vocabulary

Unlike top-k logits, the final hidden state keeps the whole distribution. It costs Ht values per
token, and a GEMM in each training step.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence, unpad_sequence

from vllm_specplug.train.answers import (
    MIN_ANSWER_TOKENS,
    Answer,
    finished_answers,
    keep_answer,
    read_answers,
)
from vllm_specplug.train.target import decoder_of, target_crc

# Padded tokens of one forward of the target beside a trainer.
TOKENS_PER_BATCH = 8192


@dataclass(frozen=True)
class TokenSequence:
    """One prompt with its answer: `tokens` int [S], the first `prompt_len` are the prompt. `index`
    is its place in a store."""

    tokens: torch.Tensor
    prompt_len: int
    source: str = ""
    index: int = 0

    @classmethod
    def of(cls, answer: Answer) -> TokenSequence:
        """Returns an answer after its prompt, int32."""
        tokens = torch.tensor(answer.prompt_ids + answer.answer_ids, dtype=torch.int32)
        return cls(tokens, len(answer.prompt_ids), answer.source)


@dataclass(frozen=True)
class FeatureSequence:
    """Memory-mapped features of one sequence: tokens [S], aux [S, L*Ht], hidden [S, Ht]."""

    tokens: torch.Tensor
    prompt_len: int
    aux: torch.Tensor
    hidden: torch.Tensor
    source: str = ""


class FeatureShard:
    """Read access to one shard folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        try:
            self.meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
            self.tokens = np.load(folder / "tokens.npy", mmap_mode="r")
            self.offsets = np.load(folder / "offsets.npy")
            self.prompt_lens = np.load(folder / "prompt_lens.npy")
            self.aux = _open(folder / "aux.bf16", len(self.tokens), self.meta["aux_size"])
            self.hidden = _open(folder / "hidden.bf16", len(self.tokens), self.meta["hidden_size"])
        except (OSError, ValueError, EOFError, KeyError) as error:
            raise ValueError(
                f"feature shard {folder} is damaged ({error}); remove it and give the command that "
                "made it again"
            ) from error

    def __len__(self) -> int:
        return len(self.prompt_lens)

    def __getitem__(self, index: int) -> FeatureSequence:
        start, end = int(self.offsets[index]), int(self.offsets[index + 1])
        return FeatureSequence(
            tokens=torch.from_numpy(self.tokens[start:end].astype(np.int64)),
            prompt_len=int(self.prompt_lens[index]),
            aux=torch.from_numpy(np.array(self.aux[start:end])).view(torch.bfloat16),
            hidden=torch.from_numpy(np.array(self.hidden[start:end])).view(torch.bfloat16),
            source=self.meta["sources"][index],
        )


class Features(ABC):
    """Sequences of a run by index, with states of the target, stored or computed on demand. A step
    chooses sequences by their tokens, and only the chosen ones need states."""

    folder: Path
    # Zero-based layers whose outputs are in `aux`.
    target_layer_ids: tuple[int, ...]
    # Checksum of the target; None for older shards and a target beside the trainer.
    target_crc: str | None = None

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> Any: ...

    def text(self, index: int) -> Any:
        """Returns a sequence of which only tokens and prompt length are read."""
        return self[index]

    def with_states(self, sequences: list[Any]) -> list[Any]:
        """Returns sequences of `text` with the target's states."""
        return sequences

    @abstractmethod
    def answers(self) -> Iterator[np.ndarray | torch.Tensor]:
        """Yields the tokens after each prompt."""

    @abstractmethod
    def source_names(self) -> Iterable[str]:
        """Yields the source of each sequence."""

    def sources(self) -> dict[str, int]:
        """Counts sequences by the part of their source before a slash, sorted."""
        return dict(sorted(Counter(name.split("/")[0] for name in self.source_names()).items()))

    @property
    def num_answer_tokens(self) -> int:
        """Number of tokens after the prompts."""
        return sum(len(answer) for answer in self.answers())


class FeatureStore(Features):
    """The finished shards of a folder as a sequence of `FeatureSequence`."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.shards = [FeatureShard(path) for path in _finished(self.folder)]
        if not self.shards:
            raise ValueError(
                f"feature folder {str(folder)!r} holds no finished shard; make them "
                "with `specplug data features`"
            )
        self.items = [(s, i) for s, shard in enumerate(self.shards) for i in range(len(shard))]
        self.target_layer_ids = tuple(self.shards[0].meta["target_layer_ids"])
        self.hidden_size = int(self.shards[0].meta["hidden_size"])
        self.target_crc = self.shards[0].meta.get("target_crc")

    def answers(self) -> Iterator[np.ndarray | torch.Tensor]:
        for shard in self.shards:
            for i in range(len(shard)):
                start = int(shard.offsets[i]) + int(shard.prompt_lens[i])
                yield shard.tokens[start : int(shard.offsets[i + 1])]

    def source_names(self) -> Iterable[str]:
        return (name for shard in self.shards for name in shard.meta["sources"])

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> FeatureSequence:
        shard, i = self.items[index]
        return self.shards[shard][i]


def read_split(
    folder: Path, heldout: int, repetitive_share: float
) -> tuple[list[tuple[str, list[TokenSequence], list[TokenSequence]]], list[str]]:
    """Returns the answers of a data folder, and what a user should know about them.

    Each finished shard has its name, its held-out answers and its training answers. The first
    `heldout` greedy answers are held out; later shards do not change them.

    Raises:
        ValueError: if none are left to train on, or the folder has no finished shard.
    """
    parts, left, total = [], heldout, 0
    for number, path in enumerate(finished_answers(folder)):
        rng, answers = random.Random(number), list(read_answers(path))
        kept = [a for a in answers if keep_answer(a, rng, repetitive_share)]
        greedy = [at for at, answer in enumerate(kept) if answer.temperature == 0][:left]
        # By index: an answer may be there twice.
        held, sequences = set(greedy), [TokenSequence.of(answer) for answer in kept]
        aside = [sequences[at] for at in greedy]
        rest = [sequence for at, sequence in enumerate(sequences) if at not in held]
        parts.append((path.stem.replace("answers", "shard"), aside, rest))
        left, total = left - len(aside), total + len(answers)
    withheld, trained = (sum(len(part[which]) for part in parts) for which in (1, 2))
    told = f"--heldout-answers {heldout} holds {withheld} of {withheld + trained} answers out"
    if not trained:
        raise ValueError(f"{told} and leaves none to train on; lower it, or generate more answers")
    remarks = [f"{told} and leaves {trained} to train on"] if withheld > trained else []
    if left_out := total - withheld - trained:
        remarks.append(
            f"{left_out} answers left out: shorter than {MIN_ANSWER_TOKENS} tokens, or ending in a "
            f"loop (a share of {repetitive_share} of those stays)"
        )
    return parts, remarks


def spread_layers(num_target_layers: int, count: int = 4) -> tuple[int, ...]:
    """Returns the default layers: a low one, then evenly up to and including the last."""
    last = num_target_layers - 1
    low = min(2, last)
    return tuple(sorted({round(low + i * (last - low) / (count - 1)) for i in range(count)}))


def chosen_layers(text: str, num_target_layers: int) -> tuple[int, ...]:
    """Returns the layers that an option names, or the default ones.

    Raises:
        ValueError: for layers that the target does not have.
    """
    if not text:
        return spread_layers(num_target_layers)
    legal = range(num_target_layers)
    parts = text.split(",")
    ids = [int(part) for part in parts if part.strip().isdigit() and int(part) in legal]
    if len(set(ids)) < len(parts):
        raise ValueError(f"--layers {text}, legal: 0..{legal[-1]}, each at most once; correct them")
    return tuple(ids)


def shard_meta(model: Any, target_layer_ids: Sequence[int]) -> dict[str, Any]:
    """Returns what the metadata of shards say of a target and its layers."""
    hidden_size = int(model.config.get_text_config().hidden_size)
    return {
        "target_crc": target_crc(model),
        "target_layer_ids": list(target_layer_ids),
        "aux_size": len(target_layer_ids) * hidden_size,
        "hidden_size": hidden_size,
    }


def check_shard(folder: Path, sequences: Sequence[TokenSequence], meta: Mapping[str, Any]) -> None:
    """Raises ValueError unless a finished shard holds the states `meta` of `sequences`."""
    shard = FeatureShard(folder)
    # Older shards have no checksum of their target.
    stored = {"target_crc": meta.get("target_crc"), **shard.meta}
    differ = [f"{name} {stored.get(name)}, not {value}" for name, value in meta.items()
              if stored.get(name) != value]  # fmt: skip
    tokens = torch.cat([sequence.tokens for sequence in sequences])
    if not differ and not np.array_equal(shard.tokens, tokens.numpy()):
        differ = ["other answers"]
    if differ:
        raise ValueError(
            f"{folder} is there with {', '.join(differ)}; name another folder, or remove that one"
        )


def write_shard(
    folder: Path,
    sequences: Sequence[TokenSequence],
    model: nn.Module,
    target_layer_ids: Sequence[int],
    *,
    tokens_per_batch: int = 4096,
    on_batch: Callable[[int], None] = lambda tokens: None,
) -> None:
    """Runs the target over `sequences` and writes a shard, which is visible when complete."""
    write_features(
        folder,
        sequences,
        lambda rows: forward_features(model, [sequences[r].tokens for r in rows], target_layer_ids),
        meta=shard_meta(model, target_layer_ids),
        tokens_per_batch=tokens_per_batch,
        on_batch=on_batch,
    )


def write_features(
    folder: Path,
    sequences: Sequence[TokenSequence],
    # rows of `sequences` -> aux [S, aux_size] and hidden [S, hidden_size] of each, bfloat16
    forward: Callable[[list[int]], tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]],
    *,
    meta: Mapping[str, Any],
    tokens_per_batch: int = 4096,
    on_batch: Callable[[int], None] = lambda tokens: None,
) -> None:
    """Writes a shard of what `forward` computes, which is visible when complete.

    Args:
        meta: the shard's metadata, with `aux_size` and `hidden_size`.
        on_batch: called with the number of tokens after each batch.
    """
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    offsets = np.zeros(len(sequences) + 1, np.int64)
    offsets[1:] = np.cumsum([len(s.tokens) for s in sequences])
    total = int(offsets[-1])
    np.save(partial / "tokens.npy", torch.cat([s.tokens for s in sequences]).int().numpy())
    np.save(partial / "offsets.npy", offsets)
    np.save(partial / "prompt_lens.npy", np.array([s.prompt_len for s in sequences], np.int32))
    aux = _create(partial / "aux.bf16", total, meta["aux_size"])
    hidden = _create(partial / "hidden.bf16", total, meta["hidden_size"])
    for rows in length_batches([len(s.tokens) for s in sequences], tokens_per_batch):
        states, final = forward(rows)
        for row, state, last in zip(rows, states, final, strict=True):
            start, end = offsets[row], offsets[row + 1]
            aux[start:end] = state.view(torch.uint16).numpy()
            hidden[start:end] = last.view(torch.uint16).numpy()
        on_batch(sum(len(sequences[row].tokens) for row in rows))
    aux.flush()
    hidden.flush()
    record = {
        **meta,
        "sources": [s.source for s in sequences],
        "answer_tokens": int(total - sum(s.prompt_len for s in sequences)),
    }
    (partial / "meta.json").write_text(json.dumps(record), encoding="utf-8")
    os.replace(partial, folder)


def length_batches(lengths: Sequence[int], tokens_per_batch: int) -> Iterator[list[int]]:
    """Yields indices of similar lengths, at most `tokens_per_batch` padded tokens at a time."""
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    batch: list[int] = []
    for index in order:
        if batch and (len(batch) + 1) * lengths[index] > tokens_per_batch:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


# Not inference_mode, whose tensors a trainer cannot keep for its backward pass.
@torch.no_grad()
def forward_features(
    model: nn.Module,
    tokens: Sequence[torch.Tensor],
    target_layer_ids: Sequence[int],
    to: torch.device | str = "cpu",
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Returns the outputs of the selected layers, bfloat16 [S, L*Ht], and the final normed hidden
    states [S, Ht] of each sequence, on a device.

    Sequences are padded on the right, so causal attention needs no mask.
    """
    device = next(model.parameters()).device
    ids = pad_sequence([sequence.long() for sequence in tokens], batch_first=True)
    decoder = decoder_of(model)
    captured: dict[int, torch.Tensor] = {}

    def keep(layer_id: int) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: object, output: object) -> None:
            captured[layer_id] = output[0] if isinstance(output, tuple) else output  # type: ignore

        return hook

    handles = [decoder.layers[i].register_forward_hook(keep(i)) for i in set(target_layer_ids)]
    try:
        final = decoder.body(input_ids=ids.to(device), use_cache=False).last_hidden_state
    finally:
        for handle in handles:
            handle.remove()
    final = final.to(to, torch.bfloat16)
    outputs = [captured[i].to(to, torch.bfloat16) for i in target_layer_ids]
    states = torch.cat(outputs, dim=-1) if outputs else final[..., :0]
    lengths = torch.tensor([len(t) for t in tokens])
    aux, hidden = (unpad_sequence(part, lengths, batch_first=True) for part in (states, final))
    return aux, hidden


def _finished(folder: Path) -> list[Path]:
    return sorted(
        p
        for p in folder.glob("shard-*")
        if p.is_dir() and (p / "meta.json").is_file() and not p.name.endswith(".partial")
    )


def _open(path: Path, rows: int, columns: int) -> np.ndarray:
    return np.memmap(path, np.uint16, "r", shape=(rows, columns))


def _create(path: Path, rows: int, columns: int) -> np.memmap:
    """Returns a new file as an array to fill."""
    with path.open("wb") as file:
        # On a full disk, a write to an array without reserved space ends the process (SIGBUS).
        os.posix_fallocate(file.fileno(), 0, 2 * rows * columns)
    return np.memmap(path, np.uint16, "r+", shape=(rows, columns))
