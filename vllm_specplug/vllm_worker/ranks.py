# SPDX-License-Identifier: Apache-2.0
"""Values that tensor parallel ranks share: trees and clock of rank 0, kernel times of the slowest.

With pipeline parallelism only the ranks of the last stage draft. Earlier stages decide nothing
about trees (`vllm_v2.stage_relay`).

A rank's clock, its measured costs and the arrival of its copies differ from other ranks'. It may
use them only for decisions that other ranks need not make alike. Any value that decides about a
collective, the rows of a step or a scheduler goes through a function of this module, which every
rank calls at the same point of a step:

    value                         from          when
    kernels by time               slowest rank  at start
    step costs, dummy forwards    first drafter at start
    trees, on host and device     first rank    in every draft
    nodes to keep                 first rank    in every draft, where the scheduler waits for trees
    draft forwards, candidates    first rank    in every draft that reads the target's caches
    rows to reserve               first rank    in every draft, where each rank has a scheduler

The executors `mp` and `ray` have one scheduler, which reads only the output of the first rank (of
the last stage). Under `external_launcher` (torchrun) each rank has one: see `each_rank_schedules`.

Tensor parallel ranks sum the same hidden states in different orders, so their values differ in the
last bits. Two nearly tied candidates can then give two different trees, and every all-reduce would
mix rows of different tokens. Samples need no exchange: logits are gathered, not summed, and are
therefore bit-identical on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from vllm.distributed import get_pp_group, get_tp_group, get_world_group
from vllm.logger import init_logger

from vllm_specplug.drafting.device_levels import unpacked_trees
from vllm_specplug.drafting.reserved_rows import ReservedRows
from vllm_specplug.tree import DraftTree

logger = init_logger("vllm.specplug.ranks")

# Time that a failed worker waits for the others, which may still compile.
PATIENCE = timedelta(minutes=3)


def first_rank_values(values: list[float]) -> list[float]:
    """Returns the values of the first tensor parallel rank, on every rank."""
    return _first_values(values, get_tp_group())


def drafting_workers() -> Any:
    """Returns the group of all workers that draft. Call it on the last pipeline stage."""
    # Replicas that run their forwards together are refused with pipeline parallelism.
    return get_world_group() if get_pp_group().world_size == 1 else get_tp_group()


def first_worker_values(values: list[float]) -> list[float]:
    """Returns the values of the first worker that drafts, on every such worker.

    Replicas of a mixture-of-experts target run their forwards together, so all must run the same
    number.
    """
    return _first_values(values, drafting_workers())


def slowest_rank_values(values: list[float]) -> list[float]:
    """Returns the maximum of each value over all tensor parallel ranks, on every rank.

    In every layer the ranks wait for the slowest one. A process outside of vLLM's groups gets its
    own values back.
    """
    if not torch.distributed.is_initialized():
        return list(values)
    group = get_tp_group()
    tensor = torch.tensor(values, dtype=torch.float64)
    if group.world_size > 1:
        torch.distributed.all_reduce(
            tensor, op=torch.distributed.ReduceOp.MAX, group=group.cpu_group
        )
    return tensor.tolist()


def _first_values(values: list[float], group: Any) -> list[float]:
    return _from_first(torch.tensor(values, dtype=torch.float64), group).tolist()


def each_rank_schedules(parallel_config: Any) -> bool:
    """Returns whether every tensor parallel rank has its own scheduler, which sees no other rank's
    output."""
    return bool(
        parallel_config.tensor_parallel_size > 1
        and parallel_config.distributed_executor_backend == "external_launcher"
    )


def first_rank_reservation(
    reserved: ReservedRows | None, req_ids: Sequence[str]
) -> ReservedRows | None:
    """Returns the first tensor parallel rank's reservation, on every rank; the host waits for it.

    Args:
        reserved: this rank's own reservation; None while it has none.
        req_ids: the running requests, in the same order on all ranks.
    """
    values = [-1.0] * (len(req_ids) + 1)
    if reserved is not None:
        values = [float(reserved.others), *(float(reserved.nodes(name)) for name in req_ids)]
    others, *nodes = (int(value) for value in first_rank_values(values))
    if others < 0:
        return None
    return ReservedRows(dict(zip(req_ids, nodes, strict=True)), others)


def any_failed(failure: Exception | None) -> bool:
    """Returns whether any worker that drafts failed. All these workers get the same answer.

    Raises:
        SystemExit: from `failure`, when the other workers do not arrive. They wait in a collective
            that this worker has left, and only the end of its process ends them. vLLM's workers
            reply to any other exception and go on, and the engine does not read the reply while the
            first worker waits.
    """
    group = drafting_workers()
    if group.world_size == 1:
        return failure is not None
    flags = torch.tensor([int(failure is not None)])
    work = torch.distributed.all_reduce(
        flags, op=torch.distributed.ReduceOp.MAX, group=group.cpu_group, async_op=True
    )
    if failure is None:
        work.wait()
        return bool(flags.item())
    try:
        work.wait(PATIENCE)
    except RuntimeError:
        what = f"{type(failure).__name__} in what all workers do together: {failure}"
        logger.exception("This worker ends, as the others wait for it. %s", what)
        raise SystemExit(what) from failure
    return True


def first_rank_trees(trees: Sequence[DraftTree], budgets: Sequence[int]) -> list[DraftTree]:
    """Returns the trees of the first tensor parallel rank, on every rank, after one message.

    Args:
        trees: this rank's trees, one per request.
        budgets: maximum nodes of each tree, equal on all ranks; a larger tree is cut.
    """
    group = get_tp_group()
    if group.world_size == 1 or not budgets:
        return list(trees)
    # Every rank knows the size, which depends only on the budgets.
    packed = packed_on_host(trees, budgets)
    return unpacked_trees(_from_first(torch.from_numpy(packed), group).numpy())


def packed_on_host(trees: Sequence[DraftTree], budgets: Sequence[int]) -> np.ndarray:
    """Returns the trees, cut to their budgets, as `packed_trees` of the largest budget does."""
    trees = [tree.prefix(budget) for tree, budget in zip(trees, budgets, strict=True)]
    most = max(budgets)
    packed = np.zeros((len(trees), 1 + 4 * most), np.int32)
    packed[:, 0] = [tree.num_nodes for tree in trees]
    is_node = np.arange(most) < packed[:, :1]
    # [4, R, N], a view
    fields = packed[:, 1:].reshape(len(trees), 4, most).swapaxes(0, 1)
    fields[0][is_node] = np.concatenate([tree.token_ids for tree in trees])
    fields[1][is_node] = np.concatenate([tree.parent_indices for tree in trees])
    fields[2][is_node] = np.concatenate([tree.depths for tree in trees])
    fields[3][is_node] = np.concatenate([tree.scores for tree in trees]).view(np.int32)
    return packed


def first_rank_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Overwrites a device tensor in place with the first tensor parallel rank's, and returns it. No
    host waits."""
    group = get_tp_group()
    if group.world_size > 1:
        torch.distributed.broadcast(tensor, src=group.ranks[0], group=group.device_group)
    return tensor


def _from_first(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    """Overwrites `tensor` in place with that of the group's first rank, and returns it."""
    if group.world_size > 1:
        torch.distributed.broadcast(tensor, src=group.ranks[0], group=group.cpu_group)
    return tensor
