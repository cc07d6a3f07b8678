# SPDX-License-Identifier: Apache-2.0
"""Drafts on the device beside the host's trees of the same states."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from transformers import AutoConfig

from tests.e2e.cuda.cuda_device import SCORES_WITHIN
from tests.e2e.oracle import OracleDrafter
from tests.e2e.pair import target
from vllm_specplug.drafting.device_levels import read_trees
from vllm_specplug.drafting.device_requests import DeviceRequests, DeviceTrees
from vllm_specplug.drafting.requests import DraftRequests
from vllm_specplug.kernels import TreeAttnMetadata, to_device
from vllm_specplug.kernels.metadata import plan_columns
from vllm_specplug.kernels.reference import dense_attention
from vllm_specplug.methods.eagle3_tree.checkpoint import load_eagle3_head
from vllm_specplug.methods.eagle3_tree.drafter import StateContext, StateDrafter
from vllm_specplug.tree import DraftTree
from vllm_specplug.tree.beam import draft_level_by_level
from vllm_specplug.vllm_worker.memory.device_draft_cache import CudaDraftCache
from vllm_specplug.vllm_worker.warmup import DUMMY_NAME


def assert_same_trees(
    made: DeviceTrees, expected: dict[int, DraftTree], tolerance: float = 1e-3
) -> int:
    """Raises unless the trees of these requests are the same; returns their nodes."""
    nodes = 0
    for r, (tree, oracle) in enumerate(zip(read_trees(made), expected.values(), strict=True)):
        for name in ("token_ids", "parent_indices", "depths"):
            ours, theirs = getattr(tree, name), getattr(oracle, name)
            assert ours.tolist() == theirs.tolist(), (r, name, ours, theirs)
        far = np.abs(tree.scores - oracle.scores).max(initial=0.0)
        assert far <= tolerance, (r, far)
        nodes += tree.num_nodes
    return nodes


def known_tokens(requests: DeviceRequests) -> list[list[list[int]]]:
    """What follows each anchor in the oracle's sequences."""
    found = []
    for anchor, context in zip(
        requests.anchors.tolist(), requests.context_lens.tolist(), strict=True
    ):
        sequences = OracleDrafter.sequences
        found.append(
            [s[context + 1 :] for s in sequences if len(s) > context and s[context] == anchor]
        )
    return found


@dataclass
class LevelDrafts:
    """Drafts of a head as it has them, beside the host's trees of the same states."""

    nodes: int = 0
    """Of drafts that are the host's."""
    differing: list[AssertionError] = field(default_factory=list)


# Requests that were drafted for -> the trees that the host makes of the same states.
HostTrees = Callable[[Any, DeviceRequests, list[int]], list[DraftTree]]


@contextmanager
def knowing(
    drafter: Any, host_trees: HostTrees, within: float = SCORES_WITHIN
) -> Iterator[LevelDrafts]:
    """Every draft on the device is made twice: as the head has it, to be compared, and with the
    candidates that follow in any of the oracle's sequences.

    Args:
        drafter: class with `device_expand` and `propose_on_device`.
        within: the largest difference of scores that is rounding.
    """
    device_expand, propose = drafter.device_expand, drafter.propose_on_device
    asked: list[DeviceRequests] = []
    seen = LevelDrafts()

    def knowing(self: Any, *args: Any) -> Any:
        expand = device_expand(self, *args)
        return partial(known, expand) if asked else expand

    def known(expand: Any, frontier: Any) -> Any:
        ids, log_probs = expand(frontier)
        depth = frontier.depth
        for r, sequences in enumerate(known_tokens(asked[0])):
            told = [s[depth] for s in sequences if len(s) > depth]
            for place in range(ids.shape[1]):
                tokens = list(dict.fromkeys([*told, *ids[r, place].tolist()]))[: ids.shape[2]]
                if depth % 2 == 0:
                    tokens[:2] = tokens[1::-1]
                ids[r, place, : len(tokens)] = torch.tensor(tokens)
        falling = torch.arange(1, ids.shape[2] + 1, device=ids.device).mul(-0.4)
        falling[2:] -= 6.0
        return ids, falling.expand(log_probs.shape).contiguous()

    def proposed(self: Any, requests: DeviceRequests) -> DeviceTrees:
        made = propose(self, requests)
        if requests.history is not None and requests.history.req_ids[0].startswith(DUMMY_NAME):
            return made
        drafted = (requests.budgets > 0).nonzero().flatten().tolist()
        if drafted:
            oracle = host_trees(self, requests, drafted)
            kept = DeviceTrees(*(part[drafted] for part in vars(made).values()))
            try:
                seen.nodes += assert_same_trees(kept, dict(enumerate(oracle)), within)
            except AssertionError as error:
                seen.differing.append(error)
        asked.append(requests)
        try:
            return propose(self, requests)
        finally:
            asked.clear()

    with (
        patch.object(drafter, "device_expand", knowing),
        patch.object(drafter, "propose_on_device", proposed),
    ):
        yield seen


