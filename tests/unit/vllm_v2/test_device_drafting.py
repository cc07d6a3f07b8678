# SPDX-License-Identifier: Apache-2.0
"""Drafting reads nothing of the device: it runs on a pretended one.

That the drafts of every other head read nothing is what tests/kernels/test_draft_graphs.py shows:
a capture refuses reads.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.e2e.tiny import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    make_eagle3_head,
    make_head,
    make_longspec_head,
)
from tests.pretended_graph import pretended_graphs
from tests.unit.budget.calibrations import calibration
from tests.unit.drafters import load_drafter
from tests.unit.vllm_v2.pretended import N, Recorder, Step, numbers, reads_the_device
from vllm_specplug.budget.adaptive_budget import AdaptiveBudget, Plan
from vllm_specplug.budget.step_cost import StepCostModel
from vllm_specplug.drafting import head_drafter
from vllm_specplug.drafting.device_requests import DeviceRequests
from vllm_specplug.drafting.ngram import NgramBranches
from vllm_specplug.drafting.reserved_rows import ReservedRows
from vllm_specplug.kernels import ngram_lookup_triton, tree_builder_triton, tree_merge_triton
from vllm_specplug.kernels.cuda_dispatch import ChosenKernel
from vllm_specplug.methods.block.drafter import BlockHeadDrafter
from vllm_specplug.methods.eagle3_tree.drafter import Eagle3Drafter
from vllm_specplug.methods.longspec.drafter import LongSpecDrafter
from vllm_specplug.metrics.step_stats import StepStats
from vllm_specplug.options import RowBudget
from vllm_specplug.tree.step_trees import committed_rows
from vllm_specplug.vllm_v2 import device_speculator
from vllm_specplug.vllm_v2.context_graphs import ContextGraphs
from vllm_specplug.vllm_v2.cuda_trees import CudaTreeBackend
from vllm_specplug.vllm_v2.device_speculator import DeviceSpeculator
from vllm_specplug.vllm_v2.draft_graphs import DraftGraphs, graph_depths
from vllm_specplug.vllm_v2.host_step import HostCopy
from vllm_specplug.vllm_v2.speculator import TreeSpeculator
from vllm_specplug.vllm_v2.step_context import StepRecord
from vllm_specplug.vllm_worker.cost.draft_planner import DraftPlanner
from vllm_specplug.vllm_worker.cost.late_budget import LateBudget
from vllm_specplug.vllm_worker.cuda_kernels import StepLimits

VOCAB = 64
META = torch.device("meta")
TARGET = SimpleNamespace(hidden_size=HIDDEN, vocab_size=VOCAB, num_hidden_layers=2)
LAUNCHES_OF_A_PART = 15
"""What a budget that follows the load adds when not every request of the batch gets a draft
forward. Beside their three kernels, n-gram branches add nothing."""


def top(logits: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    values, ids = logits.topk(width)
    return ids, values


@pytest.fixture
def drafter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BlockHeadDrafter:
    return with_causal_head(tmp_path, monkeypatch)


def on_the_device(
    cls: type[Any],
    head: Path,
    settings: Any,
    monkeypatch: pytest.MonkeyPatch,
    target: SimpleNamespace = TARGET,
) -> Any:
    """A drafter whose weights and caches lie on the pretended device."""
    weights = torch.zeros(VOCAB, HIDDEN, device=META)
    made = load_drafter(
        cls, head, settings, weights, text_config=target, num_nodes=N, max_depth=N,
        max_model_len=256,
    )  # fmt: skip
    limits = StepLimits(num_requests=4, num_rows=64, tree_rows=N + 1, context=256)
    monkeypatch.setattr(CudaTreeBackend, "cache_writer", lambda self: lambda *args: None)
    kernel = ChosenKernel("cute", lambda *args, **features: None, "")
    monkeypatch.setattr(CudaTreeBackend, "choose", lambda self, *shape, **use: kernel)
    backend = CudaTreeBackend("auto", 4, limits, META)
    backend.kernel = kernel
    layers: Any = [
        SimpleNamespace(kv_cache=numbers(9, spec.num_kv_heads, 16, 2 * spec.head_dim), spec=spec)
        for spec in made.cache_specs()
    ]
    table = numbers(4, 9, dtype=torch.int32)
    if layers:
        made.bind_cache(backend.draft_cache(layers, lambda: table, 0.25))
    if (window := made.window_spec()) is not None:
        state: Any = SimpleNamespace(max_requests=4, dtype=torch.float32)
        made.bind_window(backend.draft_window(window, state))
    if specs := made.target_cache_specs():
        made.bind_target_caches([
            backend.target_cache(
                numbers(9, spec.num_kv_heads, 16, 2 * spec.head_dim), lambda: table, spec
            )
            for spec in specs
        ])  # fmt: skip

    def built(ids: Any, log_probs: Any, budgets: Any, depths: Any, width: int, nodes: int) -> Any:
        assert all(t is None or t.is_meta for t in (ids, log_probs, budgets, depths))
        ints = [numbers(len(budgets), nodes, dtype=torch.int32) for _ in range(2)]
        scores = numbers(len(budgets), nodes, dtype=torch.float32)
        count = numbers(len(budgets), dtype=torch.int32)
        return numbers(len(budgets), nodes), *ints, scores, count

    def merged(head: Any, sizes: Any, branches: Any, table: Any, budgets: Any, nodes: int, *,
               lookup_only: bool) -> Any:  # fmt: skip
        given = (*(head or ()), sizes, branches, table, budgets)
        assert all(t.is_meta for t in given)
        return [built(None, None, budgets, None, 4, nodes) for _ in range(1 + lookup_only)]

    monkeypatch.setattr(head_drafter, "top_candidates", top)
    monkeypatch.setattr(tree_builder_triton, "build_best_first_triton", built)
    monkeypatch.setattr(tree_merge_triton, "merge_branches", merged)
    monkeypatch.setattr(ngram_lookup_triton, "NgramLookup", Lookup)
    return made


class Lookup:
    """In place of the kernels of lookups."""

    def __init__(self, longest: int, count: int, length: int, max_tokens: int) -> None:
        self.shape = count, length

    def __call__(self, tokens: Any, slots: Any, lengths: Any, depths: Any, most: int) -> Any:
        assert all(t.is_meta for t in (tokens, slots, lengths, depths))
        # The bound of the forward is 87 tokens; one more was emitted.
        assert most == 88
        int32 = {"dtype": torch.int32}
        count = self.shape[0]
        return numbers(len(slots), count, **int32), numbers(len(slots), *self.shape, **int32)


def speculator(step: Step, drafter: Any, monkeypatch: pytest.MonkeyPatch) -> DeviceSpeculator:
    batch = step.batch
    batch.num_computed_tokens_np = np.array([40, 60, 80])
    batch.num_scheduled_tokens = np.array([N + 1, N + 1, 4])
    batch.num_reqs = 3
    batch.query_start_loc = numbers(4, dtype=torch.int32)
    slots = 7
    ints = {"dtype": torch.int32}
    made: Any = object.__new__(DeviceSpeculator)
    stats = StepStats()
    budget = RowBudget(max_nodes=N, max_step_rows=64, scheduler_rows=64, max_requests=4)
    options: Any = SimpleNamespace(
        num_speculative_tokens=N, tree_budget=N, max_request_budget=None, tree_width=4,
        reads_next_tokens=False, max_step_rows=64,
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
        trees={}, copies={}, len_upper_bound=dict.fromkeys("abc", 256),
        len_lower_bound=dict.fromkeys("abc", 9), penalties={}, _paced=(0.0, []),
        reserved=None, _asked=None,
        schedules_ahead=True, each_rank_schedules=False,
        max_num_tokens=64, _ngrams=None, _late_budget=LateBudget(planner), extra_args={}, plain={},
        _late=device_speculator.deque(), _held=None, _held_steps=0,
        draft_graphs=None, context_graphs=None,
        step=SimpleNamespace(
            walk=step.walk,
            committed=lambda batch: committed_rows(step.trees, step.walk, step.slots, step.slots),
            record=lambda running: StepRecord(None, None, running),
        ),
        learn=lambda batch, walk, seq_lens, trees: seq_lens.tolist(),
    )  # fmt: skip
    # Every step is planned; a test of its own looks at held plans.
    monkeypatch.setattr(device_speculator, "HELD_STEPS", 0)
    # Copies that have not come are not looked at.
    monkeypatch.setattr(HostCopy, "has_arrived", False)
    monkeypatch.setattr(device_speculator, "get_tensor_model_parallel_world_size", lambda: 1)
    return made


@pytest.fixture
def step() -> Step:
    return Step()


@pytest.fixture
def made(step: Step, drafter: Any, monkeypatch: pytest.MonkeyPatch) -> DeviceSpeculator:
    return speculator(step, drafter, monkeypatch)


def propose(made: DeviceSpeculator, step: Step) -> torch.Tensor:
    rows = step.batch.num_tokens
    count = len(getattr(made.proposer.drafter.config, "target_layer_ids", ()))
    aux = [numbers(rows, HIDDEN, dtype=torch.float32) for _ in range(count)]
    hidden = numbers(rows, HIDDEN, dtype=torch.float32)
    sampled = numbers(3, dtype=torch.int32)
    return made.propose(step.batch, None, None, hidden, aux, sampled)


def launches(made: DeviceSpeculator, step: Step) -> int:
    """Operations of a draft, which reads nothing of the device; it is made twice."""
    assert reads_the_device(lambda: propose(made, step)) is None
    with Recorder() as recorder:
        token_ids = propose(made, step)
    assert token_ids.is_meta and token_ids.shape == (3, N)
    assert recorder.operations
    return recorder.operations


def drafting(
    make: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Step, Any, DeviceSpeculator]:
    """A step, a drafter and its speculator."""
    step, drafter = Step(), make(folder, monkeypatch)
    made = speculator(step, drafter, monkeypatch)
    made.spec.reads_next_tokens = make is with_draft_layer
    return step, drafter, made


def plans_made(
    monkeypatch: pytest.MonkeyPatch, depths: list[int] | None = None
) -> list[tuple[list[int], Plan]]:
    """The plans from now on, of these depths where there are any, and the limits they keep to."""
    plans: list[tuple[list[int], Plan]] = []
    planned = LateBudget.plan

    def plan(*args: Any) -> Plan:
        limits, found = list(args[4]), planned(*args)
        if depths is not None:
            found.depths = np.resize(depths, len(limits))
        plans.append((limits, found))
        return found

    monkeypatch.setattr(LateBudget, "plan", plan)
    return plans


def with_causal_head(folder: Path, monkeypatch: pytest.MonkeyPatch) -> BlockHeadDrafter:
    head = make_head(folder / "head", VOCAB)
    return on_the_device(BlockHeadDrafter, head, None, monkeypatch)


def with_draft_layer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Eagle3Drafter:
    head = make_eagle3_head(folder / "head", VOCAB, draft_vocab_size=40)
    return on_the_device(Eagle3Drafter, head, None, monkeypatch)


def with_window(folder: Path, monkeypatch: pytest.MonkeyPatch) -> LongSpecDrafter:
    head = make_longspec_head(folder / "head", VOCAB, window=24)
    shape = {
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
        "intermediate_size": 128, "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    }  # fmt: skip
    target = SimpleNamespace(**vars(TARGET), **shape)
    return on_the_device(LongSpecDrafter, head, None, monkeypatch, target=target)


# Operations from a step's walk to the next step's trees, of a head with two layers or a draft of
# four levels. Its kernels (attention, tree builder, cache writes) and vLLM's are not among them.
# Less is better; more needs a reason.
LAUNCHES = {with_causal_head: 73, with_draft_layer: 380, with_window: 424}


@pytest.mark.parametrize("make", LAUNCHES)
def test_a_draft_reads_nothing_and_keeps_to_its_launches(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, _, made = drafting(make, tmp_path, monkeypatch)
    found = launches(made, step)
    assert found <= LAUNCHES[make], found
    assert len(made._late) == 2


def defaults(made: DeviceSpeculator, drafter: BlockHeadDrafter) -> AdaptiveBudget:
    """A budget that follows the load, and three n-gram branches."""
    drafter.ngrams = NgramBranches(3, N)
    planner = made.planner
    planner.adaptive = AdaptiveBudget(StepCostModel(calibration(draft=0.3)), planner.row_budget, 4)
    made.reserved = made._asked = None
    return planner.adaptive


@pytest.mark.parametrize("depths", [[4, 4, 4], [2, 0, 4], [0, 0, 0]])
def test_the_defaults_read_nothing_and_keep_to_their_launches(
    step: Step,
    made: DeviceSpeculator,
    depths: list[int],
    drafter: BlockHeadDrafter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Recorder() as fixed:
        propose(made, step)
    made._late.clear()
    defaults(made, drafter)
    plans_made(monkeypatch, depths)
    asked: list[DeviceRequests] = []
    drafts = drafter.propose_on_device
    monkeypatch.setattr(drafter, "propose_on_device", lambda r: asked.append(r) or drafts(r))
    more = (0 in depths) * LAUNCHES_OF_A_PART
    found = launches(made, step)
    assert found <= fixed.operations + more, (found, fixed)
    # A forward for those who get one, as deep as any of them.
    forward = [(sum(d > 0 for d in depths), 4)][: any(depths)]
    assert [(len(r), r.max_depth) for r in asked] == 2 * forward
    # Two steps and what was drafted in them, of which nothing is known yet.
    assert len(made._late) == 4 and made.reserved is None


def from_graphs(made: DeviceSpeculator, drafter: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Gives it graphs, whose replays are noted: nothing is captured of a pretended device."""
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
    replayed: list[Any] = []
    with pretended_graphs(distributed=False):
        graphs = DraftGraphs(config, META, drafter, 4, N, graph_depths(4, True))
    graphs._graphs_captured = True
    monkeypatch.setattr(graphs, "run_fullgraph", replayed.append)
    made.draft_graphs = graphs
    if drafter.observes_from_graphs:
        config.compilation_config.cudagraph_capture_sizes = [64]
        with pretended_graphs(distributed=False):
            contexts = made.context_graphs = ContextGraphs(config, META, drafter)
        contexts._states = [numbers(64, HIDDEN)]
        contexts._graphs_captured = True
        monkeypatch.setattr(contexts, "run_fullgraph", lambda desc: None)
    return replayed


