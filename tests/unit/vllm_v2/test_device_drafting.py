# SPDX-License-Identifier: Apache-2.0
"""Drafting of a block head on V2 reads nothing of the device: it runs on a pretended one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.e2e.tiny import HIDDEN, make_head
from tests.pretended_graph import pretended_graphs
from tests.unit.vllm_v2.pretended import N, Recorder, Step, reads_the_device
from vllm_specplug.budget import RowBudget
from vllm_specplug.drafting.drafter import DeviceRequests, DrafterOptions, TargetWeights
from vllm_specplug.kernels import tree_builder_triton
from vllm_specplug.kernels.cuda_dispatch import ChosenKernel
from vllm_specplug.methods.block import drafter as block_head
from vllm_specplug.methods.block.fused_head import plain_linear
from vllm_specplug.methods.block.options import BlockSettings
from vllm_specplug.methods.jetspec.drafter import JetSpecDrafter
from vllm_specplug.metrics import StepStats
from vllm_specplug.vllm_v2 import device_speculator
from vllm_specplug.vllm_v2.device_speculator import DeviceSpeculator
from vllm_specplug.vllm_v2.device_trees import committed_rows
from vllm_specplug.vllm_v2.draft_graphs import DraftGraphs
from vllm_specplug.vllm_v2.host_step import HostCopy, StepRecord
from vllm_specplug.vllm_worker.cuda_backend import CudaKernels, StepLimits
from vllm_specplug.vllm_worker.draft_planner import DraftPlanner

VOCAB = 64
META = torch.device("meta")
LAUNCHES_PER_DRAFT = 190
"""Operations from a step's walk to the next step's trees, with a head of two layers; its kernels
(attention, tree builder, cache writes) and vLLM's not among them."""
LAUNCHES_FROM_A_GRAPH = 100
"""The same where the draft's forward and its trees are one graph, however many layers the head has;
its replay among them."""


