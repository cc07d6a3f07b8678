# SPDX-License-Identifier: Apache-2.0
"""Step metadata of the CUDA backend, on CPU tensors."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm_specplug.drafting.drafter import DraftRequests
from vllm_specplug.kernels import AttnFeatures, FeatureKind
from vllm_specplug.kernels.cuda_contract import FULL_GRAPHS_VARIABLE
from vllm_specplug.kernels.cuda_dispatch import ChosenKernel, KernelShape
from vllm_specplug.kernels.features import PLAIN
from vllm_specplug.options import check_kernel
from vllm_specplug.seams import ATTENTION_BACKENDS
from vllm_specplug.tree import DraftTree
from vllm_specplug.vllm_attention.gpu import (
    TreeFlashAttentionBackend,
    TreeTritonAttentionBackend,
    gpu_cache_views,
)
from vllm_specplug.vllm_attention.tree_rows import TreeAttentionMixin, tree_rows_of
from vllm_specplug.vllm_v1.cuda_trees import (
    CudaTreeBackend,
    request_parent_rows,
)
from vllm_specplug.vllm_worker import cuda_backend
from vllm_specplug.vllm_worker.cache_groups import CacheGroup
from vllm_specplug.vllm_worker.cuda_kernels import LayerSample, StepLimits, TreeBuffers
from vllm_specplug.vllm_worker.step import StepRequest, TreeStep

CPU = torch.device("cpu")
LIMITS = StepLimits(num_requests=4, num_rows=64, tree_rows=5, context=512)
TABLE = torch.zeros(4, 8, dtype=torch.int32)


def bushy() -> DraftTree:
    """A fork of two, one of them with two children."""
    return DraftTree(
        np.array([5, 6, 7, 8]),
        np.array([-1, -1, 0, 0], dtype=np.int32),
        np.array([1, 1, 2, 2], dtype=np.int32),
        np.zeros(4, dtype=np.float32),
    )


def request(first: int, tree: DraftTree | None, drafts: int = 4, before: int = 0) -> StepRequest:
    return StepRequest(first, first + before, first + before + 1 + drafts, 100, tree)


@pytest.fixture
def backend() -> CudaTreeBackend:
    backend = CudaTreeBackend("auto", 2, LIMITS, CPU)
    backend.kernel = ChosenKernel("cute", lambda *args: None, "")
    backend.views = gpu_cache_views
    return backend


class PendingCopies:
    """In place of the event behind copies from pinned memory: notices memory that is rewritten
    before anyone has waited."""

    def __init__(self, buffers: TreeBuffers) -> None:
        self.buffers = buffers
        self.read: list[torch.Tensor] = []
        self.waits = 0

    def _memory(self) -> list[torch.Tensor]:
        return [self.buffers.plan_host.clone(), self.buffers.parents_host.clone()]

    def record(self) -> None:
        self.read = self._memory()

    def synchronize(self) -> None:
        self.waits += 1
        for then, now in zip(self.read, self._memory(), strict=False):
            assert torch.equal(then, now), "rewritten while it was copied"
        self.read = []


def test_pinned_memory_is_not_rewritten_while_it_is_copied() -> None:
    buffers = TreeBuffers(LIMITS, CPU)
    assert buffers.sent is None, "memory of the host is copied at once"
    buffers.sent = pending = PendingCopies(buffers)
    for rows in (3, 2):
        chain = np.arange(-1, rows - 1, dtype=np.int32)
        buffers.fill([0], [0], [7], [chain], TABLE)
        assert pending.read, "nobody is told when the copies are done"
    assert pending.waits == 2
    # The control: whoever writes there without waiting is noticed.
    buffers.parents_host[0] = 9
    with pytest.raises(AssertionError, match="rewritten"):
        buffers.fill([0], [0], [7], [chain], TABLE)


def test_fill_lays_trees_one_after_the_other():
    buffers = TreeBuffers(LIMITS, CPU)
    parents = [np.array([-1, 0, 0], np.int32), np.array([-1, 0, 1, 2, 0], np.int32)]
    meta = buffers.fill([3, 1], [7, 20], [40, 0], parents, TABLE)
    assert meta.plan.tolist() == [[3, 1], [7, 20], [3, 5], [40, 0], [0, 3]]
    assert meta.parent_rows.tolist() == [-1, 0, 0, -1, 0, 1, 2, 0]
    assert (meta.max_rows, meta.max_context) == (5, 40)
    assert meta.mask_words.shape == (8, 1)


def test_a_step_reuses_addresses_and_leaves_nothing_of_the_last():
    buffers = TreeBuffers(LIMITS, CPU)
    row = np.array([-1, 0], np.int32)
    places = {"places": 4, "max_rows": 5, "max_context": 512}
    first = buffers.fill([0, 1, 2], [0, 2, 4], [9, 9, 9], [row] * 3, TABLE, **places)
    addresses = [t.data_ptr() for t in (first.plan, first.parent_rows, first.mask_words)]
    second = buffers.fill([0], [0], [3], [row], TABLE, **places)
    assert [t.data_ptr() for t in (second.plan, second.parent_rows, second.mask_words)] == addresses
    assert second.plan[2].tolist() == [2, 0, 0, 0]
    assert second.parent_rows.numel() == 20


def test_a_capture_has_places_for_all_requests_and_rows_of_none():
    meta = TreeBuffers(LIMITS, CPU).fill([], [], [], [], TABLE, places=3, max_rows=5, max_context=9)
    assert meta.plan.tolist() == [[0] * 3] * 5
    assert meta.num_trees == 3


@pytest.mark.parametrize(
    ("tree", "before", "expected"),
    [
        (bushy(), 0, [-1, 0, 0, 1, 1]),
        (bushy(), 2, [-1, 0, 1, 2, 2, 3, 3]),
        # Drafts that are not ours, and a prompt chunk: lines.
        (None, 0, [-1, 0, 1, 2, 3]),
        (DraftTree.chain(np.array([1, 2, 3, 4])), 0, [-1, 0, 1, 2, 3]),
    ],
)
def test_every_request_is_a_tree(tree, before, expected):
    assert request_parent_rows(request(0, tree, before=before)).tolist() == expected


def test_piecewise_steps_attach_only_what_vllm_cannot_do(backend):
    common = SimpleNamespace(block_table_tensor=TABLE)
    line = StepRequest(5, 6, 7, 30, DraftTree.empty())
    metadata = SimpleNamespace()
    backend.attach({"a": metadata, "b": metadata}, TreeStep([request(0, bushy()), line]), common)
    rows = tree_rows_of(metadata)
    assert not rows.covers_batch
    assert rows.metadata.plan.tolist() == [[0], [0], [5], [100], [0]]
    plain = SimpleNamespace()
    backend.attach({"a": plain}, TreeStep([line]), common)
    assert tree_rows_of(plain) is None
    backend.attach({"a": plain}, TreeStep([request(0, bushy())]), common, for_capture=True)
    assert tree_rows_of(plain) is None


def test_full_graphs_take_every_row_of_a_uniform_batch(backend, monkeypatch):
    monkeypatch.setenv(FULL_GRAPHS_VARIABLE, "1")
    common = SimpleNamespace(
        block_table_tensor=TABLE, num_reqs=3, max_query_len=5, num_actual_tokens=15
    )
    captured = SimpleNamespace()
    backend.attach({"a": captured}, TreeStep([]), common, for_capture=True)
    graph = tree_rows_of(captured).metadata
    assert graph.plan[2].tolist() == [0, 0, 0]
    step = TreeStep([request(0, bushy()), request(5, None)])
    replayed = SimpleNamespace()
    backend.attach({"a": replayed}, step, common)
    rows = tree_rows_of(replayed)
    assert rows.covers_batch
    assert rows.metadata.plan.data_ptr() == graph.plan.data_ptr()
    assert (rows.metadata.max_rows, rows.metadata.max_context) == (5, 512)
    assert graph.plan.tolist() == [[0, 1, 0], [0, 5, 0], [5, 5, 0], [100, 100, 0], [0, 5, 0]]
    assert graph.parent_rows[:10].tolist() == [-1, 0, 0, 1, 1, -1, 0, 1, 2, 3]


def _captured_sizes(rows: int, most: int) -> dict[int, int]:
    """Requests -> requests of the graph that vLLM runs them in, as it pads by default: capture
    sizes are rounded up to multiples of a tree's rows."""
    sizes = sorted({*(-(-s // rows) for s in (1, 2, 4)), *(-(-s // rows) for s in range(8, 257, 8)),
                    *(-(-s // rows) for s in range(272, 513, 16))})  # fmt: skip
    return {n: next(s for s in sizes if s >= n) for n in range(1, most + 1) if n <= sizes[-1]}


@pytest.mark.parametrize("nodes", [3, 7, 11])
def test_a_padded_step_lies_where_its_graph_reads(nodes, monkeypatch):
    """vLLM pads a uniform batch to a captured size, and hands out metadata without the padding:
    the graph still reads its plan with the stride it was captured with."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    monkeypatch.setenv(FULL_GRAPHS_VARIABLE, "1")
    rows, most = nodes + 1, 40
    limits = StepLimits(num_requests=64, num_rows=64 * rows, tree_rows=rows, context=512)
    padded = _captured_sizes(rows, most)
    assert any(graph > count for count, graph in padded.items())

    def common(count: int) -> CommonAttentionMetadata:
        starts = torch.arange(0, (count + 1) * rows, rows, dtype=torch.int32)
        return CommonAttentionMetadata(
            query_start_loc=starts, query_start_loc_cpu=starts,
            seq_lens=torch.full((count,), 100, dtype=torch.int32), num_reqs=count,
            num_actual_tokens=count * rows, max_query_len=rows, max_seq_len=512,
            block_table_tensor=torch.zeros(count, 8, dtype=torch.int32),
            slot_mapping=torch.zeros(count * rows, dtype=torch.int64),
        )  # fmt: skip

    for count, graph_size in padded.items():
        backend = CudaTreeBackend("auto", 2, limits, CPU)
        backend.kernel = ChosenKernel("cute", lambda *args: None, "")
        backend.views = gpu_cache_views
        held = SimpleNamespace()
        backend.attach({"a": held}, TreeStep([]), common(graph_size), for_capture=True)
        graph = tree_rows_of(held).metadata
        step = TreeStep(
            [request(rows * i, DraftTree.chain(np.arange(nodes)), nodes) for i in range(count)]
        )
        unpadded = common(graph_size).unpadded(count * rows, count)
        backend.attach({"a": SimpleNamespace()}, step, unpadded, padded_requests=graph_size)
        expected = [
            [*range(count), *[0] * (graph_size - count)],
            [*range(0, rows * count, rows), *[0] * (graph_size - count)],
            [*[rows] * count, *[0] * (graph_size - count)],
        ]
        assert graph.plan[:3].tolist() == expected, (nodes, count, graph_size)


def test_positions_follow_depth(backend):
    linear = torch.tensor([100, 101, 102, 103, 104, 30, 31, 7, 8, 9, 10, 11])
    expected = [100, 101, 101, 102, 102, *linear[5:].tolist()]
    step = TreeStep([request(0, bushy()), StepRequest(5, 6, 7, 30, DraftTree.empty())])
    positions = linear.clone()
    backend.set_positions(positions, step)
    assert positions.tolist() == expected
    # Behind an image, text has smaller positions than tokens before it.
    axes = torch.stack([linear - 40] * 3)
    backend.set_positions(axes, step)
    assert (axes + 40).tolist() == [expected] * 3


@pytest.mark.parametrize("backend_class", [TreeFlashAttentionBackend, TreeTritonAttentionBackend])
def test_attention_backends_hand_tree_rows_over_and_stay_out_of_full_graphs(
    backend_class, monkeypatch
):
    assert issubclass(backend_class.get_impl_cls(), TreeAttentionMixin)
    monkeypatch.delenv(FULL_GRAPHS_VARIABLE, raising=False)
    builder = backend_class.get_builder_cls()
    assert builder.get_cudagraph_support(None, None).name == "NEVER"
    monkeypatch.setenv(FULL_GRAPHS_VARIABLE, "1")
    assert builder.get_cudagraph_support(None, None).name == "UNIFORM_BATCH"


def test_views_of_the_gpu_cache():
    cache = torch.arange(2 * 3 * 4 * 10).view(2, 3, 4, 10)  # [blocks, Hkv, page, 2 * Dh]
    key, value = gpu_cache_views(cache)
    assert key.shape == value.shape == (2, 4, 3, 5)
    assert torch.equal(key[1, 2, 0], cache[1, 0, 2, :5])
    assert torch.equal(value[1, 2, 0], cache[1, 0, 2, 5:])


@pytest.mark.parametrize(
    ("name", "device", "interpreted", "good"),
    [
        ("auto", "cpu", False, True),
        ("cpp", "cpu", False, True),
        ("triton", "cpu", True, True),
        ("triton", "cpu", False, False),
        ("cute", "cpu", True, False),
        ("cute", "cuda", False, True),
        ("triton", "cuda", False, True),
        ("cpp", "cuda", False, False),
    ],
)
def test_kernels_by_device(name, device, interpreted, good):
    if good:
        check_kernel(name, device, interpreted)
        return
    with pytest.raises(ValueError, match=f"tree_kernel='{name}'"):
        check_kernel(name, device, interpreted)


@pytest.mark.parametrize("tree_rows", [1, 9, 65, 257])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (8, 2), (7, 1)])
def test_warm_up_runs_every_variant_a_step_can_take(monkeypatch, tree_rows, heads, kv_heads):
    """Steps have trees of any size up to the largest; none may compile while serving."""
    pytest.importorskip("triton")
    from vllm_specplug.kernels import (
        finite_values_triton,
        kv_compact_triton,
        tree_builder_triton,
        tree_words_triton,
    )
    from vllm_specplug.kernels.tree_attn_triton import config_for

    ran, words, built, moved, stored = set(), set(), [], [], []
    places = tree_builder_triton._places

    def attend(query, key_cache, value_cache, output, meta, scale):
        ran.add((config_for(CPU, meta.max_rows * heads // kv_heads, 64, 2), meta.max_context > 0))

    def fill(plan, parent_rows, out, max_rows):
        words.add(out.shape[1])

    limits = StepLimits(4, 4 * tree_rows, tree_rows, 4096)
    backend = CudaTreeBackend("auto", heads, limits, CPU)
    backend.kernel = ChosenKernel("triton", attend, "")
    backend.block_size = 16
    cache = torch.zeros(2, 16, kv_heads, 64, dtype=torch.bfloat16)
    backend.groups = [(0, kv_compact_triton.LayerCaches.of([(cache, cache)]))]
    backend.samples = [LayerSample(heads, PLAIN, cache, cache)]
    backend.dtype = cache.dtype
    monkeypatch.setattr(tree_words_triton, "fill_tree_words", fill)
    monkeypatch.setattr(
        kv_compact_triton, "compact_paths_triton", lambda *args: moved.append(args[2].tolist())
    )
    monkeypatch.setattr(
        tree_builder_triton,
        "build_best_first_triton",
        lambda *args: built.append(places(args[-1])),
    )
    monkeypatch.setattr(
        finite_values_triton, "isolate_nonfinite_triton", lambda *kv: stored.append(kv[0].shape[1:])
    )
    waits = []
    backend.run_every_variant(lambda: waits.append(0))
    sizes = range(1, tree_rows + 1)
    wanted = {config_for(CPU, r * heads // kv_heads, 64, 2) for r in sizes}
    assert ran == {(config, long) for config in wanted for long in (False, True)}
    assert words == {-(-r // 64) for r in sizes}
    assert built == sorted({places(r - 1) for r in sizes if r > 1})
    assert moved == [[0]] and len(waits) >= len(ran)
    assert stored == [(kv_heads, 64)]


def test_a_draft_of_another_kernel_than_the_targets_has_its_words(monkeypatch):
    """The target by CuTe, which makes words itself, and a head whose shape only Triton takes."""
    filled = []
    backend = CudaTreeBackend("auto", 2, LIMITS, CPU)
    backend.kernel = ChosenKernel("cute", lambda *args: None, "")
    monkeypatch.setattr(
        backend,
        "fill_words",
        lambda meta, kernel=None: filled.append((kernel or backend.kernel).name),
    )
    monkeypatch.setattr(backend, "choose", lambda *args, **use: ChosenKernel("triton", print, ""))
    monkeypatch.setattr(backend, "cache_writer", lambda: None)
    layer = SimpleNamespace(kv_cache=torch.zeros(2, 1, 16, 8))
    drafts = backend.draft_cache([layer, layer], lambda: TABLE, 1.0)
    requests = DraftRequests(token_ids=[np.array([1])], context_lens=[0], req_indices=[0])
    rows = torch.zeros(3, 1, 4)
    for causal, expected in ((True, ["triton"]), (False, [])):
        filled.clear()
        attend = drafts.block_attention(requests, 3, causal)
        attend(0, rows, rows, rows)
        attend(1, rows, rows, rows)
        assert filled == expected


@pytest.mark.parametrize(("name", "full", "good"), [
    ("reference", "1", False), ("reference", "0", True), ("triton", "1", True),
])  # fmt: skip
def test_full_graphs_need_a_kernel_that_can_be_captured(backend, monkeypatch, name, full, good):
    """Else a graph would replay stock attention, which takes a tree for a line."""
    monkeypatch.setenv(FULL_GRAPHS_VARIABLE, full)
    monkeypatch.setattr(backend, "choose", lambda *args, **use: ChosenKernel(name, print, ""))
    groups = [CacheGroup(0, {"layer": torch.zeros(2, 1, 16, 8)})]
    if good:
        backend.bind(groups)
        assert backend.kernel.name == name
        return
    with pytest.raises(ValueError, match=f"{FULL_GRAPHS_VARIABLE}=1.*unset it"):
        backend.bind(groups)


def test_the_server_logs_which_kernel_serves_and_why(backend, monkeypatch):
    lines = []
    monkeypatch.setattr(cuda_backend.logger, "info", lambda text, *more: lines.append(text % more))
    reasons = iter(["fastest of flash 9 us, triton 12 us", "the only one that runs"])
    monkeypatch.setattr(
        backend, "choose", lambda shape: ChosenKernel("flash", print, next(reasons))
    )
    backend.bind([CacheGroup(0, {"layer": torch.zeros(2, 1, 16, 8)})])
    assert lines == ["Tree attention: flash kernel (fastest of flash 9 us, triton 12 us)"]
    # Layers of two shapes: which of them has which.
    reasons = iter(["requested", "the only one that runs"])
    narrow, wide = torch.zeros(2, 1, 16, 8), torch.zeros(2, 1, 16, 16)
    backend.bind([CacheGroup(0, {"narrow": narrow}), CacheGroup(1, {"wide": wide})])
    assert lines[1] == (
        "Tree attention: flash kernel (2 heads over 1 of 4: flash, requested; "
        "2 heads over 1 of 8: flash, the only one that runs)"
    )


def test_layers_attend_by_the_block_table_of_their_group(backend, monkeypatch):
    """Groups share memory, in pages of as many bytes; a step's trees are the same in all."""
    pytest.importorskip("triton")
    from vllm_specplug.kernels import kv_compact_triton

    memory = torch.zeros(2 * 16 * 8)
    caches = [memory.view(2, 1, 16, 8), memory.view(1, 1, 32, 8)]
    window = AttnFeatures(window=7, sinks=torch.zeros(2))
    held = CacheGroup(4, {"b": caches[1]}, features={"b": window})
    groups = [CacheGroup(1, {"a": caches[0]}), held]
    chosen, ran, moved = [], [], []

    def choose(requested, shape, *rest, **use):
        chosen.append(shape.kinds)
        return ChosenKernel("triton", lambda *args, **more: ran.append((args, more)), "")

    monkeypatch.setattr(cuda_backend, "choose_cuda_kernel", choose)
    monkeypatch.setattr(CudaTreeBackend, "capability", lambda self: (9, 0))
    monkeypatch.setattr(CudaTreeBackend, "fill_words", lambda *args: None)
    backend.bind(groups)
    assert chosen == [(FeatureKind(),), (FeatureKind(window=7, sinks=True),)]
    tables = [torch.zeros(1, 8, dtype=torch.int32) for _ in range(2)]
    tree = request(0, bushy())
    common = SimpleNamespace(block_table_tensor=tables[0])
    rows = backend.tree_rows([(0, tree)], True, common)
    query = torch.zeros(5, 2, 4)
    for cache, table, features in zip(caches, tables, (AttnFeatures(), window), strict=True):
        for _ in range(2):
            rows.attend(query, cache, query, 1.0, features, table)
    assert [args[1].shape[1] for args, _ in ran] == [16, 16, 32, 32]
    assert [
        args[4].block_table is table
        for (args, _), table in zip(ran, (tables[0], tables[0], tables[1], tables[1]), strict=True)
    ] == [True] * 4
    assert ran[2][0][4] is ran[3][0][4], "metadata are made once a step"
    assert [more for _, more in ran] == [{}, {}, *[{"features": window}] * 2]
    # Accepted paths are moved in each group, by its table.
    monkeypatch.setattr(
        kv_compact_triton, "compact_paths_triton",
        lambda layers, *args: moved.append((layers.keys[0].shape[1], args[-1])),
    )  # fmt: skip
    tree.accepted_path = [1, 2]
    backend.compact(TreeStep([tree]), SimpleNamespace(block_table=lambda group: group))
    assert moved == [(16, 1), (32, 4)]


def test_a_quantised_cache_takes_a_kernel_for_the_models_dtype(monkeypatch):
    pytest.importorskip("triton")
    scale = torch.tensor(0.5)
    features = AttnFeatures(key_scales=scale, value_scales=scale, query_scales=scale)
    backend = CudaTreeBackend("auto", 2, LIMITS, CPU)
    chosen = []

    def choose(requested, shape, *rest, **use):
        chosen.append((shape.dtype, shape.kinds))
        return ChosenKernel("triton", print, "")

    monkeypatch.setattr(cuda_backend, "choose_cuda_kernel", choose)
    monkeypatch.setattr(CudaTreeBackend, "capability", lambda self: (9, 0))
    cache = torch.zeros(2, 1, 16, 8, dtype=torch.uint8)
    backend.bind([CacheGroup(0, {"a": cache}, torch.float16, "fp8", {"a": features})])
    kind = FeatureKind(quantised_cache=True, quantised_query=True)
    assert chosen == [(torch.float16, (kind,))]
    assert backend.views(cache)[0].dtype == torch.float8_e4m3fn
    assert backend.views(cache)[0].data_ptr() == cache.data_ptr()
    # A head's caches keep the model's dtype, and its kernel is one for plain layers.
    backend.choose(KernelShape.of((2, 1, 64, 16), torch.float16), for_drafts=True)
    assert chosen[1] == (torch.float16, (FeatureKind(),))


@pytest.mark.parametrize(
    ("cache_dtype", "dtype", "token_bytes"),
    [
        ("fp8", torch.uint8, 128),
        ("int8_per_token_head", torch.int8, 136),
        ("fp8_per_token_head", torch.uint8, 136),
    ],
)
def test_draft_layers_share_a_group_with_a_quantised_target(cache_dtype, dtype, token_bytes):
    """Their caches keep the model's dtype, so that drafts are not quantised, and the target's
    pages are no larger for it."""
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
    from vllm.v1.kv_cache_interface import FullAttentionSpec, get_kv_quant_mode

    sizes = {"block_size": 16, "num_kv_heads": 2, "head_size": 64}
    spec = FullAttentionSpec(**sizes, dtype=dtype, kv_quant_mode=get_kv_quant_mode(cache_dtype))
    specs = {f"t{i}": TreeTritonAttentionBackend.customize_spec(spec) for i in range(3)}
    specs["draft"] = FullAttentionSpec(**sizes, dtype=torch.bfloat16)
    (group,) = get_kv_cache_groups(VllmConfig(), specs)
    assert sorted(group.layer_names) == sorted(specs)
    held = group.kv_cache_spec.kv_cache_specs
    assert (held["t0"].dtype, held["draft"].dtype) == (dtype, torch.bfloat16)
    assert held["t0"].page_size_bytes == 16 * 2 * token_bytes


@pytest.mark.parametrize(
    ("dtype", "cache_dtype", "expected"),
    [
        (torch.bfloat16, "auto", "FLASH_ATTN"),
        (torch.bfloat16, "fp8", "FLASH_ATTN"),
        (torch.bfloat16, "int8_per_token_head", "TRITON_ATTN"),
        (torch.bfloat16, "fp8_per_token_head", "TRITON_ATTN"),
        (torch.float32, "auto", "TRITON_ATTN"),
    ],
)
def test_the_attention_backend_taken_has_the_numbers(dtype, cache_dtype, expected):
    """FlashAttention has no float32 and no scales of each token; vLLM would refuse to start."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    import vllm_specplug.vllm_v1.worker_gpu as worker_gpu

    attention = SimpleNamespace(backend=None)
    config = SimpleNamespace(
        attention_config=attention,
        model_config=SimpleNamespace(dtype=dtype),
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
    )
    try:
        worker_gpu.claim_attention_backend(config)
        backends = {
            name: AttentionBackendEnum[name].get_path().rpartition(".")[2]
            for name in ("FLASH_ATTN", "TRITON_ATTN")
        }
    finally:
        ATTENTION_BACKENDS.undo()
    assert attention.backend.name == expected
    tree_classes = (TreeFlashAttentionBackend, TreeTritonAttentionBackend)
    chosen = {c.__name__: c for c in tree_classes}[backends[expected]]

    def serves(backend):
        return backend.supports_dtype(dtype) and backend.supports_kv_cache_dtype(cache_dtype)

    if cache_dtype != "fp8":  # which FlashAttention has on some devices
        assert serves(chosen)
        assert serves(TreeFlashAttentionBackend) == (expected == "FLASH_ATTN")


@pytest.mark.parametrize("cache_dtype", ["int8_per_token_head", "fp8_per_token_head"])
def test_flash_attention_is_refused_over_scales_of_each_token(cache_dtype):
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    import vllm_specplug.vllm_v1.worker_gpu as worker_gpu

    config = SimpleNamespace(
        attention_config=SimpleNamespace(backend=AttentionBackendEnum.FLASH_ATTN),
        model_config=SimpleNamespace(dtype=torch.bfloat16),
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
    )
    message = f"FLASH_ATTN cannot .* over kv_cache_dtype='{cache_dtype}'. Use TRITON_ATTN, or leave"
    with pytest.raises(ValueError, match=message):
        worker_gpu.claim_attention_backend(config)
