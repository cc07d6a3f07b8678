# SPDX-License-Identifier: Apache-2.0
"""Pairs of small engines, plain and with trees, in one process.

Both engines run on vLLM's V2 model runner, so that they differ in speculation alone.

A pair costs seconds, so a test module builds few of them and asks many things of each, in a
process of its own; see own_process.py.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 1024,
    "block_size": 32,
    # Every request at its full length and as much again. A gibibyte for each engine, as the
    # environment allows, would fill the machine with zeros: these processes hold many engines.
    "num_gpu_blocks_override": 128,
    "enable_prefix_caching": False,
    "seed": 0,
}
# Budgets that do not follow the clock: every run drafts alike.
_FIXED = {"num_speculative_tokens": 16, "tree_budget": 16, "max_step_rows": 512}
# What each tree engine drafts with; "oracle" stands for tests/e2e/oracle.py.
METHODS: dict[str, dict[str, Any]] = {
    "oracle": {"method": "ngram_tree", **_FIXED},
    "jetspec": {"method": "jetspec", **_FIXED},
    "ddtree": {"method": "ddtree", **_FIXED},
    "dels": {"method": "dels", **_FIXED},
    # Found by its head, as users may write it.
    "dspark_tree": {"method": "tree", **_FIXED},
    "dflash2_tree": {"method": "tree", **_FIXED},
    "longspec": {"method": "longspec", **_FIXED, "tree_depth": 4},
    # A partial cache smaller than most contexts here, selected again after 18 tokens.
    "tokenswift": {"method": "tokenswift", **_FIXED, "draft_source": "self", "kv_budget": 20},
    "eagle3_tree": {"method": "eagle3_tree", **_FIXED},
    "mtp_tree": {"method": "mtp_tree", **_FIXED},
    "assistant_tree": {"method": "assistant_tree", **_FIXED},
    "ngram_tree": {"method": "ngram_tree", **_FIXED},
}  # fmt: skip


@dataclass
class Counts:
    """What a tree engine verified since it was last asked."""

    drafts: int = 0
    """Trees."""
    nodes: int = 0
    accepted: int = 0
    deep: int = 0
    """Trees of which two nodes or more were accepted, one below the other."""
    branching: int = 0
    """Trees that were not a line."""
    skipping: int = 0
    """Accepted paths that skip nodes, so that their caches must move."""
    stale: int = 0
    """Steps that were prepared before the host knew the one before them."""


@dataclass
class Pair:
    """Two engines on one target that differ in speculation alone."""

    plain: Any
    tree: Any
    counts: Counts = field(default_factory=Counts)

    @property
    def runner(self) -> Any:
        return core_of(self.tree).model_executor.driver_worker.worker.model_runner

    @property
    def is_ahead(self) -> bool:
        """Whether the tree engine schedules a step before the one before it has ended."""
        return type(core_of(self.tree).scheduler).__name__ == "AsyncScheduler"

    def take_counts(self) -> Counts:
        counts, self.counts = self.counts, Counts()
        return counts

    def watch(self) -> None:
        """Counts what the tree engine verifies."""
        speculator = self.runner.speculator
        record = speculator.learn

        def recorded(input_batch: Any, walk: Any, seq_lens: Any, trees: Any, *args: Any) -> None:
            trees = dict(trees)
            record(input_batch, walk, seq_lens, trees, *args)
            if walk is None:
                return
            counts, starts = self.counts, input_batch.cu_num_logits_np.tolist()
            for i, req_id in enumerate(input_batch.req_ids):
                tree = trees.get(req_id)
                nodes = 0 if tree is None else min(tree.num_nodes, starts[i + 1] - starts[i] - 1)
                length = int(walk.lengths[i])
                path = walk.path_rows[i, : length + 1] - starts[i]
                counts.drafts += nodes > 0
                counts.nodes += nodes
                counts.accepted += length
                counts.deep += length > 1
                if nodes:
                    parents = tree.parent_indices[:nodes] + 1
                    counts.branching += parents.tolist() != list(range(nodes))
                counts.skipping += path.tolist() != list(range(length + 1))
            bound = input_batch.seq_lens_cpu_upper_bound[: len(input_batch.req_ids)]
            counts.stale += bool((bound.numpy() > np.asarray(seq_lens[: len(bound)])).any())

        speculator.learn = recorded

    def compare(
        self,
        prompts: list[list[int]],
        params: Any,
        *,
        least_accepted: int = 1,
        branching: bool = True,
        adapters: list[Any] | None = None,
    ) -> tuple[list[Any], Counts]:
        """Runs both engines and raises unless every output is the same.

        Args:
            params: one for all, or one per prompt.
            least_accepted: fewer accepted drafts than this make the comparison empty.
            branching: whether at least one verified tree must branch.
            adapters: LoRA request of each prompt, None for the bare target.

        Returns:
            The plain engine's outputs and what the tree engine verified.
        """
        from tests.e2e.oracle import OracleDrafter

        expected = generate(self.plain, prompts, params, adapters)
        OracleDrafter.sequences = sequences_of(expected)
        self.take_counts()
        actual = generate(self.tree, prompts, params, adapters)
        counts = self.take_counts()
        for i, (a, b) in enumerate(zip(expected, actual, strict=True)):
            assert_same_output(a, b, f"request {i}")
        assert counts.nodes > 0 and counts.accepted >= least_accepted, counts
        assert counts.branching > 0 or not branching, counts
        return expected, counts

    def compare_up_to_ties(
        self, prompts: list[list[int]], max_tokens: int, margin: float
    ) -> Counts:
        """Runs the tree engine greedily and raises unless each of its tokens is, after the tokens
        before it, within `margin` of the plain engine's best one; a logprob."""
        from vllm import SamplingParams

        common = {"temperature": 0.0, "detokenize": False, "ignore_eos": True}
        self.take_counts()
        made = generate(self.tree, prompts, SamplingParams(max_tokens=max_tokens, **common))
        counts = self.take_counts()
        scored = generate(
            self.plain,
            sequences_of(made),
            SamplingParams(max_tokens=1, prompt_logprobs=1, **common),
        )
        for i, (prompt, output) in enumerate(zip(prompts, scored, strict=True)):
            pairs = zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
            for at, (token, logprobs) in enumerate(list(pairs)[len(prompt) :]):
                behind = max(x.logprob for x in logprobs.values()) - logprobs[token].logprob
                assert behind <= margin, f"request {i}, token {at}: {behind:.4f} behind the best"
        assert counts.accepted > 0 and counts.branching > 0, counts
        return counts


