# SPDX-License-Identifier: Apache-2.0
"""A step's trees as the CUDA kernels get them, on CPU tensors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.tree.candidates import tree_of
from tests.unit.vllm_v2.steps import SLOTS, VOCAB, attached, input_batch, stored
from vllm_specplug.kernels import AttnFeatures, FeatureKind
from vllm_specplug.kernels.cuda_dispatch import ChosenKernel
from vllm_specplug.tree import DraftTree
from vllm_specplug.tree.step_trees import StepTrees, TreeStore, attach_trees, walk_trees
from vllm_specplug.vllm_attention.gpu import gpu_cache_views
from vllm_specplug.vllm_attention.tree_rows import tree_rows_of
from vllm_specplug.vllm_v2.cuda_trees import CudaTreeBackend, parent_rows
from vllm_specplug.vllm_v2.step_input import step_rows
from vllm_specplug.vllm_worker import cuda_kernels
from vllm_specplug.vllm_worker.cuda_kernels import StepLimits
from vllm_specplug.vllm_worker.memory.cache_groups import CacheGroup

CPU = torch.device("cpu")
LIMITS = StepLimits(num_requests=4, num_rows=64, tree_rows=5, context=512)
# A fork of two, one of them with two children.
BUSHY = tree_of([5, 4, 3, 2], [-1, -1, 0, 0])


@pytest.fixture
def backend() -> CudaTreeBackend:
    backend = CudaTreeBackend("auto", 2, LIMITS, CPU)
    backend.kernel = ChosenKernel("cute", lambda *args: None, "")
    backend.views = gpu_cache_views
    return backend


def step_of(prompts: list[int]) -> StepTrees:
    """A tree, a request without drafts and a tree cut to three nodes, behind rows of prompts."""
    slots, contexts, scheduled = [5, 2, 0], [100, 30, 7], [4, 0, 3]
    store = TreeStore(SLOTS, 4, VOCAB, CPU)
    stored(store, [BUSHY, DraftTree.empty(), BUSHY], slots, contexts)
    return attach_trees(store, step_rows(input_batch(slots, contexts, scheduled, prompts), 4))


@pytest.mark.parametrize("prompts", [[0, 0, 0], [0, 6, 0]])
def test_every_request_is_a_tree(backend: CudaTreeBackend, prompts: list[int]) -> None:
    """Rows of a prompt before its root are vLLM's to attend."""
    tables = [torch.zeros(3, 8, dtype=torch.int32)]
    trees = step_of(prompts)
    metadata = SimpleNamespace()
    backend.attach({"a": metadata, "b": metadata}, None, trees, tables)
    rows: Any = tree_rows_of(metadata)
    assert rows.covers_batch == (not any(prompts))
    first = [0, 5 + prompts[1], 6 + prompts[1]]
    plan = [[0, 1, 2], first, [5, 1, 4], [100, 30, 7], [0, 5, 6]]
    assert rows.metadata.plan.tolist() == plan
    assert rows.metadata.parent_rows.tolist() == [-1, 0, 0, 1, 1, -1, -1, 0, 0, 1]
    starts = rows.metadata.query_starts
    assert starts is None if any(prompts) else starts.tolist() == [0, 5, 6, 10]


def test_steps_without_drafts_are_vllms(backend: CudaTreeBackend) -> None:
    metadata = SimpleNamespace()
    backend.attach({"a": metadata}, None, None, [torch.zeros(3, 8, dtype=torch.int32)])
    assert tree_rows_of(metadata) is None


def test_what_no_walk_can_reach_hangs_below_its_root() -> None:
    step, _, _ = attached([BUSHY], num_nodes=4)
    assert parent_rows(step).tolist() == [-1, 0, 0, 1, 1]
    lost = step.without(torch.tensor([False, True, False, False, False]))
    assert parent_rows(lost).tolist() == [-1, 0, 0, 1, 1]
    # Rows of a tree that nobody drafted.
    empty, _, _ = attached([DraftTree.empty()], num_nodes=4)
    assert parent_rows(empty).tolist() == [-1, 0, 0, 0, 0]


def test_layers_attend_by_the_block_table_of_their_group(
    backend: CudaTreeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups share memory, in pages of as many bytes; a step's trees are the same in all."""
    pytest.importorskip("triton")
    from vllm_specplug.kernels import kv_compact_triton

    memory = torch.zeros(2 * 16 * 8)
    caches = [memory.view(2, 1, 16, 8), memory.view(1, 1, 32, 8)]
    window = AttnFeatures(window=7, sinks=torch.zeros(2))
    groups = [
        CacheGroup(0, {"a": caches[0]}),
        CacheGroup(2, {"b": caches[1]}, features={"b": window}),
    ]
    chosen: list[Any] = []
    ran: list[Any] = []
    moved: list[Any] = []

    def choose(requested: str, shape: Any, *rest: Any, **use: Any) -> ChosenKernel:
        chosen.append(shape.kinds)
        return ChosenKernel("triton", lambda *args, **more: ran.append((args, more)), "")

    monkeypatch.setattr(cuda_kernels, "choose_cuda_kernel", choose)
    monkeypatch.setattr(CudaTreeBackend, "capability", lambda self: (9, 0))
    monkeypatch.setattr(CudaTreeBackend, "fill_words", lambda *args: None)
    backend.bind(groups)
    assert chosen == [(FeatureKind(),), (FeatureKind(window=7, sinks=True),)]
    step, tokens, _ = attached([BUSHY], num_nodes=4)
    # Of the drafter's own group there is nothing to verify.
    tables = [torch.zeros(1, 8, dtype=torch.int32) for _ in range(3)]
    rows = backend.tree_rows(step, tables)
    query = torch.zeros(5, 2, 4)
    for cache, table, features in (
        (caches[0], tables[0], AttnFeatures()),
        (caches[1], tables[2], window),
    ):
        for _ in range(2):
            rows.attend(query, cache, query, 1.0, features, table)
    assert [args[1].shape[1] for args, _ in ran] == [16, 16, 32, 32]
    used = [args[4].block_table for args, _ in ran]
    assert used[0] is used[1] is tables[0] and used[2] is used[3] is tables[2]
    assert ran[2][0][4] is ran[3][0][4], "metadata are made once a step"
    assert [more for _, more in ran] == [{}, {}, *[{"features": window}] * 2]
    # Compaction uses each group's block table by request slot.
    backend.block_tables = tables
    monkeypatch.setattr(kv_compact_triton, "compact_paths_triton", lambda *a: moved.append(a))
    walk = walk_trees(step, torch.tensor([5, 2, 0, 0, 1]), tokens)
    assert walk.lengths.tolist() == [2]
    backend.compact(step, walk, torch.zeros(3, 5, dtype=torch.int64))
    for (layers, nodes, lengths, contexts, requests, table), size, own in zip(
        moved, (16, 32), (tables[0], tables[2]), strict=True
    ):
        assert layers.keys[0].shape[1] == size and table is own
        assert nodes[0, :2].tolist() == [0, 3] and lengths is walk.lengths
        assert (contexts.tolist(), requests.tolist()) == ([5], step.rows.slots.tolist())
