# SPDX-License-Identifier: Apache-2.0
"""Products of a target's weights by rows: vLLM's (oneDNN's, or torch's where it has none) and
packed, without a model around them.

    python bench/packed_products.py [--name packed_products_avx2]

All matrices of SmolLM2-135M's layers, read from memory in turn, and its LM head; the two kinds take
turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from harness import Benchmark

from vllm_specplug.bench.result_page import ResultPage, Section
from vllm_specplug.kernels.packed_linear import pack_linear, packed_linear

HIDDEN, MLP, QKV, VOCAB, LAYERS = 576, 1536, 960, 49152, 30
# Columns and depth of a layer's weights.
LAYER = ((QKV, HIDDEN), (HIDDEN, HIDDEN), (2 * MLP, HIDDEN), (HIDDEN, MLP))
ROWS = (1, 2, 4, 8, 12, 14, 16, 24, 32, 48, 64, 128, 256, 512)
Products = list[Callable[[torch.Tensor], torch.Tensor]]


def make_products(shapes: list[tuple[int, int]]) -> dict[str, Products]:
    """vLLM's and packed products of random weights of these shapes."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    made: dict[str, Products] = {"vLLM": [], "packed": []}
    for columns, depth in shapes:
        weight = (torch.randn(columns, depth) / depth**0.5).bfloat16()
        layer: Any = torch.nn.Module()
        layer.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
        dispatch_cpu_unquantized_gemm(layer, True)
        packed = pack_linear(weight)
        made["vLLM"].append(lambda x, layer=layer: layer.cpu_linear(x, layer.weight, None))  # type: ignore[misc]
        made["packed"].append(
            lambda x, packed=packed, columns=columns: packed_linear(x, packed, columns)  # type: ignore[misc]
        )
    return made


def milliseconds(made: dict[str, Products], depths: list[int], rows: int) -> dict[str, float]:
    """Median times of all products of a kind, once each."""
    inputs = {depth: torch.randn(rows, depth).bfloat16() for depth in set(depths)}
    times: dict[str, list[float]] = {kind: [] for kind in made}
    # The first turn warms up.
    for turn in range(15 if rows < 24 else 4):
        for kind, products in made.items():
            # Of one thread: what else the machine does does not count.
            start = time.thread_time()
            for product, depth in zip(products, depths, strict=True):
                product(inputs[depth])
            if turn > 0:
                times[kind].append((time.thread_time() - start) * 1e3)
    return {kind: median(found) for kind, found in times.items()}


def main() -> None:
    benchmark = Benchmark("packed_products", __doc__, runs_vllm=False)
    args = benchmark.parse()
    torch.set_num_threads(1)
    parts = {"layers": [*LAYER] * LAYERS, "LM head": [(VOCAB, HIDDEN)]}
    products = {name: make_products(shapes) for name, shapes in parts.items()}
    data, lines = [], []
    for rows in ROWS:
        cells, times = [str(rows)], {}
        for name, shapes in parts.items():
            found = milliseconds(products[name], [depth for _, depth in shapes], rows)
            times[name] = found
            cells += [f"{found['vLLM']:.2f}", f"{found['packed']:.2f}"]
            cells.append(f"{found['vLLM'] / found['packed']:.2f} x")
        data.append({"rows": rows, **times})
        lines.append(cells)
    header = ["rows"]
    for name in parts:
        header += [f"{name}, vLLM (ms)", f"{name}, packed (ms)", "faster by"]
    page = ResultPage(
        name="packed_products",
        title="Packed products by rows",
        about="The products of one forward of SmolLM2-135M in bfloat16 on one core: the weights of "
        f"its {LAYERS} layers, and its LM head. Medians; a weight is read from memory each time.",
        sections=[Section(tuple(header), lines)],
        data=data,
        made_by=[benchmark.provenance(args)],
    )
    benchmark.publish(args, page)


if __name__ == "__main__":
    main()