# The same where the draft and its trees are one graph, however many layers or levels there
# are, and with a block head what it keeps of a step's tokens another one; the draft's replay
# among them.
LAUNCHES_WITH_A_GRAPH = {with_causal_head: 9, with_draft_layer: 41}


@pytest.mark.parametrize("depths", [[4, 4, 4], [2, 0, 1], [0, 0, 0]])
@pytest.mark.parametrize("make", LAUNCHES_WITH_A_GRAPH)
def test_the_defaults_from_graphs(
    make: Any, depths: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who is drafted for, and how deep, is nothing that a graph must be made anew for."""
    step, drafter, made = drafting(make, tmp_path, monkeypatch)
    defaults(made, drafter)
    plans_made(monkeypatch, depths)
    replayed = from_graphs(made, drafter, monkeypatch)
    wanted = {4: [(4, 4)], 2: [(4, 2)], 0: []}[max(depths)]
    found = launches(made, step) + len(wanted)
    assert [(desc.num_tokens, desc.max_query_len) for desc in replayed] == 2 * wanted
    assert found <= LAUNCHES_WITH_A_GRAPH[make], found


def test_a_budget_reads_trees_once_for_a_scheduler_that_waits(
    step: Step, made: DeviceSpeculator, drafter: BlockHeadDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: it waits for the device."""
    defaults(made, drafter)
    made.schedules_ahead = False
    read: list[Any] = []

    def reads(self: HostCopy) -> Any:
        read.append(self)
        raise RuntimeError("a copy of a meta tensor holds nothing")

    monkeypatch.setattr(HostCopy, "read", reads)
    assert reads_the_device(lambda: propose(made, step))
    assert len(read) == 1


def test_trees_are_cut_for_a_scheduler_that_waits(
    made: DeviceSpeculator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To what the first rank wants; other requests have no nodes."""
    wanted: Any = {"a": 9, "c": 9}
    monkeypatch.setattr(device_speculator, "first_rank_values", lambda own: [2.0, own[1], 5.0])
    monkeypatch.setattr(made, "_wanted", lambda late, room: wanted)
    made.device = torch.device("cpu")
    late: Any = SimpleNamespace(req_ids=["a", "b", "c"], copy=SimpleNamespace(room=[9, 9, 9]))
    assert made._cut(late).tolist() == late.copy.room == [2, 0, 5]


def test_reserved_rows_hold_for_the_trees_that_fill_them(
    step: Step, made: DeviceSpeculator, drafter: BlockHeadDrafter
) -> None:
    defaults(made, drafter)
    made._asked = ReservedRows({"a": 5, "b": 0}, others=3)
    # Decided since the last output left: for the step after.
    made.reserved = ReservedRows({"a": 0, "b": 9}, others=0)
    propose(made, step)
    assert isinstance(made._late[-1], device_speculator.PendingDraft)
    assert made._late[-1].room == [5, 0, 3]
    assert made._late[-1].rows == [0, 1, 2] and made._late[-1].decoding == ["a", "b", "c"]


def test_a_decision_holds_while_the_batch_stays_the_same(
    step: Step, made: DeviceSpeculator, drafter: BlockHeadDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = defaults(made, drafter)
    monkeypatch.setattr(device_speculator, "HELD_STEPS", 3)
    plans = plans_made(monkeypatch, [4])
    assert [propose(made, step) is not None and len(plans) for _ in range(5)] == [1, 1, 1, 1, 2]
    drafts = [late for late in made._late if isinstance(late, device_speculator.PendingDraft)]
    assert [late.plan for late in drafts] == [plan for _, plan in plans]
    first = plans[0][1]
    # Held steps count for fairness as those that were decided.
    assert budget.fairness._emitted[first.slots].tolist() == [3.0] * 3
    # Another batch is planned anew, and so is the step behind one that only measured.
    made.plain["a"] = "opted_out"
    propose(made, step)
    assert len(plans) == 3 and made._held_steps
    first.is_trial = True
    monkeypatch.setattr(LateBudget, "wanted", lambda *_: {})
    copy = SimpleNamespace(merged=[None] * 3, lookup_only=[None] * 3)
    made._decide(replace(drafts[0], _copy=copy))
    assert made._held_steps == 0


def test_requests_are_drafted_for_up_to_their_end(
    step: Step, made: DeviceSpeculator, drafter: BlockHeadDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host does not take drafts for accepted, of which it has not heard."""
    defaults(made, drafter)
    made.len_lower_bound = {"a": 190, "b": 197, "c": 199}
    plans = plans_made(monkeypatch)
    propose(made, step)
    assert [limits for limits, _ in plans] == [[9, 2, 0]]


def test_schedulers_of_all_ranks_are_asked_for_what_the_first_rank_wants(
    step: Step, made: DeviceSpeculator, drafter: BlockHeadDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every step, whether or not this rank has decided anything since the last one."""
    made.extra_args |= dict.fromkeys("abc")
    first = ReservedRows({"a": 1, "b": 2, "c": 0}, others=1)
    shared: list[Any] = []

    def share(own: ReservedRows | None, req_ids: list[str]) -> ReservedRows:
        shared.append((own, req_ids))
        return first

    monkeypatch.setattr(f"{TreeSpeculator.__module__}.first_rank_reservation", share)
    own = ReservedRows({"a": 0, "b": 9}, others=0)
    for each_rank_schedules in (False, True):
        made.each_rank_schedules = each_rank_schedules
        for decided in (own, None):
            defaults(made, drafter)
            made.reserved = decided
            propose(made, step)
            expected = first if each_rank_schedules else decided
            assert made.reserved == made._asked == expected
    assert shared == [(own, ["a", "b", "c"]), (None, ["a", "b", "c"])]


def test_fixed_budgets_reserve_their_own_rows(step: Step, made: DeviceSpeculator) -> None:
    """Of a scheduler that works ahead, which would reserve the most that a request may have."""
    made.extra_args |= {"b": {"specplug_tree_budget": 3}, "c": {"specplug_tree_budget": 0}}
    propose(made, step)
    most = made._budgets(step.batch, N)[0]
    # A request that begins has the most that any may have.
    assert most > 3 and made.reserved == ReservedRows({"a": most, "b": 3, "c": 0}, N)
    # What was asked for with the last output holds, even where a request wants more by now.
    made._asked = ReservedRows({"a": 2, "b": 3, "c": 0})
    assert made._rows_of(step.batch, np.array([N, 3, 0]), made._asked).tolist() == [2, 3, 0]
    made.req_states.prefill_len.np[1] = 999  # of "a": its prompt goes on
    propose(made, step)
    assert made.reserved == ReservedRows({"a": most, "b": 3, "c": 0}, N)
    made.schedules_ahead, made.reserved = False, None
    propose(made, step)
    assert made.reserved is None


def test_requests_without_a_budget_are_not_drafted_for(
    step: Step, made: DeviceSpeculator, drafter: BlockHeadDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
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
