# SPDX-License-Identifier: Apache-2.0
"""Steps made of host trees, for tests."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.unit.tree.candidates import trees as random_trees
from vllm_specplug.tree import DraftTree
from vllm_specplug.tree.step_trees import StepTrees, TreeStore, attach_trees
from vllm_specplug.vllm_v2.step_input import step_rows

VOCAB = 6
SLOTS = 7
# Near parents make deep trees.
trees = functools.partial(random_trees, 12, VOCAB, near=3)


def stored(
    store: TreeStore, batch: Sequence[DraftTree], slots: Sequence[int], contexts: Sequence[int]
) -> torch.Tensor:
    """Puts the trees into the store; returns token ids [R, N]."""
    n = store.num_nodes
    # What is past a tree's nodes may be anything.
    tokens, parents = (np.full((len(batch), n), 77, np.int64) for _ in range(2))
    for i, tree in enumerate(batch):
        tokens[i, : tree.num_nodes] = tree.token_ids
        parents[i, : tree.num_nodes] = tree.parent_indices
    return store.put(
        torch.tensor(slots),
        torch.tensor(contexts, dtype=torch.int32),
        torch.from_numpy(tokens),
        torch.from_numpy(parents),
        torch.tensor([tree.num_nodes for tree in batch]),
        torch.zeros((len(batch), n)),
    )


def input_batch(
    slots: Sequence[int],
    contexts: Sequence[int],
    scheduled: Sequence[int],
    prompt_rows: Sequence[int] | None = None,
) -> Any:
    """vLLM's input batch of a step: `scheduled` drafts per request, behind `prompt_rows` rows that
    have no logits."""
    before = np.array(prompt_rows or [0] * len(slots))
    logits = np.array(scheduled) + 1
    ends = np.cumsum(before + logits)
    starts = np.concatenate([[0], np.cumsum(logits)])
    rows = np.concatenate([np.arange(e - c, e) for e, c in zip(ends, logits, strict=True)])
    seq_lens = np.array(contexts) + logits
    places = np.concatenate([np.arange(c) for c in logits])
    return SimpleNamespace(
        num_reqs=len(slots),
        idx_mapping=torch.tensor(slots),
        expanded_idx_mapping=torch.from_numpy(np.repeat(slots, logits)),
        expanded_local_pos=torch.from_numpy(places.astype(np.int32)),
        cu_num_logits=torch.from_numpy(starts.astype(np.int32)),
        cu_num_logits_np=starts.astype(np.int32),
        seq_lens=torch.from_numpy(seq_lens.astype(np.int32)),
        seq_lens_cpu_upper_bound=torch.from_numpy(seq_lens.astype(np.int32) + 3),
        logits_indices=torch.from_numpy(rows),
        num_tokens=int(ends[-1]),
        num_tokens_after_padding=int(ends[-1]),
    )


def attached(
    batch: Sequence[DraftTree],
    num_nodes: int = 12,
    scheduled: Sequence[int] | None = None,
    prompt_rows: Sequence[int] | None = None,
) -> tuple[StepTrees, torch.Tensor, list[int]]:
    """A step that verifies all these trees: the trees, the tokens [M] of its logits rows, and each
    root's position."""
    slots = [(3 * i + 1) % SLOTS for i in range(len(batch))]
    contexts = [5 + 9 * i for i in range(len(batch))]
    counts = [num_nodes] * len(batch) if scheduled is None else list(scheduled)
    store = TreeStore(SLOTS, num_nodes, VOCAB, torch.device("cpu"))
    tokens = stored(store, batch, slots, contexts)
    made = input_batch(slots, contexts, counts, prompt_rows)
    step = attach_trees(store, step_rows(made, num_nodes))
    rows = [torch.cat([torch.tensor([0]), t[:n]]) for t, n in zip(tokens, counts, strict=True)]
    return step, torch.cat(rows), contexts
