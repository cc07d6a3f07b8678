# SPDX-License-Identifier: Apache-2.0
"""Every method against plain decoding on a device, with the demo target and the shipped heads.

    python scripts/gpu/lossless.py --out OUT [--jobs 8] [--only 'NAME;..'] [--seconds 240]

Engines run side by side in separate processes, so times mean nothing. In float32, greedy and seeded
tokens must be those of plain decoding. In bfloat16 near ties round differently, and the share of
equal tokens is reported. A method without accepted drafts fails.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT)]

from report import Report  # noqa: E402

HEADS = ROOT / "heads"
TEXTS = (
    "Explain photosynthesis to a child in a few sentences.",
    "Write a Python function that returns the prime numbers below n.",
    "A shop sells pens for 3 dollars. Ann buys 12 and pays with 50. What is left?",
    "Repeat this list five times: red, green, blue, yellow.",
)
ENGINE = "vllm_specplug.testing.engine_process"
CALLS = ("greedy", "seeded", "alone")
SEEDED = {"temperature": 0.8, "top_p": 0.95, "seed": 7}
GRAPHS = {
    "enforce_eager": False,
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
}
PIECES = {"SPECPLUG_FULL_CUDA_GRAPHS": "0"}


@dataclass(frozen=True)
class Case:
    """An engine, and the name of the plain one to compare with."""

    name: str
    method: dict[str, Any] | None
    plain: str = "plain float32"
    dtype: str = "float32"
    engine: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)


def head(name: str) -> str:
    return str(HEADS / f"smollm2-135m-{name}")


def cases() -> list[Case]:
    """Returns all cases, the most important first."""
    trees = {
        "jetspec": {"model": head("jetspec")},
        "ngram_tree": {},
        "eagle3_tree": {"model": head("eagle3")},
        "ddtree": {"model": head("dflash")},
        "dspark_tree": {"model": head("dspark")},
        "dels": {"model": head("dflash"), "local_head": head("dels-gru")},
        "longspec": {"model": head("longspec")},
        "tokenswift": {"model": head("tokenswift")},
    }
    fixed = {"num_speculative_tokens": 31, "tree_budget": 31}
    of = {name: {"method": name, **options, **fixed} for name, options in trees.items()}
    jetspec = of["jetspec"]
    chosen = {**jetspec, "tree_budget": "auto"}
    bf16 = {"dtype": "bfloat16", "plain": "plain bfloat16"}
    found = [Case("plain float32", None), Case("jetspec", jetspec)]
    found += [Case("plain bfloat16", None, dtype="bfloat16")]
    found += [
        Case(f"jetspec, {kernel}", {**jetspec, "tree_kernel": kernel}, **bf16)
        for kernel in ("triton", "cute", "flash")
    ]
    found += [Case(name, options) for name, options in of.items() if name != "jetspec"]
    found += [
        Case("jetspec, its own budget", chosen),
        Case("jetspec, whole graphs", jetspec, engine=GRAPHS),
        Case("ngram_tree, whole graphs", of["ngram_tree"], engine=GRAPHS),
        Case("jetspec, no graphs of trees", jetspec, engine=GRAPHS, env=PIECES),
        Case("jetspec, waiting scheduler", jetspec, engine={"async_scheduling": False}),
        Case("plain, compiled", None, engine={"enforce_eager": False}),
        Case("jetspec, compiled", jetspec, plain="plain, compiled",
             engine={"enforce_eager": False}),
        Case("plain fp8 cache", None, dtype="bfloat16", engine={"kv_cache_dtype": "fp8"}),
        Case("jetspec, fp8 cache", jetspec, plain="plain fp8 cache", dtype="bfloat16",
             engine={"kv_cache_dtype": "fp8"}),
    ]  # fmt: skip
    return found


def demo_prompts() -> tuple[str, list[list[int]]]:
    """Returns the folder of the demo target and `TEXTS` as tokenized user turns."""
    from transformers import AutoTokenizer

    from vllm_specplug.targets import prepare_target

    target = str(prepare_target("smollm2", print))
    tokenizer = AutoTokenizer.from_pretrained(target)
    return target, [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=True,
            return_dict=False,
        )
        for text in TEXTS
    ]  # fmt: skip


def calls(prompts: list[list[int]], tokens: int) -> list[dict[str, Any]]:
    common = {"max_tokens": tokens, "ignore_eos": True, "detokenize": False, "temperature": 0.0}
    return [
        {"prompts": some, "params": [{**common, **sampling}] * len(some)}
        for some, sampling in ((prompts, {}), (prompts, SEEDED), (prompts[:1], {}))
    ]


class Engines:
    """Runs engines of cases."""

    def __init__(self, args: argparse.Namespace, report: Report, model: str,
                 prompts: list[list[int]]) -> None:  # fmt: skip
        self.args, self.report, self.model, self.prompts = args, report, model, prompts
        self.logs = args.out / "lossless_logs"
        self.logs.mkdir(exist_ok=True)

    def run(self, case: Case) -> dict[str, Any]:
        """Returns the results of the engine's `CALLS`, and why it ended early as `problem`."""
        left = self.report.seconds_left
        if left < 20:
            return {
                "calls": [],
                "problem": "no time was left",
                "kernel": [],
                "log": "",
                "wall_s": 0,
            }
        engine = {
            "model": self.model, "skip_tokenizer_init": True, "max_model_len": 2048,
            "max_num_seqs": 8, "dtype": case.dtype, "gpu_memory_utilization": 0.03,
            "kv_cache_memory_bytes": 2**30, "enforce_eager": True, **case.engine,
        }  # fmt: skip
        if case.method is not None:
            engine["speculative_config"] = case.method
        job = {"engines": [engine], "calls": calls(self.prompts, self.args.tokens)}
        # By default vLLM's own Triton attention multiplies in TF32.
        env = {"TRITON_F32_DEFAULT": "ieee"} if case.dtype == "float32" else {}
        log = self.logs / (case.name.replace(" ", "_").replace(",", "") + ".log")
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder, log.open("w") as stream:
            paths = [Path(folder) / name for name in ("job.json", "result.json")]
            paths[0].write_text(json.dumps(job))
            problem = None
            try:
                code = subprocess.run(
                    [sys.executable, "-m", ENGINE, *map(str, paths)], stdout=stream,
                    stderr=subprocess.STDOUT, env={**os.environ, **env, **case.env}, timeout=left,
                ).returncode  # fmt: skip
                if code:
                    problem = f"the engine ended with {code}"
            except subprocess.TimeoutExpired:
                problem = "the engine ran out of time"
            found = [] if problem else json.loads(paths[1].read_text())[0]
        text = log.read_text(errors="replace")
        kernels = [line[-200:] for line in text.splitlines() if "Tree attention: " in line]
        if problem:
            print(f"   {case.name}: {problem}\n{text[-1200:]}", flush=True)
        return {"calls": found, "problem": problem, "kernel": kernels[:1], "log": text[-3000:],
                "wall_s": time.monotonic() - start}  # fmt: skip


