# SPDX-License-Identifier: Apache-2.0
"""Correctness of the CUDA kernels on a device: `make gpu-check`.

    python scripts/gpu/check.py --out OUT [--kernels triton,cute,flash] [--seconds 420]

It compares random trees, lengths, pages and head shapes with the reference, replays graphs,
compares repeats bit by bit and the step's other kernels with the CPU implementations, and runs
compute-sanitizer on a small case. A kernel that passes gets a record (OUT/NAME_correctness.json).
`--device cpu` is a dry run in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

if "--device=cpu" in sys.argv or "cpu" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"
sys.path[:0] = [str(Path(__file__).parent)]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from partial_caches import check_partial_caches  # noqa: E402
from problems import TREE_KERNELS, Problem, ProblemSpec, unsupported  # noqa: E402
from report import Report  # noqa: E402

from vllm_specplug.kernels import cuda_dispatch  # noqa: E402
from vllm_specplug.tree import DraftTree, build_tree  # noqa: E402

# Limits of ||out - ref|| / ||ref||.
LIMITS = {torch.bfloat16: 8e-3, torch.float16: 1.5e-3, torch.float32: 1e-4}
BF16, FP16 = torch.bfloat16, torch.float16


def specs(device: str) -> list[ProblemSpec]:
    """Returns the fixed cases, the most important first."""
    if device == "cpu":
        small = ProblemSpec(
            ((33, 9), (0, 0), (300, 5)), num_heads=2, num_kv_heads=1, head_dim=16,
            dtype=torch.float32,
        )  # fmt: skip
        return [
            small,
            small.replace(shape="full", dense=True),
            small.replace(skipped=2, shape="chain"),
        ]
    base = ProblemSpec(((100, 16), (1000, 64), (0, 5)))
    edges = tuple((c, 7) for c in (0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257))
    nodes = tuple((77, n) for n in (0, 1, 2, 15, 62, 63, 64, 65, 127, 128, 129, 255, 256))
    cases = [base, base.replace(trees=edges), base.replace(trees=nodes)]
    for head_dim in (64, 96, 128):
        for dtype in (BF16, FP16):
            cases += [
                base.replace(head_dim=head_dim, dtype=dtype, page=p) for p in (16, 32, 64, 128)
            ]
    for heads, kv_heads in ((9, 3), (8, 8), (32, 4), (64, 8), (16, 1), (14, 2)):
        cases += [base.replace(num_heads=heads, num_kv_heads=kv_heads, page=p) for p in (16, 128)]
    for shape in ("tree", "chain", "full"):
        for trees in (((0, 15), (500, 15)), ((4096, 7),), ((33, 70), (64, 3))):
            cases += [base.replace(shape=shape, dense=True, trees=trees, page=p) for p in (16, 64)]
    cases += [
        base.replace(trees=((32000, 64),)),
        base.replace(trees=((32000, 256), (5, 3)), page=128),
    ]
    cases += [base.replace(trees=((4000, 63),) * 4, page=p, skipped=3) for p in (16, 128)]
    cases += [
        base.replace(trees=((700, 31),) * 32),
        base.replace(shape="chain", trees=((5000, 0),) * 9),
    ]
    return cases


def random_spec(rng: random.Random) -> ProblemSpec:
    kv_heads = rng.choice((1, 2, 3, 4, 8))
    count = rng.choice((1, 1, 2, 4, 9))
    dense = rng.random() < 0.25
    longest = rng.choice((3, 70, 600, 5000))
    return ProblemSpec(
        tuple((rng.randint(0, longest), rng.randint(0, rng.choice((4, 40, 256)))) for _ in
              range(count)),
        num_heads=kv_heads * rng.choice((1, 2, 3, 4, 7, 8)),
        num_kv_heads=kv_heads,
        head_dim=rng.choice((64, 96, 128)),
        page=rng.choice((16, 32, 64, 128)),
        dtype=rng.choice((BF16, FP16)),
        shape=rng.choice(("tree", "chain", "full")) if dense else rng.choice(("tree", "chain")),
        dense=dense,
        skipped=rng.choice((0, 0, 3)),
        seed=rng.randint(0, 10**6),
    )  # fmt: skip


class KernelChecks:
    """All checks of one attention kernel."""

    def __init__(self, name: str, report: Report, device: torch.device) -> None:
        self.name, self.report, self.device = name, report, device
        self.run = cuda_dispatch.load_kernel(name)
        self.num_cases = 0
        self.failures: list[str] = []

    def suited(self, spec: ProblemSpec) -> ProblemSpec:
        """Returns the case in the layout that this kernel supports."""
        return spec.replace(adjacent=True) if self.name == "flash" else spec

    def unsupported(self, spec: ProblemSpec) -> str | None:
        if self.name == "flash" and (spec.dense or spec.skipped):
            return "only Triton serves it"
        return unsupported(self.name, spec, self.device)

    def case(self, spec: ProblemSpec) -> None:
        if self.unsupported(spec) is not None:
            return
        spec = self.suited(spec)
        self.num_cases += 1
        try:
            relative, largest = Problem(spec, self.device).error(self.run)
            good = relative <= LIMITS[spec.dtype]
            problem = "" if good else f"relative error {relative:.2g}, largest {largest:.2g}"
        except Exception as error:
            good, problem = False, f"{type(error).__name__}: {str(error)[:300]}"
        if not good:
            self.failures.append(f"{spec.label()}: {problem}")
            self.report.row(kernel=self.name, case=spec.label(), failed=problem)

    def correctness(self, record: dict, fixed: list[ProblemSpec], seconds: float) -> None:
        end = time.monotonic() + seconds
        rng = random.Random(0)
        for number, spec in enumerate(fixed):
            # Triton compiles most cases again, which takes seconds each.
            if self.device.type == "cuda" and time.monotonic() > end + seconds:
                record["fixed_cases_left_out"] = len(fixed) - number
                break
            self.case(spec)
        while (
            time.monotonic() < end and not self.report.is_out_of_time and self.device.type == "cuda"
        ):
            self.case(random_spec(rng))
        record["cases"] = self.num_cases
        record["failures"] = self.failures[:40]
        assert self.num_cases, "no case is supported here"
        assert not self.failures, f"{len(self.failures)} of {self.num_cases} cases differ"

    def races(self, record: dict, spec: ProblemSpec, times: int) -> None:
        """Checks that a call gives the same bits every time, also beside other work."""
        assert self.unsupported(spec) is None, self.unsupported(spec)
        problem = Problem(self.suited(spec), self.device)
        outputs = [torch.empty_like(problem.query, memory_format=torch.contiguous_format)
                   for _ in range(2)]  # fmt: skip
        problem.call(self.run, outputs[0])
        for turn in range(times):
            outputs[1].fill_(float("nan"))
            if turn % 2 and self.device.type == "cuda":
                side = torch.cuda.Stream()
                with torch.cuda.stream(side):
                    torch.randn(1024, 1024, device=self.device) @ torch.randn(
                        1024, 1024, device=self.device
                    )
            problem.call(self.run, outputs[1])
            same = torch.equal(outputs[0][problem.tree_rows], outputs[1][problem.tree_rows])
            assert same, f"turn {turn} differs from the first"
        record["turns"] = times

    def graph(self, record: dict) -> None:
        """Checks that a captured call serves other trees in the same buffers."""
        spec = ProblemSpec(((2000, 40), (5, 3), (700, 64)))
        assert self.unsupported(spec) is None, self.unsupported(spec)
        problem = Problem(self.suited(spec), self.device)
        meta = problem.meta
        if reads_words := self.name in ("flash", "triton"):
            from vllm_specplug.kernels.tree_attn_triton import tree_words
            from vllm_specplug.kernels.tree_words_triton import fill_tree_words

            tree_words(meta)
        output = torch.zeros_like(problem.query, memory_format=torch.contiguous_format)

        def step() -> None:
            if reads_words:
                fill_tree_words(meta.plan, meta.parent_rows, meta.mask_words, meta.max_rows)
            problem.call(self.run, output)

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.synchronize()
        # The graph must make schedules for each plan.
        meta.schedules.clear()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            step()
        for turn in range(4):
            if turn == 1:  # a tree leaves, contexts shrink
                meta.plan[2, 1] = 0
                meta.plan[3] //= 2
            if turn == 2:  # other trees in the same rows
                count = int(meta.plan[2, 0])
                meta.parent_rows[:count] = torch.arange(-1, count - 1, device=self.device)
            if turn == 3:  # other queries
                problem.query.copy_(torch.randn_like(problem.query))
            output.fill_(7.0)
            captured.replay()
            expected = problem.expected()
            live = torch.cat([
                torch.arange(int(s), int(s) + int(n), device=self.device)
                for s, n in zip(meta.plan[1], meta.plan[2], strict=True) if int(n)
            ])  # fmt: skip
            error = (output[live].float() - expected[live]).norm() / expected[live].norm()
            assert float(error) <= LIMITS[spec.dtype], f"turn {turn}: {float(error):.2g}"
            output[live] = 7.0
            assert bool((output == 7.0).all()), f"turn {turn}: a row of no tree was written"
        record["replays"] = 4


def accepted_path(tree: DraftTree, samples: np.ndarray) -> list[int]:
    """Returns the nodes that the walk accepts; `samples` has the root's, then each node's."""
    path: list[int] = []
    node = -1
    while (child := tree.child_of(node, int(samples[node + 1]))) is not None:
        path.append(child)
        node = child
    return path


def check_step_kernels(record: dict, device: torch.device) -> None:
    """Compares words, compaction, builder and walk with the CPU implementations."""
    from vllm_specplug.kernels import ancestor_words
    from vllm_specplug.kernels.kv_compact_triton import LayerCaches, compact_paths_triton
    from vllm_specplug.kernels.step_trees_triton import walk_trees_triton
    from vllm_specplug.kernels.tree_builder_triton import build_best_first_triton
    from vllm_specplug.kernels.tree_words_triton import fill_tree_words

    rng = np.random.default_rng(0)
    big = device.type == "cuda"
    batch, depth, width, budget = (16, 16, 8, 200) if big else (2, 4, 3, 9)
    turns = 5 if big else 1
    for turn in range(turns):
        log_probs = torch.randn(batch, depth, width).log_softmax(-1).sort(-1, descending=True)[0]
        ids = torch.stack([torch.randperm(5000)[: depth * width] for _ in range(batch)])
        ids = ids.view(batch, depth, width)
        budgets = torch.from_numpy(rng.integers(1, budget + 1, batch).astype(np.int32))
        depths = torch.from_numpy(rng.integers(1, depth + 1, batch).astype(np.int32))
        built = build_best_first_triton(
            *(t.to(device) for t in (ids, log_probs, budgets, depths)), width, budget
        )
        tokens, parents, node_depths, scores, counts = (t.cpu().numpy() for t in built)
        trees = []
        for r in range(batch):
            n = int(counts[r])
            tree = DraftTree(tokens[r, :n], parents[r, :n], node_depths[r, :n], scores[r, :n])
            wanted = build_tree(
                ids[r].numpy(), log_probs[r].numpy(), int(budgets[r]),
                tree_width=width, tree_depth=int(depths[r]),
            )  # fmt: skip
            assert n == wanted.num_nodes, (turn, r, n, wanted.num_nodes)
            for name in ("token_ids", "parent_indices", "depths", "scores"):
                assert np.array_equal(getattr(tree, name), getattr(wanted, name)), (turn, r, name)
            trees.append(tree)

        rows = [t.num_nodes + 1 for t in trees]
        starts = np.cumsum([0, *rows]).astype(np.int32)
        flat_parents = torch.from_numpy(
            np.concatenate([np.concatenate([[-1], t.parent_indices + 1]) for t in trees])
        ).int()
        plan = torch.zeros(5, batch, dtype=torch.int32)
        plan[2], plan[4] = torch.tensor(rows), torch.from_numpy(starts[:-1])
        words = torch.zeros(int(starts[-1]), -(-max(rows) // 64), dtype=torch.int64, device=device)
        fill_tree_words(plan.to(device), flat_parents.to(device), words, max(rows))
        assert torch.equal(words.cpu(), ancestor_words([t.parent_indices for t in trees]))

        samples = rng.integers(0, 5000, int(starts[-1]))
        for tree, start in zip(trees, starts, strict=False):
            for row in range(tree.num_nodes + 1):
                children = np.flatnonzero(tree.parent_indices == row - 1)
                if len(children) and rng.random() < 0.8:
                    samples[start + row] = tree.token_ids[rng.choice(children)]
        wanted_paths = [accepted_path(t, samples[s:]) for t, s in zip(trees, starts, strict=False)]
        flat_tokens = np.concatenate([np.concatenate([[-5], t.token_ids]) for t in trees])
        # In the walk a parent is a row of all trees.
        parent_rows = flat_parents + torch.from_numpy(np.repeat(starts[:-1], rows))
        parent_rows[torch.from_numpy(starts[:-1]).long()] = -1
        emitted, _, lengths, paths = walk_trees_triton(
            torch.from_numpy(samples).to(device), torch.from_numpy(flat_tokens).to(device),
            parent_rows.to(device), torch.from_numpy(starts).to(device), budget + 1,
        )  # fmt: skip
        for r, length in enumerate(lengths.tolist()):
            path = wanted_paths[r]
            assert paths[r, :length].tolist() == path, (turn, r)
            wanted_tokens = [samples[starts[r] + 1 + node] for node in (-1, *path)]
            assert emitted[r, : length + 1].tolist() == wanted_tokens, (turn, r)

        page, heads, dim, layers = (16, 8, 128, 36) if big else (8, 2, 8, 2)
        contexts = rng.integers(0, 300, batch)
        blocks = -(-(300 + max(rows)) // page)
        table = torch.from_numpy(
            rng.permutation(batch * blocks).astype(np.int32).reshape(batch, blocks)
        )
        caches = [
            torch.randn(batch * blocks, page, heads, 2 * dim, device=device).bfloat16()
            for _ in range(layers)
        ]
        expected = [c.clone() for c in caches]
        moves = [
            tuple(
                int(row[(context + 1 + index) // page]) * page + (context + 1 + index) % page
                for index in (node, place)
            )
            for path, context, row in zip(wanted_paths, contexts.tolist(), table, strict=True)
            for place, node in enumerate(path)
            if place != node
        ]
        for cache, before in zip(expected, caches, strict=True):
            flat, unmoved = (c.view(-1, heads, 2 * dim) for c in (cache, before))
            for source, target in moves:
                flat[target] = unmoved[source]
        compact_paths_triton(
            LayerCaches.of([tuple(c.split(dim, dim=-1)) for c in caches]),
            paths, lengths, torch.from_numpy(contexts.astype(np.int32)).to(device),
            torch.arange(batch, device=device), table.to(device),
        )  # fmt: skip
        for cache, want in zip(caches, expected, strict=True):
            assert torch.equal(cache, want), turn
        record["moves"] = record.get("moves", 0) + len(moves)


# The interpreter and torch start within this.
_LEAST_SANITIZER_S = 15.0


def sanitize(record: dict, kernel: str, seconds: float) -> None:
    """compute-sanitizer's memory checker over a few small cases."""
    tool = shutil.which("compute-sanitizer")
    if tool is None or seconds < _LEAST_SANITIZER_S:
        reason = "not installed" if tool is None else f"{seconds:.0f} s are left for it"
        record.update(status="skipped", reason=reason)
        return
    command = [tool, "--tool", "memcheck", "--error-exitcode", "9", "--launch-timeout", "0"]
    command += [sys.executable, __file__, "--small", kernel]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        record.update(status="skipped", reason=f"not done in {seconds:.0f} s")
        return
    text = run.stdout + run.stderr
    record["tail"] = text[-1500:]
    assert run.returncode == 0, f"exit {run.returncode}: {text[-400:]}"
    assert "small cases pass" in text