def core_of(llm: Any) -> Any:
    """The engine core of an in-process engine."""
    return llm.llm_engine.engine_core.engine_core


def watch_prefix_hits(llm: Any) -> dict[str, int]:
    """Prompt tokens found in the prefix cache by request id; grows as requests are scheduled."""
    manager = core_of(llm).scheduler.kv_cache_manager
    hits: dict[str, int] = {}
    original = manager.get_computed_blocks

    def noted(request: Any, *args: Any) -> Any:
        found = original(request, *args)
        hits[request.request_id] = found[1]
        return found

    manager.get_computed_blocks = noted
    return hits


def watch_preemptions(llm: Any) -> list[str]:
    """Ids of the requests preempted from here on; grows."""
    scheduler = core_of(llm).scheduler
    preempted: list[str] = []
    original = scheduler._preempt_request

    def noted(request: Any, *args: Any, **kwargs: Any) -> Any:
        preempted.append(request.request_id)
        return original(request, *args, **kwargs)

    scheduler._preempt_request = noted
    return preempted


def changed(owner: Any, name: str, change: Callable[..., Any]) -> Any:
    """Patches a function of a module, class or object with `change(stock, ...)`."""
    stock = getattr(owner, name)
    return patch.object(owner, name, lambda *args, **more: change(stock, *args, **more))


