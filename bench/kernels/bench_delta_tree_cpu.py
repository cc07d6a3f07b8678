# SPDX-License-Identifier: Apache-2.0
"""Trees over recurrent states against vLLM's own chains, on the CPU.

    OMP_NUM_THREADS=1 python bench/kernels/bench_delta_tree_cpu.py

It times a bfloat16 Gated DeltaNet layer without projections (convolution, gates, delta rule) in
both engines: vLLM's chain of N drafts, which stores a state after every row, and our rows with the
commit of an accepted path. Both start from the same state, and the script stops if their outputs of
a chain differ. Calls alternate in one process.
"""

from __future__ import annotations

import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

KEY_HEADS, VALUE_HEADS, HEAD_SIZE, WIDTH = 16, 32, 128, 4
CHANNELS = (2 * KEY_HEADS + VALUE_HEADS) * HEAD_SIZE
# States of all layers: more than the last level of cache, as in a model.
CACHE_BYTES = 64 << 20
SHORT, LONG = 4, 16
STATES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def make_layer(slots: int, inputs: int, dtype: torch.dtype) -> Any:
    """Returns the attributes of a layer that both paths read, with its own caches."""
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import (
        QwenGatedDeltaNetAttention,
    )

    layer = SimpleNamespace(
        kv_cache=(
            torch.randn(slots, inputs, CHANNELS).bfloat16(),
            torch.randn(slots, VALUE_HEADS, HEAD_SIZE, HEAD_SIZE).to(dtype),
        ),
        conv1d=SimpleNamespace(weight=(0.5 * torch.randn(CHANNELS, WIDTH)).bfloat16(), bias=None),
        activation="silu",
        A_log=2 * torch.rand(VALUE_HEADS) - 4,
        dt_bias=torch.rand(VALUE_HEADS).bfloat16(),
        key_dim=KEY_HEADS * HEAD_SIZE,
        value_dim=VALUE_HEADS * HEAD_SIZE,
        head_k_dim=HEAD_SIZE,
        head_v_dim=HEAD_SIZE,
        tp_size=1,
    )
    layer.rearrange_mixed_qkv = lambda x: QwenGatedDeltaNetAttention.rearrange_mixed_qkv(layer, x)
    return layer


def tree_parents(nodes: int, shape: str) -> list[int]:
    """Returns parent rows of a root and its nodes. In a "tree" a node's parent is one of the six
    rows before it."""
    rng = random.Random(nodes)
    if shape == "chain":
        return list(range(-1, nodes))
    return [-1] + [rng.randrange(max(0, i - 6), i) for i in range(1, nodes + 1)]


def depth_of(parents: list[int]) -> int:
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return max(depths)