def numbers(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


@pytest.fixture
def drafter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JetSpecDrafter:
    made = JetSpecDrafter(
        DrafterOptions(
            head_path=str(make_head(tmp_path / "head", VOCAB)), num_nodes=N, tree_depth=4,
            max_depth=N, tree_width=4, tree_builder="best_first", hybrid_lambda=0.1,
            settings=BlockSettings(None), ngram_topk=0, max_model_len=256,
        )
    )  # fmt: skip
    weights = torch.zeros(VOCAB, HIDDEN, device=META)
    made.load(
        TargetWeights(
            embed_tokens=weights, lm_head=weights, dtype=torch.float32, device=META,
            make_linear=plain_linear,
            text_config=SimpleNamespace(
                hidden_size=HIDDEN, vocab_size=VOCAB, num_hidden_layers=2
            ),
        )
    )  # fmt: skip
    limits = StepLimits(num_requests=4, num_rows=64, tree_rows=N + 1, context=256)
    monkeypatch.setattr(CudaKernels, "cache_writer", lambda self: lambda *args: None)
    kernel = ChosenKernel("cute", lambda *args: None, "")
    monkeypatch.setattr(CudaKernels, "choose", lambda self, *shape, **use: kernel)
    backend = CudaKernels("auto", 4, limits, META)
    backend.kernel = kernel
    layers: Any = [
        SimpleNamespace(kv_cache=numbers(9, spec.num_kv_heads, 16, 2 * spec.head_dim))
        for spec in made.cache_specs()
    ]
    table = numbers(4, 9, dtype=torch.int32)
    made.bind_cache(backend.draft_cache(layers, lambda: table, 0.25))

    def top(logits: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        values, ids = logits.topk(width)
        return ids, values

    def built(ids: Any, log_probs: Any, budgets: Any, depths: Any, width: int, nodes: int) -> Any:
        assert all(t.is_meta for t in (ids, log_probs, budgets, depths))
        ints = [numbers(len(budgets), nodes, dtype=torch.int32) for _ in range(2)]
        scores = numbers(len(budgets), nodes, dtype=torch.float32)
        count = numbers(len(budgets), dtype=torch.int32)
        return numbers(len(budgets), nodes), *ints, scores, count

    monkeypatch.setattr(block_head, "top_candidates", top)
    monkeypatch.setattr(tree_builder_triton, "build_best_first_triton", built)
    return made


def speculator(step: Step, drafter: Any, monkeypatch: pytest.MonkeyPatch) -> DeviceSpeculator:
    batch = step.batch
    batch.req_ids = ["a", "b", "c"]
    batch.idx_mapping_np = np.array([1, 4, 2])
    batch.num_computed_tokens_np = np.array([40, 60, 80])
    batch.num_scheduled_tokens = np.array([N + 1, N + 1, 4])
    batch.num_reqs = 3
    slots = 7
    ints = {"dtype": torch.int32}
    made: Any = object.__new__(DeviceSpeculator)
    stats = StepStats()
    budget = RowBudget(max_nodes=N, max_step_rows=64, scheduler_rows=64, max_requests=4)
    options: Any = SimpleNamespace(
        num_speculative_tokens=N, tree_budget=N, max_request_budget=None, tree_width=4,
        max_draft_context=None, reads_next_tokens=False, max_step_rows=64,
    )  # fmt: skip
    planner = DraftPlanner(options, budget, stats, VOCAB)
    planner.begin_step()
    made.__dict__.update(
        spec=options,
        device=META,
        store=step.store,
        planner=planner,
        stats=stats,
        proposer=SimpleNamespace(drafter=drafter, options=drafter.options),
        max_model_len=256,
        req_states=SimpleNamespace(
            total_len=SimpleNamespace(gpu=numbers(slots, **ints)),
            num_computed_tokens=SimpleNamespace(gpu=numbers(slots, **ints)),
            all_token_ids=SimpleNamespace(gpu=numbers(slots, 256, **ints)),
            last_sampled_tokens=numbers(slots, 1),
            max_seq_len=np.full(slots, 200, np.int32),
            prefill_len=SimpleNamespace(np=np.full(slots, 9, np.int32)),
        ),
        draft_graphs=None,
        trees={}, copies={}, known={}, extra_args={}, plain={}, _late=device_speculator.deque(),
        committed_rows=lambda batch: committed_rows(step.trees, step.walk, step.slots, step.slots),
        walk=lambda: step.walk,
        running=lambda: StepRecord(None, None, planner.running),
        record=lambda batch, walk, seq_lens, trees: seq_lens.tolist(),
    )  # fmt: skip
    # Copies that have not come are not looked at.
    monkeypatch.setattr(HostCopy, "has_come", False)
    monkeypatch.setattr(device_speculator, "get_tensor_model_parallel_world_size", lambda: 1)
    return made


def propose(made: DeviceSpeculator, step: Step) -> torch.Tensor:
    rows = step.batch.num_tokens
    aux = [numbers(rows, HIDDEN, dtype=torch.float32) for _ in range(2)]
    hidden = numbers(rows, HIDDEN, dtype=torch.float32)
    sampled = numbers(3, dtype=torch.int32)
    return made.propose(step.batch, None, None, hidden, aux, sampled)


def test_a_draft_reads_nothing_and_keeps_to_its_launches(
    drafter: JetSpecDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Step()
    made = speculator(step, drafter, monkeypatch)
    assert reads_the_device(lambda: propose(made, step)) is None
    with Recorder() as recorder:
        token_ids = propose(made, step)
    assert token_ids.is_meta and token_ids.shape == (3, N)
    assert 0 < recorder.operations <= LAUNCHES_PER_DRAFT, recorder.operations
    assert len(made._late) == 2


def test_a_draft_from_a_graph_is_one_launch(
    drafter: JetSpecDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, replayed = Step(), []
    made = speculator(step, drafter, monkeypatch)
    config: Any = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=4),
        compilation_config=SimpleNamespace(
            cudagraph_capture_sizes=[1, 4], max_cudagraph_capture_size=4
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
        model_config=SimpleNamespace(max_model_len=256),
        speculative_config=None,
    )
    with pretended_graphs(distributed=False):
        graphs = DraftGraphs(config, META, drafter.propose_on_device, 4, N)
    graphs._graphs_captured = True
    monkeypatch.setattr(graphs, "run_fullgraph", replayed.append)
    made.draft_graphs = graphs
    assert reads_the_device(lambda: propose(made, step)) is None
    replayed.clear()
    with Recorder() as recorder:
        token_ids = propose(made, step)
    assert [desc.num_tokens for desc in replayed] == [4]
    assert token_ids.is_meta and token_ids.shape == (3, N)
    assert 0 < recorder.operations + 1 <= LAUNCHES_FROM_A_GRAPH, recorder.operations


@pytest.mark.parametrize("reason", ["a budget that follows the load", "branches of the host"])
def test_what_the_host_decides_reads_a_step_once(
    reason: str, drafter: JetSpecDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: trees of the host, for which it waits."""
    step = Step()
    made = speculator(step, drafter, monkeypatch)
    if reason == "branches of the host":
        drafter.ngrams = SimpleNamespace()  # type: ignore[assignment]
    else:
        made.planner.adaptive = SimpleNamespace()  # type: ignore[assignment]
    read: list[Any] = []
    monkeypatch.setattr(HostCopy, "read", lambda self: read.append(self) or self._copy)
    assert reads_the_device(lambda: propose(made, step))
    assert len(read) == 1


def test_requests_without_a_budget_are_not_drafted_for(
    drafter: JetSpecDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Step()
    made = speculator(step, drafter, monkeypatch)
    seen: list[DeviceRequests] = []
    drafts = drafter.propose_on_device
    monkeypatch.setattr(drafter, "propose_on_device", lambda r: seen.append(r) or drafts(r))
    made.plain["b"] = "embeds"
    made.extra_args["c"] = {"specplug_tree_budget": 0}
    made.req_states.prefill_len.np[1] = 999  # of "a": its prompt goes on
    assert made._budgets(step.batch, N).tolist() == [0, 0, 0]
    propose(made, step)
    assert not seen
    made.req_states.prefill_len.np[1] = 9
    assert made._budgets(step.batch, 5).tolist() == [5, 0, 0]
    propose(made, step)
    assert len(seen) == 1 and len(seen[0]) == 3
