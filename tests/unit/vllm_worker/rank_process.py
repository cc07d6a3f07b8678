# SPDX-License-Identifier: Apache-2.0
"""One tensor parallel CPU rank that drafts a step.

Hidden states come out of vLLM's own all-reduce, the speculator and its planner are those that
serve. Written to FOLDER/RANK.json: the hidden states, the trees as drafted and as kept, and the
reservations that the rank keeps where each rank wants its own.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import (
    init_distributed_environment,
    initialize_model_parallel,
    tensor_model_parallel_all_reduce,
)
from vllm.platforms import current_platform

from vllm_specplug.budget import RowBudget
from vllm_specplug.drafting.committed_tokens import CommittedTokens
from vllm_specplug.drafting.drafter import Drafter
from vllm_specplug.drafting.requests import DraftRequests
from vllm_specplug.drafting.reserved_rows import ReservedRows
from vllm_specplug.kernels import top_candidates
from vllm_specplug.metrics import StepStats
from vllm_specplug.options import parse_request_budget
from vllm_specplug.tree import DraftTree, build_tree
from vllm_specplug.tree.step_trees import TreeStore
from vllm_specplug.vllm_v2.speculator import TreeSpeculator
from vllm_specplug.vllm_v2.step_input import HostRequest
from vllm_specplug.vllm_worker.cost.draft_planner import DraftPlanner
from vllm_specplug.vllm_worker.ranks import first_rank_reservation

NUM_REQUESTS, NODES, DEPTH, HIDDEN, VOCAB = 8, 12, 4, 64, 32


def part_of(rank: int) -> torch.Tensor:
    """[DEPTH * NUM_REQUESTS, HIDDEN]: a rank's part of a row-parallel product."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(DEPTH * NUM_REQUESTS, HIDDEN, generator=generator)


def reduced_hidden(rank: int, world_size: int) -> torch.Tensor:
    """The sum of the ranks' parts."""
    reduced = tensor_model_parallel_all_reduce(part_of(rank))
    if hasattr(torch.ops._C, "init_shm_manager"):
        return reduced
    # vLLM's build for a CPU without AVX-512 sums by gloo, on all ranks alike: the order of its
    # shared-memory all-reduce is that of the ranks from one's own on.
    ordered = part_of(rank)
    for step in range(1, world_size):
        ordered = ordered + part_of((rank + step) % world_size)
    torch.testing.assert_close(ordered, reduced)
    return ordered


class HeadDrafter(Drafter):
    """Builds trees from hidden states; every two tokens are nearly equally likely."""

    def __init__(self, hidden: torch.Tensor) -> None:
        weight = torch.randn(VOCAB // 2, HIDDEN, generator=torch.Generator().manual_seed(9))
        twin = weight + 1e-7 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(8))
        self.logits = (hidden @ torch.cat((weight, twin)).T).view(NUM_REQUESTS, DEPTH, VOCAB)
        self.made: list[DraftTree] = []

    def load(self, target: Any) -> None: ...

    def cache_specs(self) -> list[Any]:
        return []

    def observe(self, committed: CommittedTokens) -> None: ...

    def propose(self, requests: DraftRequests) -> list[DraftTree]:
        ids, scores = top_candidates(self.logits.flatten(0, 1), 4)
        ids, scores = (x.view(NUM_REQUESTS, DEPTH, 4).numpy() for x in (ids, scores))
        self.made = [
            build_tree(ids[r], scores[r], requests.budgets[r], tree_width=4,
                       tree_depth=DEPTH)
            for r in range(len(requests))
        ]  # fmt: skip
        return self.made


def speculator(drafter: Drafter) -> TreeSpeculator:
    """With what it has of an engine whose requests decode."""
    options = SimpleNamespace(
        num_speculative_tokens=NODES,
        tree_budget=NODES,
        max_draft_context=None,
        max_request_budget=None,
    )
    assert parse_request_budget(None, options)
    made = object.__new__(TreeSpeculator)
    made.stats, made.device = StepStats(), torch.device("cpu")
    made.planner = DraftPlanner(options, RowBudget(NODES, 512), made.stats, VOCAB)
    host: Any = SimpleNamespace(drafter=drafter, options=SimpleNamespace(tree_width=4))
    made.proposer = host
    made.store = TreeStore(NUM_REQUESTS, NODES, VOCAB, made.device)
    made.trees, made.plain, made.penalties, made.extra_args = {}, {}, {}, {}
    made.schedules_ahead, made.reserved = False, None
    made.max_model_len = made.max_num_tokens = 512
    return made


def reserved_by(rank: int) -> list[Any]:
    """What a rank keeps of three reservations: whether it has one or not, the first rank's."""
    wanted = [ReservedRows({"a": 3}, 1), None, ReservedRows({}, 0)]
    if rank:
        wanted = [None, ReservedRows({"b": 7}, 2), ReservedRows({"a": 5, "c": 1}, 4)]
    kept = [first_rank_reservation(own, ["a", "b"]) for own in wanted]
    return [None if r is None else [r.by_request, r.others] for r in kept]


def as_lists(tree: DraftTree) -> list[list[float]]:
    tree.validate()
    return [a.tolist() for a in (tree.token_ids, tree.parent_indices, tree.depths, tree.scores)]


def main(rank: int, size: int, folder: str) -> None:
    current_platform.import_kernels()
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(size, rank, f"file://{folder}/store", rank, "gloo")
        initialize_model_parallel(size)
        hidden = reduced_hidden(rank, size)
        drafter = HeadDrafter(hidden)
        made = speculator(drafter)
        text = np.ones(11, np.int32)
        batch = [HostRequest(f"r{i}", i, text, 512, True, 10) for i in range(NUM_REQUESTS)]
        step: Any = SimpleNamespace(idx_mapping=torch.arange(NUM_REQUESTS))
        token_ids = made._draft(step, batch, NODES)
        reserved = reserved_by(rank)
    kept = [made.trees[request.req_id] for request in batch]
    # What vLLM gets, and what the trees look like on the device.
    for i, tree in enumerate(kept):
        assert token_ids[i, : tree.num_nodes].tolist() == tree.token_ids.tolist()
        assert made.store.parents[i, : tree.num_nodes].tolist() == tree.parent_indices.tolist()
    (Path(folder) / f"{rank}.json").write_text(
        json.dumps(
            {
                "hidden": hidden.flatten().tolist(),
                "drafted": [as_lists(tree) for tree in drafter.made],
                "kept": [as_lists(tree) for tree in kept],
                "reserved": reserved,
            }
        )
    )