# Tokens, parents and scores of a tree.
Drafted = tuple[list[int], list[int], list[float]]


@contextmanager
def watch_drafts(llm: Any) -> Iterator[dict[tuple[int, ...], Drafted]]:
    """What is drafted inside, by the tokens before it."""
    seen: dict[tuple[int, ...], Drafted] = {}

    def propose(stock: Any, requests: Any) -> Any:
        trees = stock(requests)
        for tokens, tree in zip(requests.token_ids, trees, strict=True):
            parts = tree.token_ids, tree.parent_indices, tree.scores
            seen[tuple(tokens.tolist())] = tuple(part.tolist() for part in parts)
        return trees

    drafter = core_of(llm).model_executor.driver_worker.worker.model_runner.drafter.drafter
    with changed(drafter, "propose", propose):
        yield seen


def generate(
    llm: Any, prompts: list[list[int]], params: Any, adapters: list[Any] | None = None
) -> list[Any]:
    inputs = [{"prompt_token_ids": p} for p in prompts]
    return llm.generate(inputs, params, lora_request=adapters, use_tqdm=False)


def sequences_of(outputs: list[Any]) -> list[list[int]]:
    """Prompt and completion of every completion."""
    return [[*o.prompt_token_ids, *c.token_ids] for o in outputs for c in o.outputs]


def assert_same_output(a: Any, b: Any, what: str) -> None:
    """Raises unless two request outputs agree; logprobs within 1e-3."""
    assert len(a.outputs) == len(b.outputs), what
    for x, y in zip(a.outputs, b.outputs, strict=True):
        assert list(x.token_ids) == list(y.token_ids), (
            f"{what} differs: {list(x.token_ids)} != {list(y.token_ids)}"
        )
        for name in ("text", "finish_reason", "stop_reason"):
            assert getattr(x, name) == getattr(y, name), (what, name, x, y)
        assert_same_logprobs(x.logprobs, y.logprobs, what)
    assert_same_logprobs(a.prompt_logprobs, b.prompt_logprobs, f"{what}, prompt")


def assert_same_logprobs(a: Any, b: Any, what: str) -> None:
    assert (a is None) == (b is None), what
    for i, (x, y) in enumerate(zip(a or (), b or (), strict=True)):
        assert (x is None) == (y is None), (what, i)
        for token in set(x or ()) & set(y or ()):
            close = abs(x[token].logprob - y[token].logprob) < 1e-3
            assert close or x[token].logprob == y[token].logprob, (what, i, token)
        # Where two candidates tie, either may be the last of the list.
        assert len(set(x or ()) ^ set(y or ())) <= 2, (what, i)


@cache
def target() -> Path:
    """The text target of this process, made at first use."""
    from tests.e2e.tiny import make_text_target

    return make_text_target(Path(tempfile.mkdtemp(prefix="specplug-pair-")) / "target")


@cache
def own_target(method: str) -> dict[str, Any]:
    """Engine arguments of a method that needs a target of its own."""
    name = method.partition("-")[0]
    if name == "mtp_tree":
        from tests.e2e.mimo import make_mimo_target

        folder = make_mimo_target(target().parent / method, _vocab_size())
        arguments = {"trust_remote_code": True}
    elif name == "assistant_tree":
        folder, arguments = _followed()[0], {}
    else:
        return {}
    for path in target().glob("*token*"):
        shutil.copy(path, folder)
    return {"model": str(folder), **arguments}


@cache
def _followed() -> tuple[Path, Path]:
    """Folders of a target and of an assistant whose drafts it accepts."""
    from tests.e2e.assistants import make_followed_target

    return make_followed_target(target().parent / "followed", _vocab_size())


def _vocab_size() -> int:
    size: int = json.loads((target() / "config.json").read_text())["vocab_size"]
    return size


