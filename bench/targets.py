# SPDX-License-Identifier: Apache-2.0
"""Trees beside plain decoding where the target is served otherwise than in bfloat16 alone.

    python bench/targets.py --data PROMPTS --kind lora [--concurrency 1 4 8] [--rounds 2]

Both sides serve the same target in the same way. The head was trained for the bare bfloat16 target.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harness import BASELINE, HEADS, Benchmark, Cells
from interleave import Load
from speeds import ABOUT, add_load_flags, make_loads, speed_tables

from vllm_specplug.bench.result_page import ResultPage
from vllm_specplug.targets import cache_dir

SYSTEMS: dict[str, dict[str, Any] | None] = {
    BASELINE: None,
    "ngram_tree": {"method": "ngram_tree"},
    "jetspec": {"method": "jetspec", "model": str(HEADS / "smollm2-135m-jetspec")},
}
RANK = 16


@dataclass(frozen=True)
class Kind:
    """A way to serve the target."""

    title: str
    about: str
    engine: dict[str, Any] = field(default_factory=dict)
    adapters: int = 0
    int8: bool = False


KINDS = {
    "float16": Kind("A float16 target", "The target is float16.", {"dtype": "float16"}),
    "fp8_cache": Kind("An fp8 KV cache", "The KV cache is fp8.", {"kv_cache_dtype": "fp8"}),
    "lora": Kind(
        "LoRA adapters",
        f"Every other prompt is answered with one of two random LoRA adapters of rank {RANK} on "
        "all attention and MLP matrices, small enough for sensible answers.",
        {"enable_lora": True, "max_loras": 3, "max_lora_rank": RANK},
        adapters=2,
    ),
    "int8": Kind(
        "An int8 target",
        "The target's matrices are int8 by output channel, inputs are rounded to int8 by token.",
        int8=True,
    ),
}


def make_adapter(folder: Path, target: Path, seed: int) -> Path:
    """A random adapter in PEFT's files; its products are about 3 % of the matrices'."""
    import torch
    from safetensors.torch import load_file, save_file

    folder.mkdir(parents=True, exist_ok=True)
    draw, tensors, modules = torch.Generator().manual_seed(seed), {}, set()
    for name, weight in load_file(target / "model.safetensors").items():
        path = name.removesuffix(".weight")
        if not path.endswith("_proj"):
            continue
        rows, columns = weight.shape
        modules.add(path.rpartition(".")[2])
        size = 0.03 * float(weight.float().std()) * columns**0.5 / RANK**0.5
        key = f"base_model.model.{path}"
        a = torch.randn(RANK, columns, generator=draw) / columns**0.5
        tensors[f"{key}.lora_A.weight"] = a
        tensors[f"{key}.lora_B.weight"] = torch.randn(rows, RANK, generator=draw) * size
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "bias": "none",
              "target_modules": sorted(modules)}  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def adapter_requests(target: str, count: int) -> Sequence[Any]:
    """What the prompts take in turn: an adapter, the bare target, another adapter, .."""
    if not count:
        return (None,)
    from vllm.lora.request import LoRARequest

    folder = cache_dir() / "bench-adapters"
    requests: list[Any] = []
    for number in range(1, count + 1):
        name = f"adapter-{number}"
        path = make_adapter(folder / name, Path(target), number)
        requests += [LoRARequest(name, number, str(path)), None]
    return requests


def make_int8(target: str) -> str:
    """A copy of the target whose matrices are int8, in the compressed-tensors format."""
    import torch
    from safetensors.torch import load_file, save_file

    source, folder = Path(target), cache_dir() / "bench-int8"
    shutil.copytree(source, folder, dirs_exist_ok=True)
    tensors = load_file(source / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        weight = tensors[name].float()
        scale = weight.abs().amax(1, keepdim=True) / 127
        tensors[name] = (weight / scale).round().clamp(-127, 127).to(torch.int8)
        tensors[name.replace("weight", "weight_scale")] = scale
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    numbers = {"num_bits": 8, "type": "int", "symmetric": True}
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**numbers, "strategy": "channel", "dynamic": False},
                "input_activations": {**numbers, "strategy": "token", "dynamic": True},
            }
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def loads_of(kind: Kind, args: Any, target: str) -> list[Load]:
    adapters = adapter_requests(target, kind.adapters)
    return [replace(load, adapters=adapters) for load in make_loads(args, target)]


def page(name: str, kind: Kind, cells: Cells) -> ResultPage:
    sections, data = speed_tables(cells)
    return ResultPage(
        name=name,
        title=f"{kind.title}: trees beside plain decoding",
        about=f"{ABOUT} {kind.about} Plain decoding serves the same target in the same way; drafts "
        "are made with their defaults.",
        sections=sections,
        data=data,
        made_by=[cell["provenance"] for cell in cells],
    )


def main() -> None:
    benchmark = Benchmark("targets", __doc__)
    benchmark.add_comparison_flags(minutes=6.0, rounds=2, tokens=64)
    benchmark.parser.add_argument("--kind", choices=list(KINDS), default="lora")
    add_load_flags(benchmark.parser)
    args = benchmark.parse()
    kind = KINDS[args.kind]
    benchmark.name = f"target_{args.kind}"
    if not args.report_only:
        benchmark.compare(
            args, SYSTEMS,
            lambda target: loads_of(kind, args, target),
            engine={"max_num_seqs": 8, **kind.engine},
            sampling={"max_tokens": args.tokens},
            prepare=make_int8 if kind.int8 else lambda target: target,
        )  # fmt: skip
    benchmark.publish(args, page(benchmark.name, kind, benchmark.cells(args)))


if __name__ == "__main__":
    main()