def equal_tokens(a: list[list[int]], b: list[list[int]]) -> tuple[int, int]:
    """Returns the number of tokens before each output's first difference, and of all tokens."""
    same = 0
    for x, y in zip(a, b, strict=True):
        pairs = enumerate(zip(x, y, strict=False))
        same += next((i for i, (p, q) in pairs if p != q), min(len(x), len(y)))
    return same, sum(map(len, a))


def judge(case: Case, plain: dict[str, Any], tree: dict[str, Any], report: Report) -> None:
    """Adds a row for each call.

    Raises:
        AssertionError: if a float32 output differs, or no draft was accepted.
    """
    wrong = []
    for what, a, b in zip(CALLS, plain["calls"], tree["calls"], strict=False):
        same, count = equal_tokens(a["token_ids"], b["token_ids"])
        drafts, accepted = (
            b["counters"].get(f"vllm:spec_decode_num_{name}", 0.0)
            for name in ("drafts", "accepted_tokens")
        )
        report.row(
            part="lossless", case=case.name, call=what, dtype=case.dtype, equal=same,
            tokens=count, drafts=drafts, accepted=accepted,
            mean_acceptance_length=1 + accepted / max(1.0, drafts), kernel=tree["kernel"],
        )  # fmt: skip
        if case.dtype == "float32" and same < count:
            wrong.append(f"{what}: {same} of {count} tokens equal")
        if not accepted:
            wrong.append(f"{what}: {drafts} drafts, none accepted")
    assert tree["problem"] is None, f"{tree['problem']}: {tree['log'][-600:]}"
    assert plain["problem"] is None, f"plain decoding: {plain['problem']}"
    assert not wrong, "; ".join(wrong)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/gpu"))
    parser.add_argument("--jobs", type=int, default=8, help="engines at a time")
    parser.add_argument("--only", help="names of cases, between semicolons")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--seconds", type=float, default=240)
    args = parser.parse_args()
    report = Report(args.out, "gpu_lossless", args.seconds)
    model, prompts = demo_prompts()
    todo = cases()
    if args.only:
        names = set(args.only.split(";"))
        names |= {case.plain for case in todo if case.name in names}
        todo = [case for case in todo if case.name in names]
    engines = Engines(args, report, model, prompts)
    with ThreadPoolExecutor(args.jobs) as pool:
        running = {case.name: pool.submit(engines.run, case) for case in todo}
        for case in todo:
            result = running[case.name].result()
            if case.method is None:
                with report.part(case.name) as record:
                    record.update(wall_s=result["wall_s"], kernel=result["kernel"])
                    assert result["problem"] is None, result["log"][-800:]
                continue
            with report.part(case.name) as record:
                judge(case, running[case.plain].result(), result, report)
                record["wall_s"] = result["wall_s"]
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
