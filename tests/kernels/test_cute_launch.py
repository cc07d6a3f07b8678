# SPDX-License-Identifier: Apache-2.0
"""Planning, storing and launching of the CuTe kernels, without cutlass and without a GPU."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.kernels.device_trees import DeviceTrees
from vllm_specplug.kernels import TreeAttnMetadata, tree_attn_cute_sm90
from vllm_specplug.kernels.cute import driver, store
from vllm_specplug.kernels.cute.compile import CompiledKernel
from vllm_specplug.kernels.cute.config import SHARED_LIMIT, CombineConfig, ForwardConfig
from vllm_specplug.kernels.cute.launch import Arguments, Bounds, TensorMapSpec, plan_launches
from vllm_specplug.kernels.cute.launch_params import COMBINE_PARAMETERS, FORWARD_PARAMETERS
from vllm_specplug.kernels.tree_attn_cute_sm90 import CuteUnavailable, unsupported_reason

BF16 = torch.bfloat16
HOPPER = (9, 0)


def no_workspace(*_):
    raise AssertionError("one split needs no workspace")


def some_workspace(splits: int, rows: int, heads: int, head_dim: int, trees: int):
    sums = torch.empty(splits, rows, heads)
    return torch.empty(*sums.shape, head_dim), sums, torch.empty(trees, 2, dtype=torch.int32)


@pytest.mark.parametrize("shape", [(3, 5, 7, 64, 1), (3, 5, 3, 96, 9), (1, 1, 1, 128, 2)])
def test_records_and_partial_outputs_are_written_by_eight_bytes(shape, monkeypatch):
    """An odd number of log-sums must not move what follows them."""
    monkeypatch.setattr(tree_attn_cute_sm90, "_workspaces", {})
    parts, rows, heads, head_dim, trees = shape
    outputs, sums, records = tree_attn_cute_sm90._workspace(torch.device("cpu", 0), 0, *shape)
    assert outputs.numel() == parts * rows * heads * head_dim
    assert sums.numel() == parts * rows * heads and records.numel() == 2 * trees
    assert outputs.data_ptr() % 8 == 0 and records.data_ptr() % 8 == 0
    spans = sorted((t.data_ptr(), t.data_ptr() + 4 * t.numel()) for t in (outputs, sums, records))
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def test_a_stream_that_ends_leaves_nothing(monkeypatch):
    monkeypatch.setattr(tree_attn_cute_sm90, "_workspaces", {(0, 7): "a", (0, 8): "b"})
    monkeypatch.setattr(tree_attn_cute_sm90, "_prepared", {(7, "call"): "c", (8, "call"): "d"})
    tree_attn_cute_sm90.drop_workspace(7)
    assert tree_attn_cute_sm90._workspaces == {(0, 8): "b"}
    assert tree_attn_cute_sm90._prepared == {(8, "call"): "d"}


def plan(trees: DeviceTrees, splits: int | None = 1, workspace=no_workspace, skipped: int = 0):
    inputs = (trees.query, trees.key_cache, trees.value_cache, trees.query.clone())
    tail = (trees.tail.get("tail_key"), trees.tail.get("tail_value"))
    arguments = Arguments(*inputs, trees.metadata(skipped), trees.scale, *tail)
    return plan_launches(arguments, 132, workspace, splits)


def named(launch) -> dict:
    parameters = (
        FORWARD_PARAMETERS if isinstance(launch.config, ForwardConfig) else COMBINE_PARAMETERS
    )
    names = [name for name, _ in parameters]
    return dict(zip(names, launch.arguments[-len(names) :], strict=True))


@pytest.mark.parametrize(
    ("specs", "group", "page", "variant", "grid"),
    [
        # a plain decode: one packed row of 4
        ([(100, 0)], 4, 16, (1, 16), (1, 2, 1)),
        # 16 rows of 4 fill one warpgroup, 17 do not
        ([(100, 15)], 4, 64, (1, 64), (1, 2, 1)),
        ([(100, 16)], 4, 128, (2, 64), (1, 2, 1)),
        # 65 rows of 4 are 260: three blocks of 128
        ([(100, 64), (5, 1)], 4, 32, (2, 16), (3, 2, 2)),
    ],
)
def test_variants_and_grids(specs, group, page, variant, grid):
    trees = DeviceTrees(specs, dtype=BF16, head_dim=64, kv_heads=2, group=group, page=page)
    (launch,) = plan(trees)
    assert (launch.config.warpgroups, launch.config.box) == variant
    assert launch.grid == grid
    assert named(launch)["page_shift"] == page.bit_length() - 1
    assert named(launch)["group"] == group


def within_limits(trees: int, nodes: int, group: int, head_dim: int, page: int, context: int,
                  *, for_drafts: bool = False) -> None:  # fmt: skip
    """Plans launches for trees of one size, whose tensors are not read; `for_drafts`: their keys
    and values are in no cache."""
    rows, kv_heads, heads = nodes + 1, 2, 2 * group
    # A slice of a joined projection, as vLLM hands it over.
    joined = torch.empty(trees * rows, heads + 2 * kv_heads, head_dim, dtype=BF16)
    query, own = joined[:, :heads], None
    key, value = torch.empty(4, page, kv_heads, 2 * head_dim, dtype=BF16).chunk(2, dim=-1)
    if for_drafts:
        own = torch.empty(trees * rows, kv_heads, head_dim, dtype=BF16)
    numbers = torch.zeros(5, trees, dtype=torch.int32)
    meta = TreeAttnMetadata(
        plan=numbers, parent_rows=numbers[0], block_table=torch.zeros(trees, 4, dtype=torch.int32),
        max_rows=rows, max_context=context, mask_kind="full" if for_drafts else "tree",
    )  # fmt: skip

    def workspace(parts: int, *shape: int):
        assert parts * shape[0] * shape[1] * shape[2] * 4 < 2**30, "a gigabyte of partial results"
        return torch.empty(1), torch.empty(1), torch.empty(1)

    output = torch.empty(query.shape, dtype=BF16)
    arguments = Arguments(query, key, value, output, meta, head_dim**-0.5, own, own)
    forward, *merge = plan_launches(arguments, 132, workspace)
    blocks, of_heads, slots = forward.grid
    assert blocks * forward.config.tile_m >= rows * group
    # A driver takes as many blocks in a grid's second and third dimension.
    assert of_heads == kv_heads and trees <= slots <= 65535
    assert forward.config.shared_bytes <= SHARED_LIMIT and forward.config.threads <= 1024
    assert all(launch.grid[1] == trees for launch in merge)
    # A tree of one warpgroup has none beside it that waits.
    assert for_drafts or forward.config.specialised == (rows * group > 64)


@pytest.mark.parametrize(("group", "head_dim"), [(1, 96), (3, 64), (7, 64), (8, 128), (16, 128)])
def test_launches_are_within_the_limits_of_a_device(group, head_dim):
    """One tree of the longest context, and the largest batch."""
    for trees, context in ((1, 131_072), (256, 4096)):
        for page, nodes in itertools.product((16, 128), (0, 15, 63, 256)):
            within_limits(trees, nodes, group, head_dim, page, context)
        for nodes in (7, 15, 256):
            within_limits(trees, nodes, group, head_dim, 16, context, for_drafts=True)


def test_the_workspace_is_sized_by_the_trees_not_by_their_buffers():
    trees = DeviceTrees([(3000, 5)], dtype=BF16, head_dim=64, kv_heads=2)
    buffer = torch.full((5000,), -1, dtype=torch.int32)
    buffer[:6] = trees.parent_rows()
    trees.parent_rows = lambda: buffer
    asked = []

    def workspace(*shape: int):
        asked.append(shape)
        return some_workspace(*shape)

    plan(trees, splits=3, workspace=workspace, skipped=1)
    assert asked == [(2 * 3 + 3 * 2 // 4, 32, 4, 64, 2)]


def test_nothing_is_launched_for_nothing():
    trees = DeviceTrees([(3, 1)], dtype=BF16, head_dim=64)
    meta = trees.metadata()
    meta.max_rows = 0
    inputs = (trees.query, trees.key_cache, trees.value_cache, trees.query.clone())
    assert plan_launches(Arguments(*inputs, meta, 1.0), 132, no_workspace) == []


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"capability": (8, 0)}, "8.0 is not 9.0"),
        ({"capability": (10, 0)}, "10.0 is not 9.0"),
        ({"head_dim": 80}, "head size 80 is not one of 64, 96, 128"),
        ({"dtype": torch.float32}, "float32 is not one of bfloat16, float16"),
        ({"block_size": 48}, "block size 48 is not a power of two"),
        ({"block_size": 8}, "block size 8 is not a power of two from 16"),
    ],
)
def test_what_is_not_supported_says_why(change, why):
    shape = {"capability": HOPPER, "head_dim": 128, "dtype": BF16, "block_size": 16} | change
    assert why in unsupported_reason(**shape)


def test_supported_where_a_kernel_can_be_had(monkeypatch, tmp_path):
    monkeypatch.setattr(store, "can_compile", lambda: True)
    assert unsupported_reason(HOPPER, 128, BF16, 16) is None
    monkeypatch.setattr(store, "can_compile", lambda: False)
    monkeypatch.setattr(store, "SHIPPED", tmp_path)
    monkeypatch.setenv("SPECPLUG_CACHE", str(tmp_path))
    assert "pip install 'vllm-specplug[cute]'" in unsupported_reason(HOPPER, 128, BF16, 16)


KERNEL = CompiledKernel("combine_d64_bfloat16", "start", (8, 4, 1), b"\x7fELF" * 9, ".version")


def test_stored_kernels_come_back(tmp_path):
    store.write(tmp_path, KERNEL)
    assert store.read(tmp_path, KERNEL.name) == KERNEL
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".cubin", ".json", ".ptx"]


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda f: (f / f"{KERNEL.name}.cubin").write_bytes(b"\x7fELF"), "damaged"),
        (lambda f: (f / f"{KERNEL.name}.cubin").unlink(), "not there"),
        (lambda f: (f / f"{KERNEL.name}.json").write_text("{"), "unreadable"),
        (lambda f: (f / f"{KERNEL.name}.json").write_text("[]"), "unreadable"),
        (lambda f: _rewrite(f, sources="0"), "other sources"),
    ],
)
def test_a_damaged_store_counts_as_empty(damage, why, tmp_path):
    store.write(tmp_path, KERNEL)
    damage(tmp_path)
    assert why in store.read(tmp_path, KERNEL.name)


def _rewrite(folder, **fields):
    path = folder / f"{KERNEL.name}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_every_source_of_a_kernel_counts():
    wanted = {"forward_sm90.py", "mainloop_basic.py", "mainloop_specialised.py", "cuda_contract.py"}
    assert wanted <= {path.name for path in store.sources()}


def test_kernels_are_compiled_once_and_cached(monkeypatch, tmp_path):
    made = []

    def compile_config(config):
        made.append(config.name)
        return replace(KERNEL, name=config.name)

    compiler = types.SimpleNamespace(compile_config=compile_config)
    monkeypatch.setitem(sys.modules, "vllm_specplug.kernels.cute.compile", compiler)
    monkeypatch.setattr(store, "can_compile", lambda: True)
    monkeypatch.setattr(store, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setenv("SPECPLUG_CACHE", str(tmp_path / "cache"))
    config = CombineConfig(64, "bfloat16")
    first = store.obtain(config)
    assert store.obtain(config) == first and made == [config.name]


def test_a_compiler_that_fails_makes_the_kernel_unavailable(monkeypatch, tmp_path):
    def compile_config(config):
        raise ValueError("no such instruction")

    compiler = types.SimpleNamespace(compile_config=compile_config)
    monkeypatch.setitem(sys.modules, "vllm_specplug.kernels.cute.compile", compiler)
    monkeypatch.setattr(store, "can_compile", lambda: True)
    monkeypatch.setattr(store, "SHIPPED", tmp_path)
    monkeypatch.setenv("SPECPLUG_CACHE", str(tmp_path))
    with pytest.raises(CuteUnavailable, match="no such instruction"):
        store.obtain(CombineConfig(64, "bfloat16"))


class FakeDriver:
    """Stands for libcuda: records calls, fails those it is told to."""

    def __init__(self, fail: str = "", refused: tuple[bytes, ...] = ()) -> None:
        self.fail, self.refused, self.calls = fail, refused, []

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append((name, arguments))
            if name == "cuGetErrorString":
                arguments[1]._obj.value = b"device kernel image is invalid"
                return 0
            if name == "cuModuleLoadData" and arguments[1] in self.refused:
                return 209
            return 200 if name == self.fail else 0

        return call

    def named(self, name: str) -> list[tuple]:
        return [arguments for called, arguments in self.calls if called == name]


@pytest.fixture
def fake_device(monkeypatch, tmp_path):
    """A call on CPU tensors goes to a pretended driver; returns a function that makes it."""

    def call(trees: DeviceTrees, fail: str = "", splits: int | None = None) -> FakeDriver:
        library = FakeDriver(fail)
        monkeypatch.setattr(driver, "_library", lambda: library)
        for name in ("_prepared", "_kernels", "_workspaces"):
            monkeypatch.setattr(tree_attn_cute_sm90, name, {})
        sizes = {name: 8 if kind in ("address", "stride") else 4 for name, kind in PARAMETERS}
        forward = tuple(sizes[name] for name, _ in FORWARD_PARAMETERS)
        merge = tuple(sizes[name] for name, _ in COMBINE_PARAMETERS)

        def obtain(config):
            tail = forward if isinstance(config, ForwardConfig) else merge
            head = (128, 128, 1, 1) if isinstance(config, ForwardConfig) else ()
            return CompiledKernel(config.name, "entry", (*head, *tail), b"cubin", "ptx")

        monkeypatch.setattr(store, "obtain", obtain)
        driver.encode_tensor_map.cache_clear()
        properties = types.SimpleNamespace(multi_processor_count=132)
        stream = types.SimpleNamespace(cuda_stream=77)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
        monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
        inputs = (trees.query, trees.key_cache, trees.value_cache, trees.query.clone())
        meta = trees.metadata()
        for _ in range(2):  # the second call finds everything prepared
            tree_attn_cute_sm90.tree_attn_cute(
                *inputs, meta, trees.scale, **trees.tail, splits=splits
            )
        return library

    return call


PARAMETERS = (*FORWARD_PARAMETERS, *COMBINE_PARAMETERS)


def test_a_call_loads_once_and_launches_every_time(fake_device):
    trees = DeviceTrees([(3000, 5)], dtype=BF16, head_dim=64, kv_heads=2, page=64)
    library = fake_device(trees, splits=4)
    assert len(library.named("cuModuleLoadData")) == 2
    launches = library.named("cuLaunchKernel")
    assert len(launches) == 4
    assert [argument.value for argument in launches[0][1:4]] == [1, 2, 1 + 4]
    config = ForwardConfig(64, "bfloat16", 1, 64)
    assert launches[0][4].value == config.threads
    assert launches[0][7].value == config.shared_bytes
    assert launches[0][8].value == 77
    # what the driver would read through the pointers
    pointers = launches[0][9]
    assert len(pointers) == 2 + 2 + len(FORWARD_PARAMETERS)
    address = ctypes.c_int64.from_address(pointers[4]).value
    assert address == trees.query.data_ptr()
    scale = ctypes.c_float.from_address(pointers[len(pointers) - 1]).value
    assert scale == pytest.approx(trees.scale * 1.4426950408889634)
    assert pointers[0] % driver.TENSOR_MAP_ALIGN == 0
    (key, value) = library.named("cuTensorMapEncodeTiled")
    assert [key[3].value, value[3].value] == [t.data_ptr() for t in (
        trees.key_cache, trees.value_cache
    )]  # fmt: skip


def test_a_decode_prepares_its_launches_once(fake_device, monkeypatch):
    """Contexts grow, batches and activations change: what a launch is prepared from does not."""
    trees = DeviceTrees([(9000, 12), (8100, 15)], dtype=BF16, head_dim=64, kv_heads=2, group=4)
    library = fake_device(trees)
    made = []
    real = tree_attn_cute_sm90.Call
    monkeypatch.setattr(
        tree_attn_cute_sm90, "Call", lambda *args, **more: made.append(args) or real(*args, **more)
    )
    tree_attn_cute_sm90._prepared.clear()
    library.calls.clear()
    for step in range(200):
        trees.contexts = [9000 + 3 * step, 8100 + 4 * step]
        trees.rows = [13 - step % 7, 16 - step % 9]
        trees.parents = [np.arange(-1, n - 2, dtype=np.int32) for n in trees.rows]
        meta = trees.metadata(skipped=step % 3)
        # other tokens of a step, and other addresses
        query = torch.cat([trees.query] * (1 + step % 2))
        output = torch.empty_like(query)
        tree_attn_cute_sm90.tree_attn_cute(
            query, trees.key_cache, trees.value_cache, output, meta, trees.scale
        )
        launch = library.named("cuLaunchKernel")[-2 if step else 0]
        pointers = launch[9]
        told = [ctypes.c_int64.from_address(pointers[i]).value for i in (4, 5)]
        assert told == [query.data_ptr(), output.data_ptr()]
    assert len(made) == 1
    # The control: an exact bound is another one every step.
    monkeypatch.setattr(
        Bounds, "of", classmethod(lambda cls, rows, context, group, **_: cls(16, context))
    )
    for _ in range(3):
        trees.contexts[0] += 1
        tree_attn_cute_sm90.tree_attn_cute(
            query, trees.key_cache, trees.value_cache, output, trees.metadata(), trees.scale
        )
    assert len(made) == 1 + 3


def test_bounds_are_those_of_the_blocks():
    # rows of 4 heads: 16 fill a warpgroup, 32 two of them
    found = [Bounds.of(n, 100, 4).rows for n in (1, 16, 17, 32, 33, 257)]
    assert found == [16, 16, 32, 32, 64, 257]
    for group in (1, 3, 4, 71, 130):
        for rows in (1, 5, 64, 65, 257):
            assert Bounds.of(rows, 0, group).rows >= rows
    assert [Bounds.of(1, c, 4).tiles for c in (0, 127, 128, 5000, 8190)] == [2, 4, 4, 128, 256]


def test_ptx_is_loaded_where_the_machine_code_is_refused(monkeypatch):
    library = FakeDriver(refused=(b"cubin",))
    monkeypatch.setattr(driver, "_library", lambda: library)
    driver.load_first((b"cubin", b"ptx"), "start", 128, 1024)
    assert [image for _, image in library.named("cuModuleLoadData")] == [b"cubin", b"ptx"]
    library.refused = (b"cubin", b"ptx")
    with pytest.raises(driver.DriverError, match="209.*; then .*209"):
        driver.load_first((b"cubin", b"ptx"), "start", 128, 1024)


@pytest.mark.parametrize("fail", ["cuModuleLoadData", "cuModuleGetFunction", "cuFuncSetAttribute"])
def test_a_cubin_that_does_not_load_says_why(fake_device, fail):
    trees = DeviceTrees([(30, 5)], dtype=BF16, head_dim=64)
    with pytest.raises(CuteUnavailable, match=f"{fail} failed.*image is invalid"):
        fake_device(trees, fail)


def test_numbers_of_the_driver_interface():
    cuda = pytest.importorskip("cuda.bindings.driver")
    attribute = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    assert int(attribute) == driver.MAX_DYNAMIC_SHARED_SIZE_BYTES
    kinds = cuda.CUtensorMapDataType
    assert {
        "float16": int(kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT16),
        "bfloat16": int(kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16),
    } == driver.TENSOR_MAP_DTYPES
    swizzle = cuda.CUtensorMapSwizzle
    assert {
        size: int(getattr(swizzle, f"CU_TENSOR_MAP_SWIZZLE_{size}B")) for size in (32, 64, 128)
    } == driver.SWIZZLES
    assert int(cuda.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE) == driver.INTERLEAVE_NONE
    promotion = cuda.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B
    assert int(promotion) == driver.L2_PROMOTION_256B
    fill = cuda.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE
    assert int(fill) == driver.OOB_FILL_NONE


def test_descriptor_strides_are_bytes_without_the_first(monkeypatch):
    library = FakeDriver()
    monkeypatch.setattr(driver, "_library", lambda: library)
    driver.encode_tensor_map.cache_clear()
    spec = TensorMapSpec(4096, "float16", (64, 16, 2, 9), (1, 256, 128, 4096), (64, 64, 1, 1), 128)
    driver.encode_tensor_map(spec)
    ((_, dtype, rank, address, extents, strides, box, steps, _, swizzle, _, _),) = library.named(
        "cuTensorMapEncodeTiled"
    )
    assert (dtype.value, rank.value, address.value, swizzle.value) == (6, 4, 4096, 3)
    assert list(extents) == [64, 16, 2, 9] and list(strides) == [512, 256, 8192]
    assert list(box) == [64, 64, 1, 1] and list(steps) == [1, 1, 1, 1]


def test_importing_needs_no_cutlass():
    code = (
        "import sys; sys.modules['cutlass'] = None;"
        "import vllm_specplug.kernels.tree_attn_cute_sm90 as t, torch;"
        "print(t.unsupported_reason((9, 0), 128, torch.bfloat16, 16) is None or 'asked')"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_a_user_without_a_home_compiles_into_a_temporary_folder(monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("SPECPLUG_CACHE", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert store.cache_folder().name == store.sources_digest()
