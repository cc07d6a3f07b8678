# SPDX-License-Identifier: Apache-2.0
"""The cost of the shipped local heads in a draft of the shipped JetSpec head, without the forward.

    python bench/kernels/local_draft_cpu.py --target MODEL

It prints the minimum and the median of 60 calls in milliseconds: the 8 or 128 likeliest tokens of
each slot, and a tree of 16 nodes from them, without and with a local head. Logits are random, with
one likely token per slot.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from vllm_specplug.drafting.checkpoint_files import target_ids_or_all
from vllm_specplug.methods.block.checkpoint import load_block_head
from vllm_specplug.methods.block.drafter import build_best_first, top_candidates
from vllm_specplug.methods.dels.checkpoint import load_local_head
from vllm_specplug.methods.dels.unigram import load_unigram, log_prior
from vllm_specplug.methods.local.settings import LocalTreeSettings
from vllm_specplug.methods.local.tree import LocalTreeBuilder
from vllm_specplug.train.target import TargetWeights

HEADS = Path(__file__).resolve().parents[2] / "heads"
DEPTH, NODES, WIDTH, CANDIDATES = 7, 16, 8, 128


def timed(what: str, call: Callable[[], object]) -> None:
    times = []
    for _ in range(60):
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
    print(f"{what}: {min(times):.3f} {statistics.median(times):.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    weights = TargetWeights(args.target)
    tables, vocab = weights.tables(), int(weights.config["vocab_size"])
    head, extras = load_block_head(
        HEADS / "smollm2-135m-jetspec", weights.config, dtype=torch.bfloat16
    )
    ids = target_ids_or_all(extras.target_ids, head.config.vocab_size)
    random = torch.Generator().manual_seed(0)
    for requests in (1, 4):
        rows = DEPTH * requests
        logits = 3.0 * torch.randn(rows, len(ids), generator=random)
        logits[torch.arange(rows), torch.randint(0, len(ids), (rows,), generator=random)] += 12.0
        logits = logits.bfloat16()
        found = {}
        for count in (WIDTH, CANDIDATES):
            timed(
                f"{requests} requests, top {count}", lambda x=logits, n=count: top_candidates(x, n)
            )
            found[count] = [
                x.unflatten(0, (requests, DEPTH)) for x in top_candidates(logits, count)
            ]
        budgets, depths = torch.tensor([[NODES], [DEPTH]]).int().expand(2, requests).contiguous()
        few, log_probs = found[WIDTH]
        timed(
            f"{requests} requests, tree",
            lambda c=ids[few], p=log_probs, b=budgets, d=depths: build_best_first(
                c, p, b, d, WIDTH
            ),
        )
        for kind in ("gru", "markov"):
            folder = HEADS / f"smollm2-135m-dels-{kind}"
            local, local_ids = load_local_head(folder, weights.config)
            builder = LocalTreeBuilder(
                local,
                local_ids,
                ids,
                log_prior(load_unigram(folder / "unigram.safetensors"), vocab),
                LocalTreeSettings(
                    alpha=(0.5,) * DEPTH,
                    beta=(0.3,) * DEPTH,
                    num_candidates=CANDIDATES,
                    gate_table_bytes=1 << 26,
                ),
                embed_tokens=tables.embed_tokens.bfloat16(),
                lm_head=tables.lm_head.bfloat16(),
                dtype=torch.bfloat16,
            )
            anchors, many = list(range(100, 100 + requests)), found[CANDIDATES]
            timed(
                f"{requests} requests, tree with {kind}",
                lambda b=builder, m=many, a=anchors, n=requests: b.build(
                    *m, a, [NODES] * n, [DEPTH] * n, [WIDTH] * n, None
                ),
            )


if __name__ == "__main__":
    main()
