# SPDX-License-Identifier: Apache-2.0
"""Promises that an engine process breaks on purpose, so that tests can show they would notice.

Nothing of the plugin is imported before a promise is to be broken.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any


def _compaction() -> None:
    """Accepted paths stay where their trees were."""
    from vllm_specplug.vllm_v2.backend import CpuTreeBackend

    CpuTreeBackend.compact = lambda *args: None  # type: ignore[method-assign]


def _accept() -> None:
    """A sample that no child holds is now and then replaced by the first child."""
    import torch

    import vllm_specplug.vllm_v2.sampler as sampler
    from tests.e2e.statistics import BIAS

    generator = torch.Generator().manual_seed(0)
    stock = sampler.walk_trees

    def biased(trees: Any, samples: Any, token_ids: Any) -> Any:
        parents = trees.parent_rows.long()
        count = len(parents)
        nodes = torch.nonzero(parents >= 0)[:, 0]
        first = torch.full((count,), count)
        first.scatter_reduce_(0, parents[nodes], nodes, "amin")
        chosen = torch.rand(count, generator=generator) < BIAS
        chosen &= (first < count) & ~_is_drafted(trees, samples, token_ids)
        samples = torch.where(chosen, token_ids[first.clamp_max(count - 1)].long(), samples)
        return stock(trees, samples, token_ids)

    sampler.walk_trees = biased


def _is_drafted(trees: Any, samples: Any, token_ids: Any) -> Any:
    """bool [M]: whether a child of the row holds its sample."""
    import torch

    parents = trees.parent_rows.long()
    nodes = torch.nonzero(parents >= 0)[:, 0]
    held = nodes[samples[parents[nodes]] == token_ids[nodes]]
    found = torch.zeros(len(parents), dtype=torch.bool)
    found[parents[held]] = True
    return found


def _order() -> None:
    """A window wider than any context: what a row attends is summed in the order of slots, and
    rows without drafts are vLLM's."""
    from vllm_specplug.vllm_attention.cpu import TreeCPUAttentionBackendImpl as Implementation

    features = Implementation.tree_features
    Implementation.tree_features = lambda self, layer=None: replace(
        features(self, layer), window=1 << 20
    )


def _clock() -> None:
    """On all ranks but the first a second is nine."""
    import vllm_specplug.vllm_worker.cost.calibration as calibration
    import vllm_specplug.vllm_worker.cost.draft_planner as draft_planner
    import vllm_specplug.vllm_worker.cost.step_clock as step_clock

    real = time.perf_counter
    odd = SimpleNamespace(
        **{**vars(time), "perf_counter": lambda: real() * 9 if is_later_rank() else real()}
    )
    for module in (calibration, draft_planner, step_clock):
        module.time = odd


def _jitter() -> None:
    """All ranks but the first read a clock that is up to 4 ms late."""
    from vllm_specplug.vllm_worker.cost.step_clock import StepClock

    late, mark = random.Random(0), StepClock.mark
    StepClock.mark = lambda clock: mark(clock) + is_later_rank() * late.uniform(0, 4e-3)


def _heads() -> None:
    """What ranks attend in the target's caches is gathered in the reverse order of ranks."""
    from vllm_specplug.vllm_worker.memory import rank_caches

    gather = rank_caches.tensor_model_parallel_all_gather

    def reverse(part: Any, dim: int) -> Any:
        parts = gather(part, dim=dim).unflatten(dim, (-1, part.shape[dim]))
        return parts.flip(dim).flatten(dim, dim + 1)

    rank_caches.tensor_model_parallel_all_gather = reverse


def _drafts() -> None:
    """All ranks but the first draft other tokens, and no second tree."""
    from vllm_specplug.tree import DraftTree
    from vllm_specplug.vllm_worker.cost.draft_planner import DraftPlanner

    draft = DraftPlanner.draft

    def others(self: Any, *args: Any) -> Any:
        trees = draft(self, *args)
        if not is_later_rank():
            return trees
        return [
            DraftTree((t.token_ids + 1) % self._vocab_size, t.parent_indices, t.depths, t.scores)
            if i % 2 == 0
            else DraftTree.empty()
            for i, t in enumerate(trees)
        ]

    DraftPlanner.draft = others


def _states() -> None:
    """Of what was accepted, layers with a state are told the root alone."""
    from vllm_specplug.vllm_attention.state_rows import StateStep

    commit = StateStep.commit
    StateStep.commit = lambda step, last_rows, *rest: commit(step, step.starts[:-1])


def _own_trees() -> None:
    """Ranks keep the trees that they drafted."""
    import vllm_specplug.vllm_v2.speculator as speculator

    speculator.first_rank_trees = lambda trees, budgets: trees


def _stage_paths() -> None:
    """Earlier pipeline stages do not compact accepted paths."""
    from vllm_specplug.vllm_v2.stage_relay import StageRelay

    take_over = StageRelay.take_over

    def without_paths(relay: Any, entry: Any) -> None:
        if getattr(entry, "specplug_arrival", None) is not None:
            entry.specplug_arrival = replace(entry.specplug_arrival, trees=None)
        take_over(relay, entry)

    StageRelay.take_over = without_paths  # type: ignore[method-assign]


def _stage_trees() -> None:
    """Earlier pipeline stages do not store the next trees."""
    from vllm_specplug.tree.step_trees import TreeStore

    TreeStore.put_rows = lambda *args: None  # type: ignore[method-assign]


_SABOTAGES: dict[str, Callable[[], None]] = {
    "accept": _accept,
    "clock": _clock,
    "compaction": _compaction,
    "drafts": _drafts,
    "heads": _heads,
    "jitter": _jitter,
    "order": _order,
    "own_trees": _own_trees,
    "stage_paths": _stage_paths,
    "stage_trees": _stage_trees,
    "states": _states,
}


def sabotage(name: str) -> None:
    """Breaks a promise in all engines that this process builds from here on."""
    _SABOTAGES[name]()


def is_later_rank() -> bool:
    """Whether this process is a tensor parallel rank, and not the first."""
    from vllm.distributed import parallel_state

    group = parallel_state._TP
    return group is not None and group.rank_in_group > 0
