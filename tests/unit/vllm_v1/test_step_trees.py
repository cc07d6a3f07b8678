# SPDX-License-Identifier: Apache-2.0
"""Which tree stands behind the draft tokens of a step, and that no other forward carries one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import SchedulerConfig

from vllm_specplug.metrics import StepStats
from vllm_specplug.options import max_scheduled_rows
from vllm_specplug.tree import DraftTree
from vllm_specplug.vllm_attention.tree_rows import TREE_ROWS_ATTRIBUTE
from vllm_specplug.vllm_v1 import runner as runner_module
from vllm_specplug.vllm_v1.runner import TreeRunnerMixin
from vllm_specplug.vllm_v1.tree_backend import CpuTreeBackend
from vllm_specplug.vllm_worker.state_layers import StateLayers
from vllm_specplug.vllm_worker.step import StepRequest, TreeStep

# Siblings 5 and 6, then 8 below 5.
FORK = DraftTree(
    np.array([5, 6, 8]),
    np.array([-1, -1, 0], np.int32),
    np.array([1, 1, 2], np.int32),
    np.zeros(3, np.float32),
)
CHAIN = DraftTree.chain([5, 6, 8])


def _runner(tree: DraftTree, constrained: bool) -> Any:
    runner: Any = object.__new__(TreeRunnerMixin)
    runner.proposed_trees = {"r": tree}
    runner.tree_constrained = {"r"} if constrained else set()
    runner.tree_metrics = SimpleNamespace(stats=StepStats())
    return runner


@pytest.mark.parametrize("scheduled", [1, 2, 3])
def test_a_grammar_that_was_moved_along_a_line_verifies_no_tree(scheduled: int) -> None:
    """Where the parents got lost, vLLM fills masks along the flat list: wrong for siblings."""
    runner = _runner(FORK, constrained=True)
    tree = runner._tree_for("r", [5, 6, 8][:scheduled], None)
    if scheduled == 1:
        assert tree is not None and tree.num_nodes == 1
        return
    assert tree is None
    assert runner.tree_metrics.stats.plain_steps == {"grammar": 1}


@pytest.mark.parametrize(
    ("tree", "constrained", "kept"),
    [(FORK, False, None), (FORK, True, [0, 1, 2]), (CHAIN, True, None), (CHAIN, False, None)],
)
def test_trees_whose_masks_are_right_are_verified(
    tree: DraftTree, constrained: bool, kept: list[int] | None
) -> None:
    runner = _runner(tree, constrained)
    found = runner._tree_for("r", [5, 6, 8], kept)
    assert found is not None
    assert found.parent_indices.tolist() == tree.parent_indices.tolist()
    assert not runner.tree_metrics.stats.plain_steps


@pytest.mark.parametrize("kept", [[0, 1, 7], [0, 1], []])
def test_nodes_kept_of_another_tree_are_no_tree(
    kept: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "get_tensor_model_parallel_rank", lambda: 0)
    runner = _runner(FORK, constrained=True)
    assert runner._tree_for("r", [5, 6, 8], kept) is None
    assert runner.tree_metrics.stats.plain_steps == {"unmatched": 1}


class _Stock:
    """A runner whose dummy batch builds attention metadata as its steps do."""

    def _build_attention_metadata(self, **kwargs: Any) -> tuple[dict[str, Any], Any]:
        self.built = {"layer": SimpleNamespace()}
        return self.built, SimpleNamespace(block_table_tensor=None)

    def _dummy_run(self, num_tokens: int) -> int:
        self._build_attention_metadata()
        return num_tokens


class _Runner(TreeRunnerMixin, _Stock):
    def __init__(self) -> None:
        self.drafter: Any = SimpleNamespace(state_layers=StateLayers())
        self.tree_backend = CpuTreeBackend()
        self.tree_backend.tree_rows = lambda *args: "rows"  # type: ignore[method-assign]
        self.tree_step = TreeStep([StepRequest(0, 0, 4, 10, FORK)])


def test_dummy_batches_carry_no_trees() -> None:
    """A replica without requests runs one beside the others; its last step's trees are over."""
    runner: Any = _Runner()
    runner._build_attention_metadata()
    assert getattr(runner.built["layer"], TREE_ROWS_ATTRIBUTE) == "rows"
    assert runner._dummy_run(4) == 4
    assert not hasattr(runner.built["layer"], TREE_ROWS_ATTRIBUTE)


@pytest.mark.parametrize(("scheduled", "expected"), [(None, 512), (64, 64), (1024, 512)])
def test_steps_hold_no_more_rows_than_the_scheduler_gives_them(
    scheduled: int | None, expected: int
) -> None:
    config = SchedulerConfig(
        max_model_len=256,
        is_encoder_decoder=False,
        max_num_batched_tokens=512,
        max_num_seqs=4,
        max_num_scheduled_tokens=scheduled,
    )
    assert max_scheduled_rows(config) == expected


def test_nans_are_counted_where_tokens_are_from() -> None:
    """vLLM's count of a request is that of a row; a rejected draft's may hold anything."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    class Runner(TreeRunnerMixin, GPUModelRunner):
        def __init__(self) -> None:
            self.input_batch = SimpleNamespace(req_id_to_index={"a": 0, "b": 1})

    runner: Any = Runner()
    tree = DraftTree.chain([5, 6])
    runner.tree_step = TreeStep(
        [
            StepRequest(0, 0, 3, 9, tree, accepted_path=[0]),
            StepRequest(3, 3, 4, 9, DraftTree.empty()),
        ]
    )
    logits = torch.zeros(4, 8)
    logits[2] = torch.nan
    assert runner._get_nans_in_logits(logits) == {"a": 0, "b": 0}
    logits[1, :3] = torch.nan
    logits[3, 0] = torch.nan
    assert runner._get_nans_in_logits(logits) == {"a": 3, "b": 1}
