# SPDX-License-Identifier: Apache-2.0
"""Milliseconds of an 8B model's matrix products by rows: `python bench/gpu/products.py`.

It times the products of all 36 layers and the LM head in bfloat16, and those of its JetSpec head in
bfloat16 and e4m3, replayed from a graph with weights that no cache holds. They show the cost of a
tree's rows, and where another tile begins.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "scripts" / "gpu")]

from report import Report  # noqa: E402
from timing import copy_bandwidth, product_rate, time_us  # noqa: E402

from vllm_specplug.kernels.fp8_linear import TORCH_PRODUCT, Fp8Linear  # noqa: E402

LAYERS, DRAFT_LAYERS = 36, 5
# (in, out) of the products of a layer and of the LM head
LAYER = {"qkv": (4096, 6144), "o": (4096, 4096), "gate_up": (4096, 24576), "down": (12288, 4096)}
LM_HEAD = (4096, 151936)
ROWS = [1, 2, 4, 8, 16, 17, 24, 32, 33, 48, 64, 65, 96, 128, 129, 192, 256, 257, 384, 512, 513,
        640, 768, 1024]  # fmt: skip
DRAFT_ROWS = [16, 64, 128, 256, 512]
COPIES = 4


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/gpu-products"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=60)
    args = parser.parse_args()
    report = Report(args.out, "gpu_products", args.seconds)
    device = torch.device(args.device)
    shrink = 1 if args.device == "cuda" else 64

    def weights(shape: tuple[int, int], copies: int) -> list[torch.Tensor]:
        size = [n // shrink // 16 * 16 for n in shape[::-1]]
        return [torch.randn(size, device=device).bfloat16() / 64 for _ in range(copies)]

    with report.part("ceilings"):
        report.row(copy_bytes_per_s=copy_bandwidth(device), product_flops=product_rate(device))
    with report.part("products"):
        layer = {name: weights(shape, COPIES) for name, shape in LAYER.items()}
        head = weights(LM_HEAD, 1)
        for rows in ROWS:
            times = {}
            for name, copies in [*layer.items(), ("lm_head", head)]:
                inputs = torch.randn(rows, copies[0].shape[1], device=device).bfloat16()
                calls = [partial(torch.nn.functional.linear, inputs, w) for w in copies]
                times[name] = time_us(calls, device, budget_s=0.03)
            layers_ms = LAYERS * sum(times[name] for name in LAYER) / 1e3
            report.row(rows=rows, ms=layers_ms + times["lm_head"] / 1e3, layers_ms=layers_ms,
                       **{f"{name}_us": us for name, us in times.items()})  # fmt: skip
    multiply: Callable[..., torch.Tensor] = TORCH_PRODUCT
    if args.device == "cuda":
        from vllm._custom_ops import cutlass_scaled_mm as multiply

    with report.part("draft products"):
        kinds: dict[str, Callable[[torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]] = {
            "bfloat16": lambda weight: partial(torch.nn.functional.linear, weight=weight),
            "e4m3": lambda weight: Fp8Linear(weight, None, multiply),
        }
        for kind, make in kinds.items():
            products = {
                name: [make(weight) for weight in copies]
                for name, copies in [*layer.items(), ("lm_head", head)]
            }
            for rows in DRAFT_ROWS:
                times = {}
                for name, copies in products.items():
                    size = layer.get(name, head)[0].shape[1]
                    inputs = torch.randn(rows, size, device=device).bfloat16()
                    calls = [partial(product, inputs) for product in copies]
                    times[name] = time_us(calls, device, budget_s=0.03)
                layers_ms = DRAFT_LAYERS * sum(times[name] for name in LAYER) / 1e3
                report.row(kind=kind, rows=rows, ms=layers_ms + times["lm_head"] / 1e3,
                           layers_ms=layers_ms,
                           **{f"{name}_us": us for name, us in times.items()})  # fmt: skip
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
