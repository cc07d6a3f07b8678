# SPDX-License-Identifier: Apache-2.0
"""The draft vocabulary of a head: which of the target's tokens it can draft."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open

from vllm_specplug.train.features import FeatureStore


def draft_vocabulary(
    store: FeatureStore, size: int, vocab_size: int, always: Sequence[int] = ()
) -> tuple[torch.Tensor, float]:
    """The `size` most frequent answer tokens, and `always` (end-of-turn ids).

    Returns:
        their ids, int64 [size] ascending, and the share of answer tokens they cover.
    """
    counts = answer_token_counts(store)
    total = sum(counts.values())
    ranked = list(dict.fromkeys([*always, *(t for t, _ in counts.most_common())]))
    # Unseen tokens fill up a small corpus: low ids are the frequent merges of a BPE vocabulary.
    seen = set(ranked)
    fill = (t for t in range(vocab_size) if t not in seen)
    while len(ranked) < size:
        ranked.append(next(fill))
    ids = sorted(ranked[:size])
    covered = sum(counts[t] for t in ids) / max(total, 1)
    return torch.tensor(ids, dtype=torch.int64), covered


def answer_token_counts(store: FeatureStore) -> Counter[int]:
    """How often each token stands in an answer."""
    counts: Counter[int] = Counter()
    for shard in store.shards:
        for i in range(len(shard)):
            start = int(shard.offsets[i]) + int(shard.prompt_lens[i])
            counts.update(shard.tokens[start : int(shard.offsets[i + 1])].tolist())
    return counts


def vocabulary_coverage(store: FeatureStore, ids: torch.Tensor) -> float:
    """Share of the answer tokens that are among `ids`."""
    counts = answer_token_counts(store)
    return sum(counts[t] for t in ids.tolist()) / max(sum(counts.values()), 1)


def vocabulary_of(folder: str) -> torch.Tensor:
    """Target token of each draft id of a head, int64 [V'].

    Raises:
        ValueError: when the head drafts over the whole vocabulary, or cannot be read.
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


def saved_vocabulary(
    path: Path,
    resume: bool,
    vocab_from: str,
    store: FeatureStore,
    size: int,
    vocab_size: int,
    always: Sequence[int],
    keep: bool = True,
) -> torch.Tensor:
    """The draft vocabulary of a run, int64 [V'], kept in `path`: of the run that is resumed, else
    of the head `vocab_from`, else by frequency. Of a run's processes one has to `keep` it."""
    if resume and path.is_file():
        # Data may have grown since, and with it the counts.
        ids: torch.Tensor = torch.load(path, weights_only=True)
        return ids
    if vocab_from:
        ids = vocabulary_of(vocab_from)
    else:
        ids, _ = draft_vocabulary(store, min(size, vocab_size), vocab_size, always)
    if keep:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(ids, path)
    return ids
