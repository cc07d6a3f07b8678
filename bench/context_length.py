# SPDX-License-Identifier: Apache-2.0
"""Drafting against context length at batch 1: acceptance, cost of a draft, tokens a second.

    python bench/context_length.py --data ../shared/data
    python bench/context_length.py --report          table and plot anew

One engine a system and process; every prompt is a document (retrieved passages and articles of
spec_bench, joined) cut to the context and a request to summarise it, answered greedily. Results are
kept in bench/results/context_length.json, a run at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from vllm_specplug.bench.plan import VLLM_CONFIGS

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
LONGSPEC = {"method": "longspec", "model": str(ROOT / "heads" / "smollm2-135m-longspec")}
JETSPEC = {"method": "jetspec", "model": str(ROOT / "heads" / "smollm2-135m-jetspec")}
TREE = {"num_speculative_tokens": 16, "tree_budget": 16}
SYSTEMS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "ngram": VLLM_CONFIGS["ngram"],
    "longspec": {**LONGSPEC, **TREE, "ngram_topk": 0},
    "longspec + n-grams": {**LONGSPEC, **TREE},
    "longspec as shipped": {**LONGSPEC, "num_speculative_tokens": 16},
    "jetspec": {**JETSPEC, **TREE, "ngram_topk": 0},
    "jetspec + n-grams": {**JETSPEC, **TREE},
    "jetspec as shipped": {**JETSPEC, "num_speculative_tokens": 16},
}
CONTEXTS = (512, 2048, 4096, 8000)
ANSWER = 64
QUESTION = "\n\nSummarize the documents above in a few sentences."


def documents(data: Path, tokenizer: Any, count: int, length: int) -> list[list[int]]:
    """`count` prompts of about `length` tokens, none of which shares a passage with another."""
    rows = [json.loads(line) for line in (data / "spec_bench_dev.jsonl").read_text().splitlines()]
    texts = [
        row["turns"][0] for row in rows if row.get("category") in ("rag", "summarization", "qa")
    ] or [row["turns"][0] for row in rows]
    texts.sort(key=len, reverse=True)
    prompts = []
    for i in range(count):
        ids: list[int] = []
        for text in texts[i::count] * 40:
            ids += tokenizer(text + "\n\n")["input_ids"]
            if len(ids) >= length - 48:
                break
        body = tokenizer.decode(ids[: length - 48])
        prompts.append(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": body + QUESTION}],
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
            )[-length:]
        )
    return prompts


def run_system(system: str, data: Path, count: int) -> list[dict[str, Any]]:
    """All contexts on one engine: a cell each."""
    from transformers import AutoTokenizer
    from vllm import LLM, SamplingParams

    from vllm_specplug.bench.provenance import provenance
    from vllm_specplug.targets import prepare_target

    target = prepare_target("smollm2")
    options = {} if SYSTEMS[system] is None else {"speculative_config": SYSTEMS[system]}
    llm = LLM(
        model=str(target),
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=8192,
        max_num_seqs=1,
        enable_prefix_caching=False,
        **options,
    )
    engine = llm.llm_engine
    drafter = _drafter(engine)
    draft_ms: list[float] = []
    if drafter is not None:
        propose = drafter.propose

        def timed(requests: Any) -> Any:
            start = time.perf_counter()
            trees = propose(requests)
            draft_ms.append(1e3 * (time.perf_counter() - start))
            return trees

        drafter.propose = timed
    answer = {"temperature": 0.0, "max_tokens": ANSWER, "ignore_eos": True, "detokenize": False}
    tokenizer = AutoTokenizer.from_pretrained(target)
    llm.generate({"prompt_token_ids": list(range(3, 40))}, SamplingParams(**answer), use_tqdm=False)
    # `generate` turns its parameters into those of a request that answers once, at its end.
    params = SamplingParams(**answer)
    cells = []
    for context in CONTEXTS:
        draft_ms.clear()
        tokens, steps, step_ms = 0, 0, []
        for i, ids in enumerate(documents(data, tokenizer, count, context)):
            engine.add_request(str(i), {"prompt_token_ids": ids}, params)
            made, last = 0, 0.0
            while engine.has_unfinished_requests():
                results = engine.step()
                now = time.perf_counter()
                new = len(results[0].outputs[0].token_ids) - made if results else 0
                if made and new:
                    tokens, steps = tokens + new, steps + 1
                    step_ms.append(1e3 * (now - last))
                made, last = made + new, now
        cells.append(
            {
                "system": system,
                "context": context,
                "prompts": count,
                "tokens": tokens,
                "mean_acceptance_length": tokens / steps,
                "step_ms": median(step_ms),
                "draft_ms": median(draft_ms) if draft_ms else 0.0,
                "tokens_per_s": 1e3 * tokens / sum(step_ms),
                "provenance": provenance(),
            }
        )
        print(json.dumps({k: v for k, v in cells[-1].items() if k != "provenance"}), flush=True)
    if drafter is not None and drafter.window_spec() is not None:
        window = drafter.window
        for cell in cells:
            cell["draft_bytes_per_request"] = window.kv_cache.nbytes // len(window.block_table)
    return cells


def _drafter(engine: Any) -> Any:
    """Our drafter inside an engine of this process; None where another method runs."""
    worker = engine.engine_core.engine_core.model_executor.driver_worker.worker
    drafter = getattr(getattr(worker.model_runner, "drafter", None), "drafter", None)
    return drafter if hasattr(drafter, "window_spec") else None


def load() -> dict[str, dict[str, Any]]:
    path = RESULTS / "context_length.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def store(cells: list[dict[str, Any]]) -> None:
    merged = {**load(), **{f"{c['system']}/{c['context']}": c for c in cells}}
    text = json.dumps(dict(sorted(merged.items())), indent=1)
    (RESULTS / "context_length.json").write_text(text + "\n")


def report() -> None:
    """Writes context_length.md and context_length.png from what was measured."""
    import matplotlib.pyplot as plt

    cells = load()
    systems = [name for name in SYSTEMS if any(c["system"] == name for c in cells.values())]
    lines = [
        "# Drafting against context length",
        "",
        "SmolLM2-135M-Instruct, bfloat16, eager, one request at a time, greedy, "
        f"{ANSWER} tokens after a document and a request to summarise it. Trees of 16 nodes; as "
        "shipped: with n-grams and the adaptive budget (at most 16). Made by `python "
        "bench/context_length.py`; commit, versions and hardware of every run are in "
        "[context_length.json](context_length.json).",
    ]
    for key, title, form in (
        ("mean_acceptance_length", "Tokens a step (mean acceptance length)", "{:.2f}"),
        ("draft_ms", "Median draft, ms", "{:.1f}"),
        ("step_ms", "Median step, ms (verification and draft)", "{:.1f}"),
        ("tokens_per_s", "Tokens a second while decoding", "{:.1f}"),
    ):
        lines += ["", f"## {title}", ""]
        lines.append("| context | " + " | ".join(systems) + " |")
        lines.append("|---" * (len(systems) + 1) + "|")
        for context in CONTEXTS:
            row = [cells.get(f"{name}/{context}") for name in systems]
            texts = ["–" if c is None or not c[key] else form.format(c[key]) for c in row]
            lines.append(f"| {context:,} | " + " | ".join(texts) + " |")
    kept = {c["draft_bytes_per_request"] for c in cells.values() if "draft_bytes_per_request" in c}
    for size in kept:
        lines += ["", f"Draft memory of a longspec request: {size:,} bytes at every context."]
    (RESULTS / "context_length.md").write_text("\n".join(lines) + "\n")
    figure, axes = plt.subplots(1, 2, figsize=(10, 4))
    for axis, key, title in (
        (axes[0], "mean_acceptance_length", "tokens a step"),
        (axes[1], "draft_ms", "draft, ms"),
    ):
        for name in systems:
            points = [(c, cells[f"{name}/{c}"]) for c in CONTEXTS if f"{name}/{c}" in cells]
            if any(cell[key] for _, cell in points):
                axis.plot([c for c, _ in points], [p[key] for _, p in points], "o-", label=name)
        axis.set_xlabel("context, tokens")
        axis.set_title(title)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(RESULTS / "context_length.png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder with spec_bench_dev.jsonl")
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--report", action="store_true")
    arguments = parser.parse_args()
    if arguments.child:
        store(run_system(arguments.child, arguments.data, arguments.prompts))
        return
    if not arguments.report:
        if arguments.data is None or not (arguments.data / "spec_bench_dev.jsonl").is_file():
            sys.exit(f"--data {arguments.data}: no spec_bench_dev.jsonl there; name its folder")
        unknown = set(arguments.systems.split(",")) - set(SYSTEMS)
        if unknown:
            sys.exit(f"--systems {sorted(unknown)}, legal: {', '.join(SYSTEMS)}")
        environment = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            **os.environ,
        }
        for system in arguments.systems.split(","):
            command = [sys.executable, __file__, "--child", system, "--data", str(arguments.data)]
            command += ["--prompts", str(arguments.prompts)]
            subprocess.run(command, check=True, env=environment)
    report()


if __name__ == "__main__":
    main()
