# SPDX-License-Identifier: Apache-2.0
"""Tree attention beside its baselines on a device: `make gpu-bench`.

    python bench/gpu/kernels.py --out OUT [--seconds 500] [--kernels triton,cute]

It times one layer of Qwen3-8B (32 query heads, 8 KV heads, head size 128, bf16, pages of 16) with
context 1k-32k, batch 1-32 and trees of 16-256 nodes, by graph replays over several caches, so that
L2 holds none. Rates of reading keys and values once are relative to a measured copy.

Baselines run if they are installed: a chain of equal length with the same kernel and with FA3, FA3
over the context plus a tail kernel and a merge, vLLM's unified_attention with qq_bias, FlashInfer's
custom mask. Missing and failing ones are recorded.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path

if "cpu" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts" / "gpu"), str(Path(__file__).parent)]

import torch  # noqa: E402
from baselines import BASELINES, Unavailable  # noqa: E402
from problems import TREE_KERNELS, Problem, ProblemSpec, unsupported  # noqa: E402
from report import Report  # noqa: E402
from timing import copy_bandwidth, product_rate, time_us  # noqa: E402

from vllm_specplug.kernels import cuda_dispatch  # noqa: E402

# Bytes of keys and values, more than any cache.
WORKING_SET = 256 * 2**20
MAX_COPIES = 24
# Of single requests.
CONTEXTS = (1024, 4096, 8192, 16384, 32768)
NODES = (15, 31, 63, 64, 127, 255)


# (context, batch, nodes)
Point = tuple[int, int, int]


def compared() -> list[Point]:
    """Returns the points at which trees are compared with chains and baselines."""
    cells = [(c, b, n) for n in (64, 16, 256) for b in (1, 8, 4, 32) for c in (1024, 4096, 16384)]
    cells += [(32768, b, n) for n in (64, 256) for b in (1, 4, 8)]
    cells += [(32768, 1, n) for n in (15, 31, 63)]
    return [*cells, (32768, 4, 15), (32768, 4, 31)]


def grid(quick: bool) -> list[Point]:
    """Returns all points, the most important first."""
    if quick:
        return [(40, 2, 5)]
    single = [(c, 1, n) for c in CONTEXTS for n in NODES]

    def order(cell: Point) -> tuple[bool, bool, bool]:
        """Sort key: targets are for 64 nodes, batch 1 to 8 and a context of 32k."""
        context, batch, nodes = cell
        return nodes not in (63, 64) or batch > 8, cell not in single, context != 32768

    return sorted(dict.fromkeys([*compared(), *single]), key=order)


class Cell:
    """A point of the grid with several copies of its data."""

    def __init__(self, spec: ProblemSpec, device: torch.device) -> None:
        copies = 1
        if device.type == "cuda":
            copies = max(1, min(MAX_COPIES, -(-WORKING_SET // spec.kv_bytes)))
        self.spec, self.device = spec, device
        self.problems = [Problem(spec.replace(seed=i, poison=False), device) for i in range(copies)]
        for problem in self.problems:
            # Ancestor words are made once per step, so they are not timed.
            self._words(problem)
        self.outputs = [
            torch.empty_like(p.query, memory_format=torch.contiguous_format) for p in self.problems
        ]

    @staticmethod
    def _words(problem: Problem) -> None:
        from vllm_specplug.kernels.tree_attn_triton import tree_words

        tree_words(problem.meta)

    def time(self, run) -> float:
        calls = [
            lambda p=p, o=o: p.call(run, o)
            for p, o in zip(self.problems, self.outputs, strict=True)
        ]
        return time_us(calls, self.device)

    def time_baseline(self, make: Callable) -> float:
        calls = [make(p) for p in self.problems]
        return time_us(calls, self.device)


def measure(args, report: Report, device: torch.device) -> None:
    bandwidth = copy_bandwidth(device)
    report.data["copy_bandwidth"] = bandwidth
    report.data["product_rate"] = product_rate(device)
    print(f"   copy: {bandwidth / 1e12:.2f} TB/s, "
          f"product: {report.data['product_rate'] / 1e12:.0f} TFLOP/s", flush=True)  # fmt: skip
    missing: dict[str, str] = {}
    report.data["missing"] = missing
    quick = device.type == "cpu"
    for context, batch, nodes in grid(quick):
        # At other points only trees run.
        compares = quick or (context, batch, nodes) in compared()
        if report.is_out_of_time:
            report.data["cut_short"] = True
            print("   no time left")
            break
        base = ProblemSpec(((context, nodes),) * batch, page=args.page, adjacent=True)
        if quick:
            base = base.replace(num_heads=2, num_kv_heads=1, head_dim=16, dtype=torch.float32)
        point = {"context": context, "batch": batch, "nodes": nodes, "page": args.page}
        try:
            tree, chain = (Cell(base.replace(shape=s), device) for s in ("tree", "chain"))
        except torch.cuda.OutOfMemoryError:
            report.row(**point, failed="out of memory")
            torch.cuda.empty_cache()
            continue
        for name in args.kernels.split(","):
            reason = unsupported(name, base, device)
            if reason is not None:
                if name not in missing:
                    missing[name] = reason
                    report.row(kernel=name, missing=reason)
                continue
            for kind, cell in (("tree", tree), ("chain", chain))[: 1 + compares]:
                label = f"{name} {kind}"
                if label in missing:
                    continue
                try:
                    us = cell.time(cuda_dispatch.load_kernel(name))
                except Exception as error:
                    missing[label] = f"{type(error).__name__}: {str(error)[:300]}"
                    report.row(**point, kernel=label, failed=missing[label])
                    continue
                rate = base.kv_bytes / (us * 1e-6)
                report.row(
                    **point, kernel=label, us=us, gb_per_s=rate / 1e9, of_copy=rate / bandwidth
                )
        for name, make in BASELINES.items():
            if name in missing or quick or not compares:
                continue
            try:
                us = (chain if "chain" in name else tree).time_baseline(make)
            except Unavailable as error:
                missing[name] = str(error)
                report.row(kernel=name, missing=str(error))
            except Exception as error:
                missing[name] = f"{type(error).__name__}: {str(error)[:300]}"
                report.row(**point, kernel=name, failed=missing[name])
            else:
                rate = base.kv_bytes / (us * 1e-6)
                report.row(
                    **point, kernel=name, us=us, gb_per_s=rate / 1e9, of_copy=rate / bandwidth
                )
        del tree, chain
        if device.type == "cuda":
            torch.cuda.empty_cache()


def check_baselines(report: Report, device: torch.device) -> None:
    """Compares baselines with the reference."""
    spec = ProblemSpec(((700, 33), (700, 33)), poison=False)
    for name, make in BASELINES.items():
        if "chain" in name:
            problem = Problem(spec.replace(shape="chain"), device)
        else:
            problem = Problem(spec, device)
        try:
            call = make(problem)
            call()
            got = call.output if hasattr(call, "output") else None
        except Exception as error:
            report.row(baseline=name, unavailable=f"{type(error).__name__}: {str(error)[:200]}")
            continue
        if got is None:
            continue
        expected = problem.expected()[problem.tree_rows]
        error = (got.float() - expected).norm() / expected.norm()
        report.row(baseline=name, relative_error=float(error))


def sweep_options(name: str) -> list[dict[str, int]]:
    """Returns arguments of kernel `name` to compare with its own choice."""
    splits = "context_splits" if name == "flash" else "splits"
    return [{splits: n} for n in (1, 2, 4, 8, 16, 32)]


def sweeps(args, report: Report, device: torch.device) -> None:
    """Times numbers of splits, to check the kernels' choices."""
    on_gpu = device.type == "cuda"
    for context, batch in ((4096, 1), (32768, 1), (4096, 8)) if on_gpu else ((40, 1),):
        spec = ProblemSpec(((context, 64),) * batch, page=args.page, adjacent=True)
        if not on_gpu:
            spec = spec.replace(num_heads=2, num_kv_heads=1, head_dim=16, dtype=torch.float32)
        cell = Cell(spec, device)
        for name in args.kernels.split(","):
            if unsupported(name, spec, device) is not None:
                continue
            options = sweep_options(name)
            for option in options if on_gpu else options[:1]:
                if report.is_out_of_time:
                    return
                run = functools.partial(cuda_dispatch.load_kernel(name), **option)
                point = {"sweep": name, "context": context, "batch": batch, **option}
                try:
                    report.row(**point, time_us=cell.time(run))
                except Exception as error:
                    report.row(**point, failed=f"{type(error).__name__}: {str(error)[:200]}")