@cache
def head_options(method: str) -> dict[str, Any]:
    """Folders of a method's random draft heads, made at first use."""
    from tests.e2e import tiny

    vocab, folder = _vocab_size(), target().parent / method
    if method == "assistant_tree":
        return {"model": str(_followed()[1])}
    if method == "dels":
        local = tiny.make_local_head(folder / "local", vocab)
        return {**head_options("ddtree"), "local_head": str(local)}
    makers: dict[str, Callable[..., Path]] = {
        "jetspec": tiny.make_head,
        "ddtree": partial(tiny.make_head, causal=False),
        "dspark_tree": tiny.make_dspark_head,
        "dflash2_tree": tiny.make_dflash2_head,
        "longspec": partial(tiny.make_longspec_head, window=24),
        "eagle3_tree": partial(tiny.make_eagle3_head, draft_vocab_size=vocab - 40),
        "tokenswift": tiny.make_tokenswift_heads,
    }
    return {"model": str(makers[method](folder, vocab))} if method in makers else {}


@contextmanager
def vllms_v1() -> Iterator[None]:
    """Plain engines that are built inside run on vLLM's V1 model runner."""
    from vllm import envs

    # Not in os.environ, which vLLM has read once an engine was built.
    with patch.object(envs, "VLLM_USE_V2_MODEL_RUNNER", False):
        yield


def _share_expert_group() -> None:
    """vLLM makes a process's groups with its first engine, and one of experts only where that
    engine's target has some. All groups here are of one rank."""
    from vllm.distributed import parallel_state

    if parallel_state._EP is None:
        parallel_state._EP = parallel_state._DP


def make_engine(method: str | None, **engine: Any) -> Any:
    """One in-process engine; plain when `method` is None.

    "METHOD-KIND" has heads of that kind of `tests.e2e.hard_heads`.
    """
    from vllm import LLM

    from tests.e2e.hard_heads import hard_heads
    from tests.e2e.oracle import oracle_drafts

    _share_expert_group()
    arguments = {**ENGINE, "model": str(target()), **engine}
    if method is None:
        return LLM(**arguments)
    method, _, kind = method.partition("-")
    options = {**METHODS[method], **head_options(method), **arguments.pop("speculative", {})}
    if method == "oracle":
        with oracle_drafts():
            return LLM(**arguments, speculative_config=options)
    with hard_heads(kind):
        return LLM(**arguments, speculative_config=options)


_pairs: dict[str, Pair] = {}
_plain: dict[str, Any] = {}


def pair(method: str = "oracle", **engine: Any) -> Pair:
    """The pair of these engine arguments, built once a process.

    `speculative` adds speculative options, `tree` engine arguments of only the tree engine.
    """
    speculative, tree = engine.pop("speculative", {}), engine.pop("tree", {})
    engine = {**own_target(method), **engine}
    key = json.dumps(engine, sort_keys=True)
    # Of CUDA workers; an engine with graphs is another.
    graphs = os.environ.get("SPECPLUG_FULL_CUDA_GRAPHS")
    full_key = json.dumps([method, speculative, tree, key, graphs], sort_keys=True)
    if full_key not in _pairs:
        if key not in _plain:
            _plain[key] = make_engine(None, **engine)
        drafting = make_engine(method, **{**engine, **tree}, speculative=speculative)
        made = Pair(_plain[key], drafting)
        made.watch()
        _pairs[full_key] = made
    return _pairs[full_key]


def scheduled(ahead: bool, method: str = "oracle", **engine: Any) -> Pair:
    """A pair whose tree engine schedules steps ahead, or waits for each of them."""
    made = pair(method, **{**engine, "tree": {**engine.get("tree", {}), "async_scheduling": ahead}})
    assert made.is_ahead == ahead
    return made


def both_schedulers(method: str = "oracle", **engine: Any) -> Iterator[Pair]:
    """A pair whose tree engine waits for every step, then one that schedules steps ahead."""
    for ahead in (False, True):
        yield scheduled(ahead, method, **engine)
