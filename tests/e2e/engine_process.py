# SPDX-License-Identifier: Apache-2.0
"""Runs one engine in a process of its own; `run_engine` in harness.py starts it.

The job names the engine's arguments and a list of calls; the result holds every output and
the speculative counters. Separate processes keep engines apart: what a tree worker registers in
one cannot reach the plain engine it is compared with.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil


def _adapters(adapters: list[Any] | None) -> list[Any] | None:
    """(name, id, folder) of each prompt's LoRA adapter, None for none."""
    if adapters is None:
        return None
    from vllm.lora.request import LoRARequest

    return [None if adapter is None else LoRARequest(*adapter) for adapter in adapters]


def _sabotage(name: str) -> None:
    """Breaks one promise on purpose, so that a test can show it would notice."""
    if name == "compaction":
        import vllm_specplug.vllm_v1.tree_backend as tree_backend

        tree_backend.compact_kv = lambda *args, **kwargs: None
    elif name == "accept":
        import random

        import numpy as np

        import vllm_specplug.vllm_v1.target_sampler as target_sampler
        from tests.e2e.statistics import BIAS
        from vllm_specplug.accept import walk_trees

        rng = random.Random(0)

        def biased(trees: Any, root_rows: Any, sample: Any, *rest: Any) -> Any:
            # A sample that no child holds is now and then replaced by the first child.
            def lenient(rows: Any, live: Any) -> Any:
                tokens = list(sample(rows, live))
                for i, (tree, row, root) in enumerate(zip(trees, rows, root_rows, strict=True)):
                    node = row - root - 1
                    if tree is None or tree.child_of(node, int(tokens[i])) is not None:
                        continue
                    children = np.flatnonzero(tree.parent_indices == node)
                    if len(children) and rng.random() < BIAS:
                        tokens[i] = int(tree.token_ids[children[0]])
                return tokens

            return walk_trees(trees, root_rows, lenient, *rest)

        target_sampler.walk_trees = biased
    elif name == "paths":
        import vllm_specplug.vllm_v1.target_sampler as target_sampler
        from vllm_specplug.accept import walk_trees

        def per_path(trees: Any, root_rows: Any, sample: Any, *rest: Any) -> Any:
            # TokenSwift's published rule: a node is drawn once for each path that shares it, and
            # any draw that the tree holds wins.
            shares = [Counter[int]() for _ in trees]
            for tree, share in zip(trees, shares, strict=True):
                parents = [] if tree is None else tree.parent_indices.tolist()
                for leaf in set(range(len(parents))) - set(parents):
                    share.update([-1, *tree.path_to(leaf)])

            def draw(rows: Any, live: Any) -> Any:
                nodes = [row - root - 1 for row, root in zip(rows, root_rows, strict=True)]
                most = max(share[node] for share, node in zip(shares, nodes, strict=True))
                tokens = sample(rows, live)
                for again in range(1, most):
                    others = sample(rows, live)
                    for i, (tree, node) in enumerate(zip(trees, nodes, strict=True)):
                        missed = tree is not None and tree.child_of(node, int(tokens[i])) is None
                        if missed and again < shares[i][node]:
                            tokens[i] = others[i]
                return tokens

            return walk_trees(trees, root_rows, draw, *rest)

        target_sampler.walk_trees = per_path
    elif name == "order":
        from vllm_specplug.vllm_attention.cpu import TreeCPUAttentionBackendImpl as Implementation

        # A window wider than any context: what a row attends is summed in the order of slots, and
        # rows without drafts are vLLM's.
        features = Implementation.tree_features
        Implementation.tree_features = lambda self, layer=None: replace(
            features(self, layer), window=1 << 20
        )
    elif name == "clock":
        import vllm_specplug.vllm_worker.calibration as calibration
        import vllm_specplug.vllm_worker.draft_planner as draft_planner
        import vllm_specplug.vllm_worker.step_clock as step_clock

        # On all ranks but the first a second is nine.
        real = time.perf_counter
        odd = SimpleNamespace(
            **{**vars(time), "perf_counter": lambda: real() * 9 if is_later_rank() else real()}
        )
        for module in (calibration, draft_planner, step_clock):
            module.time = odd
    elif name == "jitter":
        import random

        from vllm_specplug.vllm_worker.step_clock import HostClock

        # All ranks but the first read a clock that is up to 4 ms late.
        late, mark = random.Random(0), HostClock.mark
        HostClock.mark = lambda clock: mark(clock) + is_later_rank() * late.uniform(0, 4e-3)
    elif name == "drafts":
        from vllm_specplug.tree import DraftTree
        from vllm_specplug.vllm_worker.draft_planner import DraftPlanner

        draft = DraftPlanner.draft

        def others(self: Any, *args: Any) -> Any:
            # All ranks but the first draft other tokens, and no second tree.
            trees = draft(self, *args)
            if not is_later_rank():
                return trees
            return [
                DraftTree(
                    (t.token_ids + 1) % self._vocab_size, t.parent_indices, t.depths, t.scores
                )
                if i % 2 == 0
                else DraftTree.empty()
                for i, t in enumerate(trees)
            ]

        DraftPlanner.draft = others
    elif name == "states":
        from vllm_specplug.vllm_attention.state_rows import StateStep

        # Of what was accepted, layers with a state are told the root alone.
        commit = StateStep.commit
        StateStep.commit = lambda step, last_rows, *rest: commit(step, step.starts[:-1])
    elif name == "own_trees":
        import vllm_specplug.vllm_v2.speculator as speculator

        speculator.first_rank_trees = lambda trees, budgets: trees
    else:
        raise ValueError(name)