def small(kernel: str) -> int:
    """Runs the small cases for compute-sanitizer."""
    device = torch.device("cuda")
    trees = ((40, 9), (0, 0), (300, 70))
    base = ProblemSpec(trees, num_heads=4, num_kv_heads=1, adjacent=kernel == "flash")
    for spec in (base, base.replace(page=128), base.replace(dense=True, shape="full")):
        relative, _ = Problem(spec, device).error(cuda_dispatch.load_kernel(kernel))
        assert relative <= LIMITS[spec.dtype], (spec.label(), relative)
    print("small cases pass")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/gpu-check"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--kernels", default=",".join(TREE_KERNELS))
    parser.add_argument("--seconds", type=float, default=420, help="limit of the whole run")
    parser.add_argument("--small", metavar="KERNEL", help="only the cases for compute-sanitizer")
    args = parser.parse_args()
    if args.small:
        return small(args.small)
    device = torch.device(args.device)
    on_gpu = device.type == "cuda"
    report = Report(args.out, "gpu_check", args.seconds)
    kernels = args.kernels.split(",")
    share = args.seconds / len(kernels)
    fixed = specs(args.device)
    checked = {}
    for name in kernels:
        with report.part(f"{name}: self-test") as record:
            why = unsupported(name, fixed[0], device)
            if why is not None:
                record.update(status="skipped", reason=why)
                continue
            shape = cuda_dispatch.KernelShape(
                fixed[0].head_dim, fixed[0].dtype, fixed[0].page, fixed[0].num_heads,
                fixed[0].num_kv_heads,
            )  # fmt: skip
            record["problem"] = cuda_dispatch.self_test_failure(name, shape, device)
            assert record["problem"] is None, record["problem"]
        checks = None
        with report.part(f"{name}: correctness") as record:
            checks = KernelChecks(name, report, device)
            checks.correctness(record, fixed, 0.35 * share)
        if checks is None:
            continue
        checked[name] = checks
        with report.part(f"{name}: races") as record:
            checks.races(record, fixed[0], 300 if on_gpu else 2)
        if on_gpu:
            with report.part(f"{name}: races, split context") as record:
                checks.races(record, fixed[0].replace(trees=((32000, 64),)), 100)
            with report.part(f"{name}: graph replay") as record:
                checks.graph(record)
    with report.part("words, builder, walk, compaction") as record:
        check_step_kernels(record, device)
    with report.part("partial caches") as record:
        check_partial_caches(record, device)
    # Sanitizers are slow, so they share the remaining time.
    for number, (name, checks) in enumerate(checked.items() if on_gpu else ()):
        with report.part(f"{name}: sanitizer") as record:
            sanitize(record, name, report.seconds_left / (len(checked) - number))
        parts = {k: v for k, v in report.data["parts"].items() if k.startswith(name + ":")}
        # A missing sanitizer or one without time is not a failure.
        result = {
            "kernel": name,
            "passed": all(p["status"] in ("ok", "skipped") for p in parts.values()),
            "capability": report.data["hardware"].get("capability"),
            "cases": checks.num_cases,
            **{k: report.data[k] for k in ("command", "commit", "date", "versions", "hardware")},
        }
        (args.out / f"{name}_correctness.json").write_text(json.dumps(result, indent=1))
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
