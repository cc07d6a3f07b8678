# SPDX-License-Identifier: Apache-2.0
"""Drafts on the device of heads that draft level by level."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from tests.e2e.cuda.cuda_device import SCORES_WITHIN
from tests.e2e.oracle import OracleDrafter
from vllm_specplug.drafting.device_levels import read_trees
from vllm_specplug.drafting.device_requests import DeviceRequests, DeviceTrees
from vllm_specplug.methods.eagle3_tree.drafter import StateDrafter
from vllm_specplug.tree import DraftTree


def assert_same_trees(made: DeviceTrees, expected: list[DraftTree], tolerance: float) -> int:
    """Raises unless the trees are the same; returns their nodes."""
    nodes = 0
    for r, (tree, oracle) in enumerate(zip(read_trees(made), expected, strict=True)):
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
    """Drafts of a head as it has them."""

    nodes: int = 0
    """Of drafts that are the expected ones, where some are expected."""
    differing: list[AssertionError] = field(default_factory=list)


# Requests that were drafted for -> the trees that are expected.
Expected = Callable[[Any, DeviceRequests, list[int]], list[DraftTree]]


@contextmanager
def knowing(
    drafter: Any = StateDrafter, expected: Expected | None = None, within: float = SCORES_WITHIN
) -> Iterator[LevelDrafts]:
    """Every draft on the device is made twice: as the head has it, to be compared where trees are
    expected, and with the candidates that follow in any of the oracle's sequences.

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
        drafted = (requests.budgets > 0).nonzero().flatten().tolist()
        if expected is None:
            seen.nodes += int(made.counts[drafted].sum())
        elif drafted:
            kept = DeviceTrees(*(part[drafted] for part in vars(made).values()))
            try:
                trees = expected(self, requests, drafted)
                seen.nodes += assert_same_trees(kept, trees, within)
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