def is_later_rank() -> bool:
    """Whether this process is a tensor parallel rank, and not the first."""
    from vllm.distributed import parallel_state

    group = parallel_state._TP
    return group is not None and group.rank_in_group > 0


def _fork_workers() -> None:
    """Lets the engine and its workers be forks of this process: vLLM's CPU build spawns them, and
    then each imports all of vLLM again."""
    import multiprocessing

    from vllm.utils import system_utils

    fork = multiprocessing.get_context("fork")
    system_utils.multiprocessing = SimpleNamespace(
        **{**vars(multiprocessing), "get_context": lambda method: fork}
    )


def _counters(llm: Any) -> dict[str, float]:
    values: dict[str, float] = {}
    for metric in llm.get_metrics():
        if hasattr(metric, "value"):
            values[metric.name] = values.get(metric.name, 0.0) + metric.value
    return values


def _params(spec: dict[str, Any]) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    spec = dict(spec)
    if "structured_outputs" in spec:
        spec["structured_outputs"] = StructuredOutputsParams(**spec["structured_outputs"])
    return SamplingParams(**spec)


def _output(completion: Any) -> dict[str, Any]:
    logprobs = completion.logprobs
    return {
        "token_ids": list(completion.token_ids),
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "logprobs": None
        if logprobs is None
        else [{str(t): p.logprob for t, p in step.items()} for step in logprobs],
    }


def main(job_path: str, result_path: str) -> None:
    job = json.loads(Path(job_path).read_text())
    if job.get("v2"):
        from tests.e2e.v2_setup import use_v2

        use_v2()
    if job.get("float32_states"):
        from tests.e2e.hybrids import use_float32_states

        use_float32_states()
    for name in job.get("sabotage", ()):
        _sabotage(name)
    from vllm import LLM

    if job["own_processes"]:
        _fork_workers()
    llm = LLM(disable_log_stats=False, **job["engine"])
    results = []
    for call in job["calls"]:
        params = call["params"]
        start = time.perf_counter()
        outputs = llm.generate(
            [{"prompt_token_ids": ids} for ids in call["prompts"]],
            [_params(p) for p in params] if isinstance(params, list) else _params(params),
            lora_request=_adapters(call.get("adapters")),
            use_tqdm=False,
        )
        results.append(
            {
                "outputs": [[_output(c) for c in request.outputs] for request in outputs],
                "seconds": time.perf_counter() - start,
                # Since the engine started.
                "counters": _counters(llm),
            }
        )
    Path(result_path).write_text(json.dumps({"calls": results, "counters": _counters(llm)}))
    if job["own_processes"]:
        # This process may end without running exit handlers. vLLM looks at processes that it is
        # about to kill, and on a busy machine they are gone by then.
        with suppress(psutil.NoSuchProcess):
            llm.llm_engine.engine_core.shutdown()
