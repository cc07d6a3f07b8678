# SPDX-License-Identifier: Apache-2.0
"""Tree attention beside vLLM's own CPU attention with as many query rows.

Both run in turns in one process, with a KV cache per layer as in a model. The stock kernel attends
a chain, ours a random tree with as many rows. The table has median milliseconds per layer and the
median of the paired ratios.

    OMP_PROC_BIND=true python bench/kernels/bench_tree_attn_cpu.py

OMP_PROC_BIND=true pins threads to cores, as vLLM does.
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch

QUERY_HEADS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 9, 3, 64, 128
# KV caches of all layers: more than the private caches of a core.
MAX_CACHE_BYTES = 128 << 20


def make_case(args, dtype, isa, batch, context, nodes):
    """Returns two functions that run a layer, stock and ours, and the number of layers."""
    from vllm import _custom_ops as ops

    from vllm_specplug.kernels import probe_cpu_layout, tree_attn, tree_metadata

    rng = np.random.default_rng(0)
    layout = probe_cpu_layout(isa, dtype, BLOCK_SIZE, HEAD_SIZE)
    rows = nodes + 1
    length = context + rows
    blocks = -(-length // BLOCK_SIZE)
    table = torch.from_numpy(rng.permutation(batch * blocks).reshape(batch, blocks)).int()
    layer_bytes = batch * blocks * KV_HEADS * BLOCK_SIZE * 2 * HEAD_SIZE * dtype.itemsize
    num_layers = max(4, min(args.layers, MAX_CACHE_BYTES // layer_bytes))
    caches = [
        layout.views(torch.randn(batch * blocks, KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE).to(dtype))
        for _ in range(num_layers)
    ]
    # As in the model: the query is a slice of the fused projection.
    fused = torch.randn(batch * rows, (QUERY_HEADS + 2 * KV_HEADS) * HEAD_SIZE).to(dtype)
    query = fused[:, : QUERY_HEADS * HEAD_SIZE].view(batch * rows, QUERY_HEADS, HEAD_SIZE)
    output = torch.empty(batch * rows, QUERY_HEADS, HEAD_SIZE, dtype=dtype)
    starts = torch.arange(batch + 1, dtype=torch.int32) * rows
    lengths = torch.full((batch,), length, dtype=torch.int32)
    scale = HEAD_SIZE**-0.5
    scheduler = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=batch,
        num_heads=QUERY_HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_SIZE,
        seq_lens=lengths,
        dtype=dtype,
        query_start_loc=starts,
        causal=True,
        sliding_window_size=-1,
        isa=isa,
        enable_kv_split=True,
    )
    parents = [
        np.array([rng.integers(-1, i) if i else -1 for i in range(nodes)], dtype=np.int32)
        for _ in range(batch)
    ]
    meta = tree_metadata(range(batch), starts[:-1].tolist(), [context] * batch, parents, table)

    def stock(layer: int) -> None:
        key_cache, value_cache = caches[layer]
        ops.cpu_attention_with_kv_cache(
            query=query,
            key_cache=key_cache,
            value_cache=value_cache,
            output=output,
            query_start_loc=starts,
            seq_lens=lengths,
            scale=scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=table,
            softcap=0.0,
            scheduler_metadata=scheduler,
            s_aux=None,
        )

    def ours(layer: int) -> None:
        key_cache, value_cache = caches[layer]
        tree_attn(query, key_cache, value_cache, output, meta, scale, layout)

    return stock, ours, num_layers


def measure(stock, ours, seconds: float, layers: int, clock) -> tuple[float, float, float]:
    """Returns milliseconds of a layer for stock and ours, and their ratio.

    With one thread they are medians of CPU time, and the median ratio of consecutive calls; with
    several threads the 10th percentile of wall time.

    Calls alternate, so that on a busy machine most pairs fit between two preemptions. The two run
    half a round of layers apart, so that none finds a cache that the other has filled.
    """
    times: list[tuple[float, float]] = []
    for layer in range(layers):
        stock(layer)
        ours(layer)
    deadline = clock() + seconds
    layer = 0
    while len(times) < 2 * layers or clock() < deadline:
        start = clock()
        stock(layer % layers)
        middle = clock()
        ours((layer + layers // 2) % layers)
        end = clock()
        times.append((middle - start, end - middle))
        layer += 1
    if clock is time.thread_time:
        a = statistics.median(t[0] for t in times)
        b = statistics.median(t[1] for t in times)
        ratio = statistics.median(t[1] / t[0] for t in times)
    else:
        # A preempted thread delays all others, so on a busy machine medians show the load.
        a = statistics.quantiles((t[0] for t in times), n=10)[0]
        b = statistics.quantiles((t[1] for t in times), n=10)[0]
        ratio = b / a
    return a * 1e3, b * 1e3, ratio


def main() -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from harness import Benchmark

    from vllm_specplug.bench.result_page import ResultPage, Section

    benchmark = Benchmark("tree_attn_cpu", __doc__, runs_vllm=False)
    parser = benchmark.parser
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--context", type=int, nargs="+", default=[0, 64, 256, 1500])
    parser.add_argument("--nodes", type=int, nargs="+", default=[0, 8, 16, 32, 64, 128])
    parser.add_argument(
        "--cases",
        nargs="+",
        default=["bf16:amx", "bf16:vec", "fp32:vec"],
        help="dtype and vLLM's instruction-set name",
    )
    parser.add_argument("--layers", type=int, default=30, help="at most; fewer for large caches")
    parser.add_argument("--seconds", type=float, default=0.4, help="per table row")
    args = benchmark.parse()

    from vllm.platforms import current_platform

    current_platform.import_kernels()
    torch.cpu._init_amx()
    from vllm_specplug.kernels import describe

    header = ("batch", "context", "nodes", "stock ms", "tree ms", "ratio")
    sections = []
    dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32}
    for case in args.cases:
        name, isa = case.split(":")
        for threads in args.threads:
            torch.set_num_threads(threads)
            # CPU time of one thread excludes other programs; several threads need the wall clock.
            clock = time.thread_time if threads == 1 else time.perf_counter
            variant = describe(dtypes[name])["isa"]
            rows = []
            for batch, context, nodes in itertools.product(args.batch, args.context, args.nodes):
                stock, ours, layers = make_case(args, dtypes[name], isa, batch, context, nodes)
                a, b, ratio = measure(stock, ours, args.seconds, layers, clock)
                sizes = map(str, (batch, context, nodes))
                rows.append([*sizes, f"{a:.4f}", f"{b:.4f}", f"{ratio:.2f}"])
                print(" ".join(rows[-1]), flush=True)
            title = f"{name}, layout {isa}, our variant {variant}, {threads} thread(s)"
            sections.append(Section(header, rows, title))
    record = benchmark.provenance(args)
    if os.environ.get("OMP_PROC_BIND") == "true":
        record["command"] = f"OMP_PROC_BIND=true {record['command']}"
    page = ResultPage(
        name="tree_attn_cpu",
        title="CPU tree attention against vLLM's own kernel",
        about=f"{QUERY_HEADS} query and {KV_HEADS} KV heads of {HEAD_SIZE}, block {BLOCK_SIZE}, up "
        f"to {args.layers} layers with a cache each. Milliseconds per layer, calls alternating; "
        "one thread: medians of CPU time, several: 10th percentile of wall time; ratio = "
        "ours / stock.",
        sections=sections,
        data={section.title: section.rows for section in sections},
        made_by=[record],
    )
    benchmark.publish(args, page)


if __name__ == "__main__":
    main()
