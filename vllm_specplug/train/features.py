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
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from vllm_specplug.train.target import decoder_of


@dataclass(frozen=True)
class TokenSequence:
    """One prompt with its answer: `tokens` int [S], the first `prompt_len` are the prompt."""

    tokens: np.ndarray
    prompt_len: int
    source: str = ""


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
        self.meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        self.tokens = np.load(folder / "tokens.npy", mmap_mode="r")
        self.offsets = np.load(folder / "offsets.npy")
        self.prompt_lens = np.load(folder / "prompt_lens.npy")
        self.aux = _open(folder / "aux.bf16", len(self.tokens), self.meta["aux_size"])
        self.hidden = _open(folder / "hidden.bf16", len(self.tokens), self.meta["hidden_size"])

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


class FeatureStore:
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

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        """Zero-based layers whose outputs are in `aux`."""
        return tuple(self.shards[0].meta["target_layer_ids"])

    @property
    def num_answer_tokens(self) -> int:
        """Number of tokens after the prompts."""
        return sum(len(s.tokens) - int(s.prompt_lens.sum()) for s in self.shards)

    def sources(self, rows: Iterable[int] | None = None) -> dict[str, int]:
        """Counts sequences (of `rows`, if given) by the first part of their source."""
        chosen = self.items if rows is None else [self.items[row] for row in rows]
        return count_sources(self.shards[s].meta["sources"][i] for s, i in chosen)

    def length(self, index: int) -> int:
        """Returns the number of tokens of a sequence, without reading it."""
        shard, i = self.items[index]
        return int(self.shards[shard].offsets[i + 1] - self.shards[shard].offsets[i])

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> FeatureSequence:
        shard, i = self.items[index]
        return self.shards[shard][i]


def count_sources(names: Iterable[str]) -> dict[str, int]:
    """Returns the number of names by their part before a slash, sorted."""
    return dict(sorted(Counter(name.split("/")[0] for name in names).items()))


def write_shard(
    folder: Path,
    sequences: Sequence[TokenSequence],
    model: nn.Module,
    target_layer_ids: Sequence[int],
    *,
    tokens_per_batch: int = 4096,
) -> None:
    """Runs the target over `sequences` and writes a shard, which is visible when complete."""
    hidden_size = int(model.config.get_text_config().hidden_size)  # type: ignore[union-attr, operator]
    write_features(
        folder,
        sequences,
        lambda rows: forward_features(model, [sequences[r].tokens for r in rows], target_layer_ids),
        aux_size=len(target_layer_ids) * hidden_size,
        hidden_size=hidden_size,
        meta={"target_layer_ids": list(target_layer_ids)},
        tokens_per_batch=tokens_per_batch,
    )


def write_features(
    folder: Path,
    sequences: Sequence[TokenSequence],
    # rows of `sequences` -> aux [S, aux_size] and hidden [S, hidden_size] of each, bfloat16
    forward: Callable[[list[int]], tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]],
    *,
    aux_size: int,
    hidden_size: int,
    meta: dict[str, Any],
    tokens_per_batch: int = 4096,
) -> None:
    """Writes a shard of what `forward` computes, which is visible when complete."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    offsets = np.zeros(len(sequences) + 1, np.int64)
    offsets[1:] = np.cumsum([len(s.tokens) for s in sequences])
    total = int(offsets[-1])
    np.save(partial / "tokens.npy", np.concatenate([s.tokens for s in sequences]).astype(np.int32))
    np.save(partial / "offsets.npy", offsets)
    np.save(partial / "prompt_lens.npy", np.array([s.prompt_len for s in sequences], np.int32))
    aux = np.memmap(partial / "aux.bf16", np.uint16, "w+", shape=(total, aux_size))
    hidden = np.memmap(partial / "hidden.bf16", np.uint16, "w+", shape=(total, hidden_size))
    for rows in length_batches([len(s.tokens) for s in sequences], tokens_per_batch):
        states, final = forward(rows)
        for row, state, last in zip(rows, states, final, strict=True):
            start, end = offsets[row], offsets[row + 1]
            aux[start:end] = state.view(torch.uint16).numpy()
            hidden[start:end] = last.view(torch.uint16).numpy()
    aux.flush()
    hidden.flush()
    record = {
        **meta,
        "aux_size": aux_size,
        "hidden_size": hidden_size,
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


@torch.inference_mode()
def forward_features(
    model: nn.Module, tokens: Sequence[np.ndarray], target_layer_ids: Sequence[int]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Returns the outputs of the selected layers, bfloat16 [S, L*Ht] on the CPU, and the final
    normed hidden states [S, Ht] of each sequence.

    Sequences are padded on the right, so causal attention needs no mask.
    """
    width = max(len(t) for t in tokens)
    device = next(model.parameters()).device
    ids = torch.zeros(len(tokens), width, dtype=torch.int64)
    for row, sequence in enumerate(tokens):
        ids[row, : len(sequence)] = torch.from_numpy(np.asarray(sequence, np.int64))
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
    states = torch.cat([captured[i] for i in target_layer_ids], dim=-1).to("cpu", torch.bfloat16)
    final = final.to("cpu", torch.bfloat16)
    lengths = [len(t) for t in tokens]
    return (
        [states[i, :n] for i, n in enumerate(lengths)],
        [final[i, :n] for i, n in enumerate(lengths)],
    )


def _finished(folder: Path) -> list[Path]:
    return sorted(
        p
        for p in folder.glob("shard-*")
        if p.is_dir() and (p / "meta.json").is_file() and not p.name.endswith(".partial")
    )


def _open(path: Path, rows: int, columns: int) -> np.ndarray:
    return np.memmap(path, np.uint16, "r", shape=(rows, columns))
