# SPDX-License-Identifier: Apache-2.0
"""No step launches a variant of a Triton kernel that start-up did not: it would compile while
serving, which vLLM reports or, with --jit-monitor-mode=error, raises."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.e2e.tiny import HIDDEN, make_eagle3_head, make_head
from tests.kernels.step_trees import Drafted, request_states
from tests.kernels.tree_problem import random_parents
from tests.unit.drafters import load_drafter
from tests.unit.tree.candidates import tree_of
from tests.unit.vllm_v2.steps import input_batch, stored
from vllm_specplug.drafting.device_requests import DeviceRequests, DeviceTrees, TokenHistory
from vllm_specplug.drafting.ngram import NgramBranches
from vllm_specplug.methods.block.drafter import BlockHeadDrafter
from vllm_specplug.methods.eagle3_tree.drafter import Eagle3Drafter
from vllm_specplug.tree import DraftTree

pytest.importorskip("triton")
pytest.importorskip("vllm")

from tests.kernels.triton_launches import Launches
from vllm_specplug.kernels import AttnFeatures, tree_attn_flash
from vllm_specplug.kernels.cuda_dispatch import ChosenKernel, load_kernel
from vllm_specplug.kernels.features import PLAIN
from vllm_specplug.kernels.finite_values_triton import (
    isolate_nonfinite_triton,
    isolate_token_scales_triton,
    store_isolated_triton,
)
from vllm_specplug.tree import step_trees
from vllm_specplug.tree.step_trees import (
    TreeStore,
    Walk,
    attach_trees,
    committed_rows,
    set_positions,
    walk_trees,
)
from vllm_specplug.vllm_attention.latent_gpu import TreeMLAImplMixin
from vllm_specplug.vllm_attention.tree_rows import attach_tree_rows
from vllm_specplug.vllm_v2 import draft_inputs, host_step
from vllm_specplug.vllm_v2.cuda_trees import CudaTreeBackend
from vllm_specplug.vllm_v2.device_ngrams import DeviceNgrams
from vllm_specplug.vllm_v2.graph_trees import GraphTrees
from vllm_specplug.vllm_v2.latent_device import LatentDeviceBackend
from vllm_specplug.vllm_v2.step_input import step_rows
from vllm_specplug.vllm_v2.stop_tokens import StopTokens
from vllm_specplug.vllm_worker import warmup
from vllm_specplug.vllm_worker.cuda_kernels import StepLimits
from vllm_specplug.vllm_worker.device_self_draft import DevicePartialCache
from vllm_specplug.vllm_worker.memory.cache_groups import CacheGroup
from vllm_specplug.vllm_worker.runner_view import RunnerView

pytestmark = pytest.mark.usefixtures("interpreter")

CPU, ONE = torch.device("cpu"), torch.ones(())
PAGE, VOCAB, REQUESTS, CONTEXT, LAYERS = 16, 20, 6, 3000, 2
# Views into pages [4, PAGE, 2 heads of 64].
TOKEN_SCALES = {
    name: torch.empty_strided((4, PAGE, 2), (2 * 34 * PAGE, 34, 34 * PAGE))
    for name in ("key_scales", "value_scales")
}
ATTENTION = {"_tree_attn_kernel", "_merge_parts_kernel", "_tree_words_kernel"}
PARTIAL_CACHE_KERNELS = {
    "_score_keys_kernel", "_gather_chosen_kernel", "_append_to_tail_kernel", "_count_tokens_kernel"
}  # fmt: skip
TREE_KERNELS = {
    "_put_kernel", "_attach_kernel", "_positions_kernel", "_plan_kernel", "_walk_kernel",
    "_commit_kernel",
}  # fmt: skip
TABLE_KERNELS = {"_step_table_kernel", "_trees_table_kernel", "_draft_inputs_kernel"}
LOOKUP_KERNELS = {"_scan_kernel", "_branches_kernel", "_merge_kernel"}
STEP_KERNELS = {
    *ATTENTION, "_store_isolated_kernel", "_compact_paths_kernel", "_build_best_first_kernel"
}  # fmt: skip


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    monkeypatch.setattr(warmup, "any_failed", bool)
    return Launches(monkeypatch)


def _no_context(*, q: torch.Tensor, **rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """In place of FlashAttention: tensors as it returns them."""
    lse = torch.zeros(q.shape[1], q.shape[0])
    return torch.empty_like(q, memory_format=torch.contiguous_format), lse


class Served:
    """The CUDA backend and a drafter over caches laid out as vLLM's on a GPU."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, folder: Path, nodes: int, heads: int, kv_heads: int,
        head_dim: int, name: str = "triton", features: AttnFeatures = PLAIN,
    ) -> None:  # fmt: skip
        monkeypatch.setattr(CudaTreeBackend, "cache_writer", lambda self: lambda *args: None)
        kernel = ChosenKernel(name, load_kernel(name), "")
        monkeypatch.setattr(
            tree_attn_flash, "context_attention", lambda head_dim, capped: _no_context
        )
        monkeypatch.setattr(CudaTreeBackend, "choose", lambda *args, **kwargs: kernel)
        self.rng = np.random.default_rng(0)
        self.nodes, self.heads, self.kv_heads, self.head_dim = nodes, heads, kv_heads, head_dim
        limits = StepLimits(REQUESTS, REQUESTS * (nodes + 1), nodes + 1, CONTEXT)
        self.backend = CudaTreeBackend("auto", heads, limits, CPU)
        self.caches = [
            torch.zeros(4, kv_heads, PAGE, 2 * head_dim, dtype=torch.bfloat16)
            for _ in range(LAYERS)
        ]
        cache_dtype = "fp8" if features.key_scales is not None else "auto"
        if features.token_scales:
            cache_dtype = "int8_per_token_head"
            self.caches[1] = torch.zeros(4, kv_heads, PAGE, 2 * head_dim + 8, dtype=torch.int8)
        elif features.key_scales is not None:
            self.caches[1] = self.caches[1].to(torch.uint8)
        # A group for the plain layer, one for that with features.
        self.features = [PLAIN, features]
        groups = [
            CacheGroup(i, {str(i): c}, torch.bfloat16, kind, features={str(i): f})
            for i, (c, f, kind) in enumerate(
                zip(self.caches, self.features, ("auto", cache_dtype), strict=True)
            )
        ]
        self.backend.bind(groups)
        self.table = torch.zeros(REQUESTS, -(-CONTEXT // PAGE), dtype=torch.int32)
        cls, head, settings = self.head(folder)
        self.drafter = load_drafter(
            cls, head, settings, torch.zeros(VOCAB, HIDDEN), num_nodes=nodes, max_depth=8,
            max_model_len=CONTEXT,
        )  # fmt: skip
        specs = self.drafter.cache_specs()
        draft_layers = [
            SimpleNamespace(
                kv_cache=torch.zeros(4, spec.num_kv_heads, PAGE, 2 * spec.head_dim), spec=spec
            )
            for spec in specs
        ]
        self.drafter.bind_cache(self.backend.draft_cache(draft_layers, lambda: self.table, 1.0))
        self.runner = SimpleNamespace(
            drafter=SimpleNamespace(drafter=self.drafter, options=self.drafter.options),
            max_model_len=CONTEXT, device=CPU, speculator=None, tree_backend=self.backend,
        )  # fmt: skip

    def head(self, folder: Path) -> tuple[Any, Path, Any]:
        """The drafter's class, its head and its settings."""
        return BlockHeadDrafter, make_head(folder, VOCAB), None

    def warm_up(self) -> None:
        self.backend.run_every_variant(lambda: None)
        warmup.warm_up_draft(RunnerView(self.runner))

    def step(self, sizes: list[int], contexts: list[int], beside_chunk: bool) -> None:
        """Verifies trees of `sizes` nodes, beside a prompt chunk or not, moves accepted paths,
        drafts."""
        count = len(sizes)
        trees = [tree_of(range(n), random_parents(n, self.rng)) for n in sizes]
        rows_before = [0] * count
        if beside_chunk:
            trees.append(DraftTree.empty())
            rows_before.append(2)
        slots, starts = list(range(len(trees))), [*contexts, 9][: len(trees)]
        store = TreeStore(REQUESTS, self.nodes, self.nodes, CPU)
        stored(store, trees, slots, starts)
        batch = input_batch(slots, starts, [tree.num_nodes for tree in trees], rows_before)
        attached, row = attach_trees(store, step_rows(batch, self.nodes)), batch.num_tokens
        tables = [self.table[: len(trees)]] * LAYERS
        rows = self.backend.tree_rows(attached, tables)
        self.backend.block_tables = [self.table] * LAYERS
        # Queries are a part of the joint projection, as in vLLM's models.
        width = (self.heads + 2 * self.kv_heads) * self.head_dim
        joint = torch.zeros(row, width, dtype=torch.bfloat16)
        query = joint[:, : self.heads * self.head_dim].view(row, self.heads, self.head_dim)
        key, value = joint[:, query[0].numel() :].view(row, 2, -1, self.head_dim).unbind(1)
        slots = torch.zeros(3 * row, dtype=torch.int64)[row % 5 : row % 5 + row]
        for cache, of in zip(self.caches, self.features, strict=True):
            keys, values = self.backend.views(cache)
            if of.token_scales:
                isolate_token_scales_triton(
                    values, of.key_scales, of.value_scales, slots, floats=not of.int8_cache
                )
            elif values.dtype != value.dtype:
                isolate_nonfinite_triton(key, value)
            else:
                store_isolated_triton(key, value, keys, values, slots)
        for cache, features in zip(self.caches, self.features, strict=True):
            output = torch.empty_like(query, memory_format=torch.contiguous_format)
            asked = query
            if features.query_scales is not None:
                # vLLM quantises a query into rows of its own.
                asked = query.contiguous().to(torch.float8_e4m3fn)
            rows.attend(asked, cache, output, 0.1, features, tables[0])
        # Of each tree the last node is accepted.
        lengths = torch.tensor([min(1, tree.num_nodes) for tree in trees], dtype=torch.int32)
        nodes = torch.full((len(trees), self.nodes), -1, dtype=torch.int32)
        nodes[:, 0] = torch.tensor([tree.num_nodes - 1 for tree in trees])
        self.backend.compact(attached, Walk(nodes, nodes, lengths, nodes), nodes)
        lens, budgets = (torch.tensor(column, dtype=torch.int32) for column in (contexts, sizes))
        self.drafter.propose_on_device(
            DeviceRequests(
                anchors=torch.zeros(count, dtype=torch.int64), context_lens=lens, budgets=budgets,
                depths=1 + torch.arange(count, dtype=torch.int32) % 4, width=4,
                num_nodes=self.nodes, max_context=max(contexts),
            )
        )  # fmt: skip


class ServedLevels(Served):
    """The same with a draft layer, which is run level by level."""

    def head(self, folder: Path) -> tuple[Any, Path, Any]:
        return Eagle3Drafter, make_eagle3_head(folder, VOCAB), None


@pytest.mark.parametrize(
    ("nodes", "heads", "kv_heads", "head_dim", "name", "features"),
    # The third: strides of a row that are no multiple of 16.
    [
        (7, 8, 2, 64, "triton", PLAIN),
        (256, 16, 1, 64, "triton", PLAIN),
        (40, 3, 1, 40, "triton", PLAIN),
        (40, 8, 2, 64, "triton", AttnFeatures(window=2000, sinks=torch.zeros(8))),
        (40, 8, 2, 64, "triton", AttnFeatures(key_scales=ONE, value_scales=ONE)),
        (40, 8, 2, 64, "triton", AttnFeatures(key_scales=ONE, value_scales=ONE, query_scales=ONE)),
        (40, 8, 2, 64, "triton", AttnFeatures(**TOKEN_SCALES, int8_cache=True)),
        (70, 32, 8, 128, "flash", PLAIN),
        (40, 3, 1, 40, "flash", PLAIN),
        (40, 8, 2, 64, "flash", AttnFeatures(soft_cap=50.0)),
    ],
)
def test_steps_launch_what_was_warmed_up(
    launches: Launches, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    nodes: int, heads: int, kv_heads: int, head_dim: int, name: str, features: AttnFeatures,
) -> None:  # fmt: skip
    shape = (nodes, heads, kv_heads, head_dim)
    served = Served(monkeypatch, tmp_path / "head", *shape, name, features)
    kernels = {*STEP_KERNELS}
    # The other layers have plain caches.
    if features.token_scales:
        kernels.add("_isolate_token_scales_kernel")
    elif features.key_scales is not None:
        kernels.add("_isolate_nonfinite_kernel")
    _take_steps(served, launches, kernels)


@pytest.mark.parametrize("nodes", [7, 40])
def test_levels_launch_what_was_warmed_up(
    launches: Launches, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, nodes: int
) -> None:
    served = ServedLevels(monkeypatch, tmp_path / "head", nodes, 8, 2, 64)
    _take_steps(served, launches, STEP_KERNELS)


def _take_steps(served: Served, launches: Launches, kernels: set[str]) -> None:
    """Steps of any sizes after a warm-up, which must have launched each of `kernels`."""
    nodes = served.nodes
    launches.taken()
    served.warm_up()
    warmed = launches.taken()
    assert {name for name, *_ in warmed} == kernels
    rng = np.random.default_rng(1)
    for _ in range(40):
        count = int(rng.integers(1, REQUESTS))
        sizes = rng.integers(1, 1 + rng.choice([3, nodes]), count).tolist()
        longest = int(rng.choice([1, 300, 600, CONTEXT - nodes - 1]))
        served.step(sizes, rng.integers(0, longest, count).tolist(), bool(rng.integers(2)))
        launched = launches.taken()
        assert launched and not launched - warmed, _difference(launched - warmed, warmed)


@pytest.mark.parametrize(("nodes", "heads"), [(7, 16), (40, 2), (256, 128)])
def test_latent_rows_launch_what_was_warmed_up(
    launches: Launches, monkeypatch: pytest.MonkeyPatch, nodes: int, heads: int
) -> None:
    monkeypatch.setattr(step_trees, "has_kernels", lambda device: True)
    limits = StepLimits(REQUESTS, REQUESTS * (nodes + 1), nodes + 1, CONTEXT)
    backend = LatentDeviceBackend("auto", heads, limits, CPU)
    cache = torch.zeros(4, PAGE, 576, dtype=torch.bfloat16)
    backend.bind([CacheGroup(0, {"a": cache}, num_heads=heads, latent_size=512)])
    impl = TreeMLAImplMixin()
    impl.kv_lora_rank, impl.scale = 512, 0.1
    launches.taken()
    backend.run_every_variant(lambda: None)
    warmed = launches.taken()
    attention = {"_latent_attn_kernel", "_merge_parts_kernel", "_tree_words_kernel"}
    kernels = {*STEP_KERNELS} - ATTENTION | attention
    assert {name for name, *_ in warmed} >= kernels
    table = torch.zeros(REQUESTS, -(-CONTEXT // PAGE), dtype=torch.int32)
    rng, store = np.random.default_rng(1), TreeStore(REQUESTS, nodes, nodes, CPU)
    for _ in range(20):
        count = int(rng.integers(1, REQUESTS))
        sizes = rng.integers(1, 1 + rng.choice([3, nodes]), count).tolist()
        starts = rng.integers(0, CONTEXT - nodes - 1, count).tolist()
        batch = input_batch(list(range(count)), starts, sizes, [0] * count)
        batch.query_start_loc = batch.cu_num_logits
        batch.query_start_loc_np = batch.cu_num_logits_np
        trees = attach_trees(store, step_rows(batch, nodes))
        row = batch.num_tokens
        metadata: Any = SimpleNamespace(
            num_decodes=count, num_decode_tokens=row, num_prefills=0,
            decode=SimpleNamespace(block_table=table[:count]),
        )  # fmt: skip
        attach_tree_rows(metadata, backend._decoded_rows(metadata, batch, trees, table))
        # Queries and rows are parts of joint projections, as in vLLM's layers.
        rotary = torch.zeros(row, heads, 192, dtype=torch.bfloat16)[..., 128:]
        latent = torch.zeros(row, heads, 512, dtype=torch.bfloat16)
        launches.taken()
        impl.forward_mqa((latent, rotary), cache, metadata, None)
        stored_rows = torch.zeros(row, 576, dtype=torch.bfloat16)
        keys, values = stored_rows[:, None, 512:], stored_rows[:, :512]
        slots = torch.zeros(3 * row, dtype=torch.int64)[row % 5 : row % 5 + row]
        impl.do_kv_cache_update(values, keys, cache, slots, "auto", ONE)
        launched = launches.taken()
        assert launched and not launched - warmed, _difference(launched - warmed, warmed)


def test_lookups_launch_what_was_warmed_up(launches: Launches) -> None:
    nodes = 40
    ngrams = DeviceNgrams(NgramBranches(3, 16), 3, CONTEXT, CPU)
    history = torch.zeros((REQUESTS, CONTEXT), dtype=torch.int32)
    ngrams.warm_up(history, nodes)
    warmed = launches.taken()
    assert {name for name, *_ in warmed} == LOOKUP_KERNELS
    for count, longest in ((1, 1), (2, 16), (3, 2048), (REQUESTS, CONTEXT - 1)):
        # Lines of one buffer start anywhere.
        limits = torch.ones((3, count), dtype=torch.int32)
        slots = torch.arange(REQUESTS + 1)[1 : count + 1]
        requests = DeviceRequests(slots, *limits, 4, nodes, longest)
        found = ngrams.lookup(history, slots, limits[0], requests)
        for alone in (False, True):
            head = None
            for _ in range(2):
                head, *_ = ngrams.merged(head, found, requests, lookup_only=alone)
        part = head.scatter(torch.arange(count), REQUESTS)
        ngrams.merged(part, found, requests, lookup_only=True)
        launched = launches.taken()
        assert launched == warmed, _difference(launched - warmed, warmed)


@pytest.mark.parametrize("nodes", [1, 15, 40])
def test_trees_launch_what_was_warmed_up(
    launches: Launches, monkeypatch: pytest.MonkeyPatch, nodes: int
) -> None:
    graph = GraphTrees(StepLimits(9, 999, nodes + 1, CONTEXT), CPU)
    monkeypatch.setattr(step_trees, "has_kernels", lambda device: True)
    launches.taken()
    step_trees.warm_up(nodes, CPU)
    graph.warm_up()
    warmed = launches.taken()
    assert {name for name, *_ in warmed} == TREE_KERNELS
    for seed in range(12):
        drafted = Drafted.draw(nodes, seed)
        drafted.room = drafted.counts if seed % 2 else None
        trees, tokens, batch = drafted.step()
        set_positions(trees, torch.zeros(batch.num_tokens + 3, dtype=torch.int64)[seed % 4 :])
        stops = StopTokens(7, CPU)
        walk = walk_trees(stops.mask_after_stop(trees, tokens), tokens.long(), tokens)
        # Lines of one buffer start anywhere.
        slots = torch.zeros((2, batch.num_tokens), dtype=torch.int64)[seed % 2]
        committed_rows(trees, walk, slots, slots)
        starts = torch.zeros(batch.num_reqs + seed % 3 + 1, dtype=torch.int32)
        rows = batch.num_tokens % 900
        for given in (trees, None):
            graph.fill(given, starts, starts[1:], torch.zeros((1, 1)).int(), rows, None)
        launched = launches.taken()
        assert launched == warmed, _difference(launched - warmed, warmed)


@pytest.mark.parametrize("nodes", [1, 40])
def test_tables_launch_what_was_warmed_up(
    launches: Launches, monkeypatch: pytest.MonkeyPatch, nodes: int
) -> None:
    monkeypatch.setattr(step_trees, "has_kernels", lambda device: True)
    states = request_states(np.random.default_rng(0), CONTEXT)
    host_step.warm_up(states, nodes)
    draft_inputs.warm_up(states)
    warmed = launches.taken()
    assert {name for name, *_ in warmed} == TABLE_KERNELS
    for count in range(1, REQUESTS):
        # Lines of one buffer start anywhere.
        slots = torch.zeros(count + 3, dtype=torch.int64)[count % 4 :][:count]
        ints = torch.zeros((3, count), dtype=torch.int32)
        batch = SimpleNamespace(idx_mapping=slots, seq_lens=ints[1])
        paths = torch.zeros((count, nodes + 1), dtype=torch.int64)
        trees = DeviceTrees.none(count, nodes, CPU)
        found = torch.zeros((count, 3)).int(), torch.zeros((count, 3, 16)).int()
        for walk in (None, Walk(paths, paths, ints[2])):
            host_step.step_table(states, batch, walk, ints[0], nodes + 1)
        for others in ((None, None), (None, found), (trees, found)):
            host_step.trees_table(trees, ints[2], *others)
        limits = torch.zeros((4, count), dtype=torch.int32)
        draft_inputs.draft_inputs(states, slots, ints[0], limits)
        launched = launches.taken()
        assert launched == warmed, _difference(launched - warmed, warmed)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(8, 2, 64), (3, 1, 40)])
def test_partial_caches_launch_what_was_warmed_up(
    launches: Launches, heads: int, kv_heads: int, head_dim: int
) -> None:
    caches = [
        torch.zeros(4, kv_heads, PAGE, 2 * head_dim, dtype=torch.bfloat16) for _ in range(LAYERS)
    ]
    pool = DevicePartialCache(caches, 40, 4, REQUESTS)
    pool.warm_up(heads, torch.bfloat16)
    warmed = launches.taken()
    assert {name for name, *_ in warmed} == PARTIAL_CACHE_KERNELS
    rng = np.random.default_rng(2)
    seen = set()
    for step in range(20):
        count = int(rng.integers(1, REQUESTS))
        # Some requests are chosen for, others have grown, and one may read all of its context.
        lens = [50 + 3 * step + int(rng.integers(30)) for _ in range(count + 1)]
        history = TokenHistory(
            torch.zeros(1), torch.zeros(1), [str(r) for r in range(count + 1)], lens,
            [True] * len(lens), [n - 1 for n in lens], lens,
        )  # fmt: skip
        # Contexts of a batch start anywhere.
        of_batch = torch.tensor([0, *lens])[1:]
        table = torch.zeros(REQUESTS, 1 + step, dtype=torch.int32)
        partial = range(step % 2, count + step % 2)
        moves = pool.advance(history, of_batch, partial, table)
        # A part of the joint projection, as in vLLM's models.
        joint = torch.zeros(len(lens), (heads + 2 * kv_heads) * head_dim, dtype=torch.bfloat16)
        query = joint[:, : heads * head_dim].view(len(lens), heads, head_dim)
        for layer in range(LAYERS):
            pool.choose(layer, moves, query, of_batch, table)
        launched = launches.taken()
        seen |= launched
        assert not launched - warmed, _difference(launched - warmed, warmed)
    assert seen == warmed


def _difference(missing: set[tuple[Any, ...]], warmed: set[tuple[Any, ...]]) -> str:
    """The first missing variant beside the nearest that was warmed up."""
    one = min(missing, key=str)
    near = [key for key in warmed if key[0] == one[0]]
    if not near:
        return f"{one[0]} was not warmed up"
    best = max(near, key=lambda key: sum(a == b for a, b in zip(key, one, strict=True)))
    places = [i for i, (a, b) in enumerate(zip(best, one, strict=True)) if a != b]
    return f"{one[0]}: {[(i, best[i], one[i]) for i in places]}"
