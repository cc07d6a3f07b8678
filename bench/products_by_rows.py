# SPDX-License-Identifier: Apache-2.0
"""Products of a target by rows: vLLM's kernels and the packed ones, in turns on one core.

python bench/products_by_rows.py [--out FOLDER]
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

from harness import Benchmark
from interleave import confine_process

from vllm_specplug.bench.result_page import ResultPage, Section

# (N, K) of the products of a layer of SmolLM2-135M.
SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))
LAYERS, GROUP = 30, 32
ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 64, 128, 256)
FORMATS = ("bfloat16", "4 bits", "8 bits")


def make_products() -> dict[str, list[Callable]]:
    import torch
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    from vllm_specplug.kernels.packed_linear import (
        PackedInt8Linear,
        pack_int4,
        pack_int8,
        pack_linear,
        packed_int4_linear,
        packed_linear,
    )

    made: dict[str, list[Callable]] = {
        f"{bits}, {whose}": [] for bits in FORMATS for whose in ("vLLM", "packed")
    }

    def add(columns: int, depth: int) -> None:
        full = (torch.randn(columns, depth) * 0.05).bfloat16()
        weight = pack_linear(full)
        layer = torch.nn.Module()
        layer.weight = torch.nn.Parameter(full, requires_grad=False)
        dispatch_cpu_unquantized_gemm(layer, True)
        made["bfloat16, vLLM"].append(lambda x: layer.cpu_linear(x, layer.weight, None))
        made["bfloat16, packed"].append(lambda x: packed_linear(x, weight, columns))
        scales = (torch.rand(columns, depth // GROUP) * 0.01).bfloat16()
        words = torch.randint(-(2**31), 2**31 - 1, (columns // 16, depth * 2), dtype=torch.int32)
        by_group = scales.t().contiguous()
        made["4 bits, vLLM"].append(
            lambda x: ops.cpu_gemm_wna16(x, words, by_group, None, None, 8, "vec")
        )
        codes = pack_int4(torch.randint(0, 16, (columns, depth), dtype=torch.uint8), scales)
        made["4 bits, packed"].append(lambda x: packed_int4_linear(x, codes))
        rounded = torch.randint(-127, 128, (columns, depth), dtype=torch.int8)
        by_column = torch.rand(columns)
        handle = ops.create_onednn_scaled_mm(
            rounded.t(), by_column, torch.bfloat16, True, False, 32
        )

        def vllm_int8(x):
            inputs, input_scales, _ = ops.onednn_scaled_int8_quant(x)
            out = torch.empty((len(x), columns), dtype=x.dtype)
            ops.onednn_scaled_mm(handle, inputs, out, input_scales, None, None, None)

        vllm_int8.kept = by_column
        made["8 bits, vLLM"].append(vllm_int8)
        made["8 bits, packed"].append(PackedInt8Linear(pack_int8(rounded, by_column), None))

    for _ in range(LAYERS):
        for shape in SHAPES:
            add(*shape)
    return made


def main() -> None:
    benchmark = Benchmark("products_by_rows", __doc__, runs_vllm=False)
    args = benchmark.parse()
    confine_process()
    import torch
    from vllm.platforms import current_platform

    current_platform.import_kernels()

    products = make_products()
    table, data = [], []
    for rows in ROWS:
        inputs = {depth: torch.randn(rows, depth).bfloat16() for _, depth in SHAPES}
        times: dict[str, list[float]] = {name: [] for name in products}
        for _ in range(9 if rows < 24 else 4):
            for name, layers in products.items():
                began = time.process_time()
                for (_, depth), multiply in zip(SHAPES * LAYERS, layers, strict=True):
                    multiply(inputs[depth])
                times[name].append(1e3 * (time.process_time() - began))
        of = {name: median(found[1:]) for name, found in times.items()}
        spread = {name: (min(found[1:]), max(found[1:])) for name, found in times.items()}
        data.append({"rows": rows, "ms": of, "spread": spread})
        table.append(
            [f"{rows}", *(f"{of[name]:.2f} ({spread[name][0]:.2f} to {spread[name][1]:.2f})"
                     for name in products),
             *(f"{of[f'{bits}, vLLM'] / of[f'{bits}, packed']:.2f} x"
               for bits in FORMATS)]
        )  # fmt: skip
        print(table[-1], flush=True)
    benchmark.publish(
        args,
        ResultPage(
            name="products_by_rows",
            title="Products of a target by rows",
            about="The products of the 30 layers of SmolLM2-135M in one forward on one core, with "
            "random weights, in turns; medians of 8, from 24 rows on of 3, lowest and highest in "
            "brackets, in CPU milliseconds. A weight is read from memory each time. 4 bits: "
            "symmetric, groups of 32 inputs. 8 bits: weights by output, inputs by token.",
            sections=[
                Section(
                    ("rows", *(f"{name} (ms)" for name in products),
                     *(f"{bits} faster by" for bits in FORMATS)),
                    table,
                )
            ],
            data=data,
            made_by=[benchmark.provenance(args)],
        ),
    )  # fmt: skip


if __name__ == "__main__":
    main()