class Case:
    """A batch of equal trees, and vLLM's chain with as many rows."""

    def __init__(self, batch: int, nodes: int, dtype: torch.dtype) -> None:
        from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

        self.batch, self.nodes, self.rows = batch, nodes, nodes + 1
        torch.manual_seed(nodes)
        total = batch * self.rows
        self.mixed = torch.randn(total, CHANNELS).bfloat16()
        self.a, self.b = torch.randn(2, total, VALUE_HEADS).bfloat16()
        state_bytes = batch * VALUE_HEADS * HEAD_SIZE**2 * dtype.itemsize
        self.layers = [
            make_layer(batch, WIDTH - 1, dtype) for _ in range(-(-CACHE_BYTES // state_bytes))
        ]
        self.metadata = SimpleNamespace(non_spec_state_indices_tensor=torch.arange(batch))
        self.stock = make_layer(batch * self.rows, WIDTH - 1 + nodes, dtype)
        slots = torch.arange(batch * self.rows, dtype=torch.int32).view(batch, self.rows)
        self.stock_metadata = SimpleNamespace(
            num_spec_decodes=batch,
            spec_state_indices_tensor=slots,
            spec_query_start_loc=torch.arange(batch + 1, dtype=torch.int32) * self.rows,
            num_accepted_tokens=torch.ones(batch, dtype=torch.int32),
        )
        self._spec_forward = gdn_attention._spec_forward
        self._check(slots)

    def _check(self, slots: torch.Tensor) -> None:
        first, stock = self.layers[0], self.stock
        for name in ("conv1d", "A_log", "dt_bias"):
            setattr(stock, name, getattr(first, name))
        stock.kv_cache[0][slots[:, 0], : WIDTH - 1] = first.kv_cache[0]
        stock.kv_cache[1][slots[:, 0]] = first.kv_cache[1]
        expected = self.chain().float()
        actual = self.verify(0, self.step("chain")).float()
        difference = float((actual - expected).norm() / expected.norm())
        if difference > 0.02:
            raise RuntimeError(f"the outputs of a chain differ by {difference:.3f}")

    def step(self, shape: str) -> Any:
        from vllm_specplug.vllm_attention.state_rows import RequestRows, StateStep

        one = tree_parents(self.nodes, shape)
        requests = [
            RequestRows(r * self.rows, r * self.rows, (r + 1) * self.rows, True)
            for r in range(self.batch)
        ]
        parents = [p if p < 0 else p + r * self.rows for r in range(self.batch) for p in one]
        return StateStep(requests, torch.tensor(parents))

    def chain(self) -> torch.Tensor:
        width = WIDTH - 1 + self.nodes
        conv, states = self.stock.kv_cache
        return self._spec_forward(
            self.stock, self.stock_metadata, self.mixed, self.b, self.a, conv.transpose(1, 2),
            states, WIDTH, width,
        )  # fmt: skip

    def verify(self, layer: int, step: Any) -> torch.Tensor:
        output = torch.empty(len(self.mixed), VALUE_HEADS, HEAD_SIZE, dtype=torch.bfloat16)
        step.run(
            None, self.layers[layer], self.metadata, self.mixed, self.b, self.a, output
        )  # fmt: skip
        return output

    def last_rows(self, row: int) -> torch.Tensor:
        return torch.arange(self.batch) * self.rows + row

    def measure(self, rounds: int) -> dict[str, list[float]]:
        """Returns milliseconds of each part in every round."""
        parts = ("chain", "rows", "chain_rows", "root", "short", "long")
        times: dict[str, list[float]] = {name: [] for name in parts}

        def timed(name: str, call: Callable[[], object]) -> None:
            start = time.thread_time()
            call()
            times[name].append(1e3 * (time.thread_time() - start))

        for turn in range(rounds + 1):
            layers = itertools.cycle(range(len(self.layers)))
            for _ in range(turn % len(self.layers)):
                next(layers)
            # Commits of a tree's root, and of paths of a chain, which has all lengths.
            for name, shape, accepted in (
                ("root", "tree", 0), ("short", "chain", SHORT), ("long", "chain", LONG),
            ):  # fmt: skip
                step, last = self.step(shape), self.last_rows(accepted)
                kind = "rows" if shape == "tree" else "chain_rows"
                layer = next(layers)
                timed(kind, lambda at=layer, s=step: self.verify(at, s))
                timed(name, lambda s=step, at=last: s.commit(at))
            timed("chain", self.chain)
        # The first round fills caches and allocates pages.
        return {name: values[len(values) // (rounds + 1) :] for name, values in times.items()}


def middle(values: list[float]) -> str:
    low, median, high = statistics.quantiles(values, n=4)
    return f"{median:.2f} ({low:.2f} to {high:.2f})"


def mebibytes(states: float, dtype: torch.dtype, extra: float = 0.0) -> str:
    return f"{(states * VALUE_HEADS * HEAD_SIZE**2 * dtype.itemsize + extra) / 2**20:.1f}"


def kept_bytes() -> int:
    """Returns the bytes per tree row and layer until the walk: convolution input, k, u, d."""
    return 2 * CHANNELS + 4 * (KEY_HEADS * HEAD_SIZE + VALUE_HEADS * (HEAD_SIZE + 1))


def main() -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from harness import Benchmark

    from vllm_specplug.bench.result_page import ResultPage, Section

    benchmark = Benchmark("delta_tree_cpu", __doc__, runs_vllm=False)
    add = benchmark.parser.add_argument
    add("--batch", type=int, nargs="+", default=[1, 4, 8])
    add("--nodes", type=int, nargs="+", default=[16, 32, 64])
    add("--rounds", type=int, default=12)
    args = benchmark.parse()
    torch.set_num_threads(1)

    from vllm.platforms import current_platform

    current_platform.import_kernels()
    sections, data = [], []
    header = (
        "batch", "nodes", "vLLM's chain, ms", "tree, ms", "the same rows as a chain, ms",
        "commit of the root, ms", f"of {SHORT} more, ms", f"of {LONG} more, ms",
        f"chain / (tree + commit of {SHORT})",
    )  # fmt: skip
    for name, dtype in STATES.items():
        rows = []
        for batch, nodes in itertools.product(args.batch, args.nodes):
            with torch.inference_mode():
                times = Case(batch, nodes, dtype).measure(args.rounds)
            medians = {part: statistics.median(values) for part, values in times.items()}
            ratio = medians["chain"] / (medians["rows"] + medians["short"])
            shown = ("chain", "rows", "chain_rows", "root", "short", "long")
            texts = [middle(times[part]) for part in shown]
            rows.append([str(batch), str(nodes), *texts, f"{ratio:.1f}"])
            data.append({"states": name, "batch": batch, "nodes": nodes, "ms": times,
                         "chain_over_tree": ratio})  # fmt: skip
            print(name, *rows[-1], flush=True)
        sections.append(Section(header, rows, f"States in {name}"))
    traffic = [
        [name, str(nodes), mebibytes(1, dtype), mebibytes(nodes + 1, dtype), mebibytes(2, dtype),
         mebibytes(1, dtype), mebibytes(nodes + 1, dtype),
         mebibytes(1, dtype, kept_bytes() * (nodes + 1))]
        for name, dtype in STATES.items()
        for nodes in args.nodes
    ]  # fmt: skip
    sections.append(
        Section(
            ("states", "nodes", "chain reads", "chain writes", "tree reads", "tree writes",
             "chain holds", "tree holds"),
            traffic,
            "Bytes of states per sequence and layer, MiB",
            ["By formula: a chain of N drafts reads one state and writes N + 1. A tree is read "
             "from one, which its commit reads again and writes. Held in the step: N + 1 states; "
             f"one, and {kept_bytes()} bytes of each row."],
        )
    )  # fmt: skip
    depths = ", ".join(f"{n}: {depth_of(tree_parents(n, 'tree'))}" for n in args.nodes)
    page = ResultPage(
        name="delta_tree_cpu",
        title="Trees over recurrent states against vLLM's chains on a CPU",
        about=f"One Gated DeltaNet layer of {KEY_HEADS} key and {VALUE_HEADS} value heads of "
        f"{HEAD_SIZE} (Qwen3-Next's), convolution, gates and rule, bfloat16 inputs, one thread. "
        "Medians and quartiles of CPU time, calls alternating; states of all layers together "
        f"exceed the caches. Depth of the random trees by nodes: {depths}. vLLM's chain has as "
        "many drafts as the tree has nodes and commits nothing: the next step starts at another of "
        "its states.",
        sections=sections,
        data=data,
        made_by=[benchmark.provenance(args)],
    )
    benchmark.publish(args, page)


if __name__ == "__main__":
    main()