def step_kernels(report: Report, device: torch.device) -> None:
    """Times the other kernels of a step."""
    from vllm_specplug.kernels.kv_compact_triton import LayerCaches, compact_paths_triton
    from vllm_specplug.kernels.tree_builder_triton import build_best_first_triton
    from vllm_specplug.kernels.tree_words_triton import fill_tree_words

    big = device.type == "cuda"
    for batch in (1, 8, 32) if big else (1,):
        for nodes in (16, 64, 256) if big else (5,):
            log_probs = torch.randn(batch, 16, 8, device=device).log_softmax(-1)
            log_probs = log_probs.sort(-1, descending=True)[0]
            ids = torch.randint(0, 1000, (batch, 16, 8), device=device)
            budgets = torch.full((batch,), nodes, dtype=torch.int32, device=device)
            depths = torch.full((batch,), 16, dtype=torch.int32, device=device)
            us = time_us(
                [lambda: build_best_first_triton(ids, log_probs, budgets, depths, 8, nodes)],  # noqa: B023
                device,
            )
            report.row(kernel="build_best_first", batch=batch, nodes=nodes, us=us)
            problem = Problem(ProblemSpec(((64, nodes),) * batch), device)
            meta = problem.meta
            words = torch.zeros(
                meta.parent_rows.numel(), -(-(nodes + 1) // 64), dtype=torch.int64, device=device
            )
            us = time_us(
                [lambda: fill_tree_words(meta.plan, meta.parent_rows, words, nodes + 1)],  # noqa: B023
                device,
            )
            report.row(kernel="tree_words", batch=batch, nodes=nodes, us=us)
        depth, page, layers = (8, 16, 36) if big else (2, 16, 1)
        blocks = 32
        caches = [
            torch.randn(batch * blocks, page, 8, 256, device=device).bfloat16()
            for _ in range(layers)
        ]
        table = torch.arange(batch * blocks, device=device, dtype=torch.int32).view(batch, -1)
        paths = (torch.arange(depth, device=device, dtype=torch.int32) * 3 + 1).repeat(batch, 1)
        full = torch.full((batch,), depth, dtype=torch.int32, device=device)
        bound = LayerCaches.of([tuple(c.split(128, dim=-1)) for c in caches])
        rows = torch.arange(batch, device=device)
        us = time_us(
            [lambda: compact_paths_triton(bound, paths, full, full * 5, rows, table)],  # noqa: B023
            device,
        )
        report.row(kernel=f"compact {layers} layers", batch=batch, moves=batch * depth, us=us)


def summarise(report: Report) -> None:
    """Writes a table of the results."""
    times: dict[tuple, dict[str, float]] = {}
    rates: dict[tuple, dict[str, float]] = {}
    for row in report.data["rows"]:
        if "us" in row and "context" in row:
            key = (row["context"], row["batch"], row["nodes"])
            times.setdefault(key, {})[row["kernel"]] = row["us"]
            rates.setdefault(key, {})[row["kernel"]] = row["of_copy"]
    columns = ["context", "batch", "nodes", "kernel", "tree µs", "tree/chain", "of copy"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for key in sorted(times):
        at = times[key]
        for name in TREE_KERNELS:
            tree, chain = at.get(f"{name} tree"), at.get(f"{name} chain")
            if tree is None:
                continue
            values = [
                *key,
                name,
                f"{tree:.1f}",
                f"{tree / chain:.3f}" if chain else "-",
                f"{rates[key][f'{name} tree']:.2f}",
            ]
            lines.append(f"| {' | '.join(map(str, values))} |")
    header = [f"Command: `{report.data['command']}`", f"Commit: {report.data['commit']}",
              f"Hardware: {report.data['hardware']}", f"Versions: {report.data['versions']}",
              f"Copy: {report.data.get('copy_bandwidth', 0) / 1e12:.2f} TB/s",
              f"Left out: {report.data.get('missing')}", ""]  # fmt: skip
    report.path.with_suffix(".md").write_text(
        "\n".join([*(f"- {h}" if h else h for h in header), *lines]) + "\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/gpu-bench"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--kernels", default=",".join(TREE_KERNELS))
    parser.add_argument("--page", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=480)
    args = parser.parse_args()
    device = torch.device(args.device)
    report = Report(args.out, f"gpu_kernels_page{args.page}", args.seconds)
    if device.type == "cuda":
        with report.part("baselines agree with the reference"):
            check_baselines(report, device)
    with report.part("words, builder, compaction"):
        step_kernels(report, device)
    with report.part("grid"):
        measure(args, report, device)
    with report.part("sweeps"):
        sweeps(args, report, device)
    with report.part("table"):
        summarise(report)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