def _layer_trees(self: Any, requests: DeviceRequests, drafted: list[int]) -> list[DraftTree]:
    columns = (requests.context_lens, requests.budgets, requests.depths)
    contexts, budgets, depths = (c[drafted].tolist() for c in columns)
    given = DraftRequests(
        req_ids=[str(r) for r in drafted],
        token_ids=[np.array([int(requests.anchors[r])]) for r in drafted],
        context_lens=contexts, req_indices=drafted, budgets=budgets,
        width=requests.width, depths=depths,
    )  # fmt: skip
    return draft_level_by_level(
        given.anchors, budgets, [min(d, self.options.tree_depth) for d in depths],
        given.width, self.host_expand(given),
    )  # fmt: skip


@contextmanager
def knowing_contexts() -> Iterator[list[int]]:
    """Keys and values of a head of several layers in the pages are those that its plain module
    computes from whole sequences; yields the tokens of each comparison."""
    write, checked = StateContext._write_context, []
    # by slot: outputs of the target, the token after, the position
    tokens: dict[int, tuple[torch.Tensor, int, int]] = {}

    def compare(self: Any, row: int, length: int) -> None:
        cache, at = self.cache, torch.arange(length)
        size, table = cache.views[0][0].shape[1], cache.block_table()[row].cpu()
        blocks, offsets = table[at // size].long(), at % size
        known = [tokens[slot] for slot in (blocks * size + offsets).tolist()]
        assert [position for _, _, position in known] == at.tolist()
        head, _ = load_eagle3_head(self.options.head_path, AutoConfig.from_pretrained(target()))
        pages = [[view[blocks, offsets].cpu() for view in views] for views in cache.views]

        def attend(layer: int, *rows: torch.Tensor) -> torch.Tensor:
            for ours, theirs in zip(rows[1:], pages[layer], strict=True):
                torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
            window = self.windows[layer] or length
            mask = torch.ones(length, length, dtype=torch.bool).tril().triu(1 - window)
            group = rows[0].shape[1] // rows[1].shape[1]
            return dense_attention(*rows, rows[0].shape[-1] ** -0.5, group, mask)

        embeds = self.embed(torch.tensor([following for _, following, _ in known])).cpu()
        states = head.features(torch.stack([outputs for outputs, _, _ in known]).cpu())
        head(embeds, states, at, attend)
        checked.append(length)

    def written(self: Any, *columns: torch.Tensor) -> None:
        write(self, *columns)
        outputs, following, positions, table_rows, slots = columns
        ends: dict[int, int] = {}
        for i in (slots >= 0).nonzero().flatten().tolist():
            tokens[int(slots[i])] = outputs[i], int(following[i]), int(positions[i])
            row = int(table_rows[i])
            ends[row] = max(ends.get(row, 0), int(positions[i]) + 1)
        for row, length in ends.items():
            compare(self, row, length)

    with patch.object(StateContext, "_write_context", written):
        yield checked


@contextmanager
def knowing_levels() -> Iterator[LevelDrafts]:
    """`knowing` for heads of draft layers with pages."""

    tree_attention = CudaDraftCache.tree_attention

    def branches(self: Any, requests: Any, contexts: Any, parents: Any) -> Any:
        if isinstance(parents, torch.Tensor):
            return tree_attention(self, requests, contexts, parents)
        rows = [np.concatenate(([-1], p + 1)).astype(np.int32) for p in parents]
        counts = [len(parent_rows) for parent_rows in rows]
        starts = np.cumsum([0, *counts])[:-1].tolist()
        plan = plan_columns(requests.req_indices, starts, counts, contexts.tolist())
        device = self.backend.device
        metadata = TreeAttnMetadata(
            to_device(plan, device), self.block_table(), max(counts), int(contexts.max()),
            torch.empty(sum(counts), -(-max(counts) // 64), dtype=torch.int64, device=device),
            to_device(np.concatenate(rows), device),
        )  # fmt: skip
        return self.attention_of(metadata)

    with (
        knowing(StateDrafter, _layer_trees) as seen,
        patch.object(CudaDraftCache, "tree_attention", branches),
    ):
        yield seen
