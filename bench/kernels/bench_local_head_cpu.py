# SPDX-License-Identifier: Apache-2.0
"""The cost of a local head in addition to its block head on the CPU.

    python bench/kernels/bench_local_head_cpu.py --head heads/smollm2-135m-dflash

It times a draft (forward, candidates, tree) with and without the local head, interleaved in one
process, in bfloat16 with random weights. Attention reads only the block; a context would slow down
only the block head. It reports medians and their ratio.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

import vllm_specplug.methods.dels.drafter as dels
from vllm_specplug.drafting.drafter import DrafterOptions, TargetWeights
from vllm_specplug.drafting.requests import DraftRequests
from vllm_specplug.methods.ddtree.drafter import DDTreeDrafter
from vllm_specplug.methods.dels.settings import DelsSettings
from vllm_specplug.methods.local.head import LocalHead, LocalHeadConfig
from vllm_specplug.vllm_worker.target.linear import packed_linear

VOCAB, HIDDEN = 49152, 576


class BlockOnly:
    """A draft cache without context."""

    def block_attention(self, requests: DraftRequests, rows: int, causal: bool) -> Any:
        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            group = q.shape[1] // k.shape[1]
            q, k, v = (
                x.unflatten(0, (len(requests), rows)).transpose(1, 2)
                for x in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))
            )
            mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
            return mixed.transpose(1, 2).flatten(0, 1)

        return attend


def make_drafters(
    args: argparse.Namespace, local: LocalHeadConfig
) -> tuple[DDTreeDrafter, DDTreeDrafter]:
    """Returns the block head's drafter without and with a random local head."""
    torch.manual_seed(0)
    target = TargetWeights(
        embed_tokens=torch.randn(VOCAB, HIDDEN).bfloat16(),
        lm_head=(0.05 * torch.randn(VOCAB, HIDDEN)).bfloat16(),
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        text_config=SimpleNamespace(
            hidden_size=HIDDEN, vocab_size=VOCAB, num_hidden_layers=30, num_attention_heads=9
        ),
        make_linear=packed_linear,
    )
    head = LocalHead(local)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(std=0.05)
    head.requires_grad_(False)
    dels.load_local_head = lambda *_: (head, None)  # type: ignore[assignment]
    dels.load_unigram = lambda *_: SimpleNamespace(  # type: ignore[assignment]
        log_probs=lambda size, _: torch.randn(size).log_softmax(-1)
    )
    options = DelsSettings(
        "", "", (0.0,) + (0.3,) * 15, (0.0,) + (0.3,) * 15, False, args.candidates,
        args.gate_table_mb << 20,
    )  # fmt: skip
    drafters = []
    for cls in (DDTreeDrafter, dels.DelsDrafter):
        drafter = cls(
            DrafterOptions(
                head_path=str(args.head), num_nodes=args.nodes, tree_depth=args.depth,
                max_depth=args.nodes, tree_width=8,
                ngram_topk=0, max_model_len=2048, settings=options,
            )
        )  # fmt: skip
        drafter.load(target)
        drafter.bind_cache(BlockOnly())  # type: ignore[arg-type]
        drafters.append(drafter)
    return drafters[0], drafters[1]


def requests(batch: int, nodes: int, width: int, depth: int) -> DraftRequests:
    return DraftRequests(
        req_ids=[str(r) for r in range(batch)],
        token_ids=[np.array([100 + r]) for r in range(batch)],
        context_lens=[5] * batch,
        req_indices=list(range(batch)),
        budgets=[nodes] * batch,
        widths=[width] * batch,
        depths=[depth] * batch,
    )


@torch.inference_mode()
def interleaved(calls: list[Callable[[], object]], rounds: int) -> list[float]:
    """Returns median milliseconds of each call; calls take turns."""
    times: list[list[float]] = [[] for _ in calls]
    for turn in range(rounds + 5):
        for call, kept in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            if turn >= 5:
                kept.append(1e3 * (time.perf_counter() - start))
    return [statistics.median(kept) for kept in times]


def main() -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from harness import Benchmark

    from vllm_specplug.bench.result_page import ResultPage, Section

    benchmark = Benchmark("local_head_cpu", __doc__, runs_vllm=False)
    add = benchmark.parser.add_argument
    add("--head", type=Path, required=True, help="folder of a DFlash head")
    add("--nodes", type=int, default=16)
    add("--depth", type=int, default=7)
    add("--candidates", type=int, default=128)
    add("--gate-table-mb", type=int, default=64)
    add("--rounds", type=int, default=200)
    add("--threads", type=int, default=torch.get_num_threads())
    args = benchmark.parse()
    torch.set_num_threads(args.threads)
    rows = []
    for name, config in {
        "GRU 256, rank 128": {"kind": "gru", "hidden_size": 256, "rank": 128},
        "GRU 512, rank 128": {"kind": "gru", "hidden_size": 512, "rank": 128},
        "GRU 1024, rank 256": {"kind": "gru", "hidden_size": 1024, "rank": 256},
        "Markov, rank 128": {"kind": "markov", "rank": 128},
    }.items():
        plain, local = make_drafters(
            args,
            LocalHeadConfig(vocab_size=VOCAB, target_hidden_size=HIDDEN, **config),  # type: ignore
        )
        for batch, width in ((1, 1), (1, 8), (4, 8)):
            batch_of = requests(batch, args.nodes, width, args.depth)
            before, after = interleaved(
                [lambda d=d, b=batch_of: d.propose(b) for d in (plain, local)], args.rounds
            )
            rows.append([name, str(batch), str(width), f"{before:.2f}", f"{after:.2f}",
                         f"{100 * (after / before - 1):.0f} %"])  # fmt: skip
            print(" ".join(rows[-1]), flush=True)
    header = ("local head", "batch", "width", "block head, ms", "with local head, ms", "more")
    page = ResultPage(
        name="local_head_cpu",
        title="What a local head adds to a draft on the CPU",
        about=f"{args.threads} thread(s), bfloat16; the DFlash head of SmolLM2-135M-Instruct "
        f"(block 8, draft vocabulary 12288), {args.nodes} nodes, {args.candidates} candidates, "
        "random local heads. Medians of interleaved calls; width 1 is a chain.",
        sections=[Section(header, rows)],
        data=[dict(zip(header, row, strict=True)) for row in rows],
        made_by=[benchmark.provenance(args)],
    )
    benchmark.publish(args, page)


if __name__ == "__main__":
    main()
