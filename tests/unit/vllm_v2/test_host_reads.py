# SPDX-License-Identifier: Apache-2.0
"""Nothing of a tree is read on the host between a step's start and its tokens.

The code runs on tensors of a pretended device, which have shapes and no values: whoever asks for
one fails.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import vllm.v1.worker.cpu.shm  # noqa: F401  stand-ins for what CPUs lack

from tests.unit.vllm_v2.pretended import N, Recorder, Step, numbers, reads_the_device
from tests.unit.vllm_v2.steps import SLOTS, VOCAB
from vllm_specplug.kernels.cuda_dispatch import ChosenKernel
from vllm_specplug.metrics.step_stats import StepStats
from vllm_specplug.tree.step_trees import set_axes
from vllm_specplug.vllm_v2 import sampler as sampler_module
from vllm_specplug.vllm_v2.cuda_trees import CudaTreeBackend
from vllm_specplug.vllm_v2.runner import TreeRunnerMixin
from vllm_specplug.vllm_v2.sampler import TreeSampler
from vllm_specplug.vllm_v2.step_context import StepContext
from vllm_specplug.vllm_v2.stop_tokens import StopTokens
from vllm_specplug.vllm_worker.cost.step_clock import StepClock
from vllm_specplug.vllm_worker.cuda_kernels import StepLimits

# -- a whole step of the runner ------------------------------------------------------------

LAUNCHES_PER_STEP = 21
"""Operations of a step with drafts, from its inputs to its tokens and contiguous caches; vLLM's own
not among them. Less is better; more needs a reason."""
LAUNCHES_WITH_GRAPHS = 9
"""The same where the forward is one graph, whose replay is not among them: rows of padding and
chains are arranged as trees, too, in memory that stays."""


class PretendedBackend(CudaTreeBackend):
    """CUDA's backend, without its kernels."""

    def __init__(self) -> None:
        self.groups = [(0, cast(Any, None))]
        self.limits, self.device = StepLimits(8, 64, N + 1, 256), torch.device("meta")
        self.views: Any = None
        self.kernel = ChosenKernel("cute", lambda *args: None, "")

    def step_clock(self) -> StepClock:
        return StepClock()


class _Stock:
    """What vLLM's runner does around the overrides: its kernels run elsewhere."""

    def prepare_attn(self, batch: Any) -> tuple[Any, torch.Tensor]:
        return (numbers(3, 9, dtype=torch.int32),), numbers(1, batch.num_tokens)

    def sample(self, hidden_states: Any, batch: Any, grammar_output: Any) -> Any:
        return self.rejection_sampler(hidden_states, batch)  # type: ignore[attr-defined]


class _Runner(TreeRunnerMixin, _Stock): ...


def _runner(step: Step) -> Any:
    rows = len(step.trees.depths)
    batch, samples = step.batch, step.samples
    batch.num_draft_tokens = rows - 3
    batch.query_start_loc_np = np.array([0, 17, 39, 43])
    batch.positions = numbers(batch.num_tokens)
    batch.input_ids = numbers(batch.num_tokens, dtype=torch.int32)
    runner: Any = object.__new__(_Runner)
    runner.tree_backend = PretendedBackend()
    runner.tree_backend.block_tables = [numbers(SLOTS, 9, dtype=torch.int32)]
    runner.num_speculative_steps = N
    runner.tree_store = step.store
    runner.speculator = SimpleNamespace(
        trees={}, schedules_ahead=True, tree_nodes=lambda req_ids: dict
    )
    runner.planner = SimpleNamespace(clock=StepClock(), running=(None, None))
    runner.tree_metrics = SimpleNamespace(stats=StepStats())
    runner.step = StepContext()
    sampler = SimpleNamespace(
        compute_nans=False,
        return_sampling_mask=False,
        get_logprobs_dims=lambda slots: None,
        sample=lambda *args, **kwargs: (samples, None),
        req_states=SimpleNamespace(prefill_len=SimpleNamespace(gpu=None)),
    )
    stops = StopTokens(SLOTS, torch.device("meta"))
    runner.rejection_sampler = TreeSampler(sampler, runner.step, stops)
    return runner


def _run(runner: Any, batch: Any) -> Any:
    tables, _ = runner.prepare_attn(batch)
    runner.tree_backend.tree_rows(runner.step.trees, tables)
    return _sample(runner, batch)


def _sample(runner: Any, batch: Any) -> Any:
    hidden_states = numbers(len(batch.logits_indices), VOCAB, dtype=torch.float32)
    return runner.sample(hidden_states, batch, None)


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What compaction was given; kernels of vLLM and ours do not run here."""
    from vllm_specplug.kernels import kv_compact_triton

    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(kv_compact_triton, "compact_paths_triton", lambda *args: calls.append(args))
    monkeypatch.setattr(
        sampler_module, "get_num_sampled_and_rejected", lambda counts, *rest: (counts, counts)
    )
    return calls


def test_a_step_reads_nothing_and_keeps_to_its_launches(moved: list[tuple[Any, ...]]) -> None:
    step = Step()
    runner = _runner(step)
    assert reads_the_device(lambda: _run(runner, step.batch)) is None
    with Recorder() as recorder:
        output = _run(runner, step.batch)
    assert output.sampled_token_ids.is_meta
    paths, lengths, contexts, requests, table = moved[-1][1:]
    assert paths.shape == (3, N) and len(lengths) == len(contexts) == len(requests) == 3
    assert all(given.is_meta for given in moved[-1][1:]) and requests.dtype == torch.int64
    assert {x.dtype for x in (paths, lengths, contexts, table)} == {torch.int32}
    assert table.shape == (SLOTS, 9)
    assert 0 < recorder.operations <= LAUNCHES_PER_STEP, recorder.operations


def test_a_step_from_a_graph_reads_nothing_and_keeps_to_its_launches(
    moved: list[tuple[Any, ...]],
) -> None:
    step = Step()
    runner, batch = _runner(step), step.batch
    backend = runner.tree_backend
    batch.query_start_loc = numbers(7, dtype=torch.int32)
    batch.num_tokens_after_padding, batch.max_query_len = 48, None
    padded = SimpleNamespace(**{**vars(batch), "seq_lens": numbers(6, dtype=torch.int32)})
    tables = (numbers(6, 9, dtype=torch.int32),)

    def run() -> Any:
        runner.prepare_attn(batch)
        rows = backend.graph_rows(runner.step.trees, padded, tables)
        assert rows.covers_batch and rows.metadata.plan.shape == (5, 6)
        assert rows.metadata.max_rows == N + 1 and rows.metadata.max_context == 256
        return _sample(runner, batch)

    assert reads_the_device(run) is None
    with Recorder() as recorder:
        run()
    assert 0 < recorder.operations <= LAUNCHES_WITH_GRAPHS, recorder.operations


def test_rotary_positions_on_several_axes_read_nothing() -> None:
    step = Step()
    # As in vLLM, a view of a buffer with more columns.
    positions = numbers(3, len(step.slots) + 9)[:, :-9]
    with Recorder() as recorder:
        set_axes(step.trees, positions)
    assert 0 < recorder.operations <= 6, recorder.operations


def test_statistics_that_read_the_walk_are_noticed(moved: list[tuple[Any, ...]]) -> None:
    """The control: what a runner does where the device's memory is the host's."""
    step = Step()
    runner = _runner(step)
    runner.tree_backend.is_host = True
    runner.speculator.learn = lambda batch, walk, seq_lens, trees: walk.lengths.tolist()
    assert reads_the_device(lambda: _run(runner, step.batch))
