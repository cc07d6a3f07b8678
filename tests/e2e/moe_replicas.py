# SPDX-License-Identifier: Apache-2.0
"""Two replicas of a mixture-of-experts target that run every forward together, and one engine that
has the same requests to itself; test_moe_replicas.py starts them.

Each is a process with its engine in it, as in vLLM's example for offline data parallelism: a
replica without requests runs vLLM's dummy batch for as long as the other one has some.

vLLM 0.32 cannot run such replicas on a CPU: its communicator has no collectives for parts of
different sizes, with which replicas exchange their tokens. They stand here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.e2e.sabotage import sabotage

PROMPTS = [[(7 * i + 11 * n) % 290 + 10 for i in range(n)] for n in (3, 20, 41, 70, 33, 5)]
TOKENS = 40
# Requests of each replica, by place in PROMPTS, and nodes of their trees; run one after another.
# Either is idle beside the other's trees, once after it had trees of its own, and both have some.
ROUNDS: list[tuple[list[list[int]], int]] = [
    ([[0, 1, 2, 3], []], 12),
    ([[], [4, 5, 1]], 12),
    ([[2], []], 12),
    ([[5, 3], [0, 2, 4, 1]], 12),
    ([[1], [3, 0]], 0),
]


def _all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    import torch

    if isinstance(input_, list):
        return [_all_gatherv(self, tensor, dim, sizes) for tensor in input_]
    assert dim == 0
    sizes = sizes or [len(input_)] * self.world_size
    own = input_.new_zeros((max(sizes), *input_.shape[1:]))
    own[: len(input_)] = input_
    parts = [torch.empty_like(own) for _ in sizes]
    torch.distributed.all_gather(parts, own, group=self.device_group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def _reduce_scatterv(self: Any, input_: Any, dim: int = -1, sizes: Any = None) -> Any:
    import torch

    assert dim == 0
    sizes = sizes or [len(input_) // self.world_size] * self.world_size
    total = input_.clone()
    torch.distributed.all_reduce(total, group=self.device_group)
    return total.split(sizes)[self.rank_in_group]


def _engine(folder: str, options: dict[str, Any] | None) -> Any:
    from vllm import LLM

    return LLM(
        model=f"{folder}/target", dtype="float32", enforce_eager=True, max_model_len=256,
        max_num_seqs=8, block_size=32, skip_tokenizer_init=True, kv_cache_memory_bytes=1 << 24,
        # In this process: vLLM would give each replica of several a worker of its own.
        distributed_executor_backend="uni",
        speculative_config=options, disable_log_stats=False,
    )  # fmt: skip


def _generate(llm: Any, places: list[int], nodes: int | None) -> list[list[int]]:
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False,
        extra_args=None if nodes is None else {"specplug_tree_budget": nodes},
    )  # fmt: skip
    if not places:
        # What `generate` does with requests: steps for as long as any replica has some.
        while llm.llm_engine.has_unfinished_requests():
            llm.llm_engine.step()
        return []
    prompts = [{"prompt_token_ids": PROMPTS[place]} for place in places]
    return [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)]


@contextmanager
def _dummy_runs(llm: Any) -> Iterator[list[int]]:
    """Rows of each dummy forward of this replica."""
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    stock, rows = runner._dummy_run, []

    def counted(num_tokens: int, *args: Any, **kwargs: Any) -> Any:
        rows.append(num_tokens)
        return stock(num_tokens, *args, **kwargs)

    runner._dummy_run = counted
    yield rows
    del runner._dummy_run


def _counters(llm: Any) -> dict[str, float]:
    return {
        m.name: m.value for m in llm.get_metrics() if m.name.startswith("vllm:spec_decode_num")
        and hasattr(m, "value")
    }  # fmt: skip


def _alone(folder: str) -> Any:
    return _generate(_engine(folder, None), list(range(len(PROMPTS))), None)


def _replica(folder: str, job: dict[str, Any], rank: int) -> Any:
    os.environ.update(
        VLLM_DP_SIZE="2", VLLM_DP_RANK=str(rank), VLLM_DP_RANK_LOCAL=str(rank),
        VLLM_DP_MASTER_IP="127.0.0.1", VLLM_DP_MASTER_PORT=str(job["port"]),
    )  # fmt: skip
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    CpuCommunicator.all_gatherv = _all_gatherv  # type: ignore[method-assign]
    CpuCommunicator.reduce_scatterv = _reduce_scatterv  # type: ignore[method-assign]
    llm = _engine(folder, job["options"])
    if job["sabotage"]:
        sabotage("compaction")
    answers, dummies = [], []
    for places, nodes in ROUNDS:
        with _dummy_runs(llm) as rows:
            answers.append(_generate(llm, places[rank], nodes if job["options"] else None))
        dummies.append(len(rows))
    return {"answers": answers, "dummies": dummies, "counters": _counters(llm)}


def main(folder: str, part: str, job_text: str) -> None:
    """Runs the engine of a replica, or that which is `alone`, and writes what it gives."""
    job = json.loads(job_text)
    if job["options"] is None:
        # On the runner that trees have.
        from vllm_specplug.vllm_v2.plain_engine import use_v2

        use_v2()
    made = _alone(folder) if part == "alone" else _replica(folder, job, int(part))
    Path(folder, f"{part}.json").write_text(json.dumps(made))
