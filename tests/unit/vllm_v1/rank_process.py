# SPDX-License-Identifier: Apache-2.0
"""One tensor parallel CPU rank that drafts a step.

Hidden states come out of vLLM's own all-reduce, the runner mixin and its planner are those that
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
from vllm_specplug.drafting.drafter import CommittedTokens, Drafter, DraftRequests
from vllm_specplug.drafting.reserved_rows import ReservedRows
from vllm_specplug.kernels import top_candidates
from vllm_specplug.metrics import SpecPlugMetrics
from vllm_specplug.options import parse_request_budget
from vllm_specplug.tree import DraftTree, build_tree
from vllm_specplug.vllm_v1.runner import TreeRunnerMixin
from vllm_specplug.vllm_v1.tree_backend import CpuTreeBackend
from vllm_specplug.vllm_worker.draft_planner import DraftPlanner
from vllm_specplug.vllm_worker.ranks import first_rank_reservation
from vllm_specplug.vllm_worker.step import StepRequest, TreeStep

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
            build_tree("best_first", ids[r], scores[r], requests.budgets[r], tree_width=4,
                       tree_depth=DEPTH, hybrid_lambda=0.5)
            for r in range(len(requests))
        ]  # fmt: skip
        return self.made


class Runner(TreeRunnerMixin):
    """The mixin with what vLLM's runner would hold of `NUM_REQUESTS` decoding requests."""

    def __init__(self, drafter: Drafter) -> None:
        options = SimpleNamespace(
            num_speculative_tokens=NODES,
            tree_budget=NODES,
            max_draft_context=None,
            max_request_budget=None,
        )
        assert parse_request_budget(None, options)
        self.tree_metrics = SpecPlugMetrics(head="test", log_interval_s=1e9, is_reporting=False)
        self.planner = DraftPlanner(options, RowBudget(NODES, 512), self.tree_metrics.stats, VOCAB)
        self.drafter = SimpleNamespace(  # type: ignore[assignment]
            drafter=drafter, options=SimpleNamespace(tree_width=4)
        )
        self.tree_spec = SimpleNamespace(reads_next_tokens=False)
        self.tree_backend = CpuTreeBackend()
        self.tree_step = TreeStep(
            [StepRequest(r, r, r + 1, 10, DraftTree.empty()) for r in range(NUM_REQUESTS)]
        )
        self.proposed_trees, self.begun = {}, set()
        ids = [f"r{i}" for i in range(NUM_REQUESTS)]
        params = SimpleNamespace(max_tokens=None, extra_args=None)
        self.requests = {
            i: SimpleNamespace(req_id=i, sampling_params=params, output_token_ids=[]) for i in ids
        }
        self.input_batch = SimpleNamespace(
            req_ids=ids,
            num_tokens_no_spec=np.full(NUM_REQUESTS, 11),
            token_ids_cpu=np.ones((NUM_REQUESTS, 16), np.int64),
            is_token_ids=np.ones((NUM_REQUESTS, 16), bool),
            logitsprocs=SimpleNamespace(non_argmax_invariant=[]),
            block_table=[
                SimpleNamespace(slot_mapping=SimpleNamespace(gpu=torch.arange(NUM_REQUESTS)))
            ],
        )
        self.draft_group = 0
        self.max_model_len, self.max_num_tokens, self.device = 512, 512, torch.device("cpu")
        self.enable_prompt_embeds = False


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
        runner = Runner(drafter)
        drafts = runner.propose_draft_token_ids(
            SimpleNamespace(finished_req_ids=set(), preempted_req_ids=None),
            [[1]] * NUM_REQUESTS,
            None, torch.empty(0), torch.empty(0), None, None,
            SimpleNamespace(),
            None,
        )  # fmt: skip
        reserved = reserved_by(rank)
    kept = [runner.proposed_trees[req_id] for req_id in runner.input_batch.req_ids]
    assert [tree.token_ids.tolist() for tree in kept] == drafts
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
