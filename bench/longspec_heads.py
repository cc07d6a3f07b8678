# SPDX-License-Identifier: Apache-2.0
"""Compares LongSpec heads on documents of several lengths, without a server.

    python bench/longspec_heads.py --target MODEL --data PROMPTS HEAD [HEAD ...]

The target answers a request to summarise each document, greedily and once for all heads; then every
head drafts along these answers as it would while serving: mean acceptance lengths.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from context_length import documents
from harness import Benchmark

from vllm_specplug.bench.provenance import tidy
from vllm_specplug.bench.result_page import ResultPage, Section

PREFILL = 1024


@torch.inference_mode()
def answered(model: Any, prompt: list[int], count: int) -> Any:
    """`prompt` and `count` greedy tokens, with the keys and values of the target's last layer."""
    from transformers import DynamicCache

    from vllm_specplug.methods.longspec.train.features import KVSequence

    cache, tokens = DynamicCache(), list(prompt)
    for start in range(0, len(prompt), PREFILL):
        ids = torch.tensor([prompt[start : start + PREFILL]])
        output = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    for _ in range(count):
        tokens.append(int(output.logits[0, -1].argmax()))
        output = model(torch.tensor([tokens[-1:]]), past_key_values=cache, use_cache=True)
    key, value = (t[0].transpose(0, 1) for t in (cache.layers[-1].keys, cache.layers[-1].values))
    # Final states are read by training alone.
    hidden = torch.empty(len(tokens), 0)
    positions = torch.arange(len(tokens))
    return KVSequence(torch.tensor(tokens), positions, len(prompt), key, value, hidden)


def main() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from vllm_specplug.methods.longspec.checkpoint import load_longspec_head
    from vllm_specplug.methods.longspec.train.evaluate import POLICIES, evaluate_longspec
    from vllm_specplug.train.target import TargetWeights

    benchmark = Benchmark("longspec_heads", __doc__, runs_vllm=False)
    parser = benchmark.parser
    parser.add_argument("heads", nargs="+", type=Path)
    parser.add_argument("--target", required=True)
    parser.add_argument("--data", type=Path, required=True, help="folder of spec_bench_dev.jsonl")
    parser.add_argument("--contexts", default="512,8000")
    parser.add_argument("--prompts", type=int, default=5)
    parser.add_argument("--answer", type=int, default=96, help="tokens of each answer")
    parser.add_argument("--rounds", type=int, default=32, help="most rounds of an answer")
    parser.add_argument("--policies", default="chain,best_first/16")
    args = benchmark.parse()
    weights = TargetWeights(args.target)
    tables = weights.tables()
    policies = {name: POLICIES[name] for name in args.policies.split(",")}
    model = AutoModelForCausalLM.from_pretrained(
        args.target, dtype=torch.bfloat16, local_files_only=True
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.target, local_files_only=True)
    table = []
    for context in map(int, args.contexts.split(",")):
        prompts = documents(args.data, tokenizer, args.prompts, context)
        sequences = [answered(model, prompt, args.answer) for prompt in prompts]
        for folder in args.heads:
            head, extras = load_longspec_head(folder, weights.config, dtype=torch.float32)
            ids = extras.target_ids
            ids = torch.arange(len(tables.lm_head)) if ids is None else ids
            report = evaluate_longspec(
                head, sequences, tables.embed_tokens.float(), tables.lm_head[ids].float(), ids,
                policies, args.rounds,
            )  # fmt: skip
            counts = report.total
            lengths = [f"{1 + counts[p].accepted / counts[p].rounds:.2f}" for p in policies]
            rounds = min(counts[p].rounds for p in policies)
            table.append([tidy(str(folder)), f"{context:,}", *lengths, str(rounds)])
            print(" ".join(table[-1]), flush=True)
    header = ("head", "context", *policies, "rounds")
    benchmark.publish(
        args,
        ResultPage(
            name="longspec_heads",
            title="LongSpec heads on documents of several lengths",
            about="Mean acceptance length on the target's greedy answers to requests to summarise "
            "documents, estimated as serving drafts, by policy.",
            sections=[Section(header, table)],
            data=[dict(zip(header, row, strict=True)) for row in table],
            made_by=[benchmark.provenance(args)],
        ),
    )


if __name__ == "__main__":
    main()
