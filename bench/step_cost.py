# SPDX-License-Identifier: Apache-2.0
"""What verifying a tree costs beside verifying as many tokens in a chain.

One engine decodes one request and is given, step by step in turn, a random tree and a chain of
the same number of nodes. Chains take vLLM's own attention and trees take ours; everything else
is the same. Prints and writes the median time of forward and walk for both.

    python bench/step_cost.py [--dtype bfloat16] [--steps 40] [--out bench/results]
"""

from __future__ import annotations

import os
import random
from collections import defaultdict
from statistics import median
from typing import Any

import numpy as np
from harness import Benchmark, make_engine, worker_of

from vllm_specplug.bench.result_page import ResultPage, Section

# In one process, so that the drafter can be replaced and timings read.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

NODES = (8, 16, 64)
CONTEXTS = (256, 1500)
VOCAB = 40_000


def random_tree(num_nodes: int, rng: random.Random) -> Any:
    """Half a chain, half branches hung on it: the shape best-first trees have."""
    from vllm_specplug.tree import DraftTree

    parents, depths = [], []
    for node in range(num_nodes):
        parent = node - 1 if node < num_nodes // 2 else rng.randrange(-1, node)
        parents.append(parent)
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return DraftTree(
        np.array(rng.sample(range(1000, VOCAB), num_nodes), dtype=np.int64),
        np.array(parents, dtype=np.int32),
        np.array(depths, dtype=np.int32),
        np.zeros(num_nodes, dtype=np.float32),
    )


def measure(dtype: str, steps: int, eager: bool) -> list[dict[str, Any]]:
    """Median verify milliseconds of tree and chain for every context and number of nodes."""
    from rich.progress import track
    from vllm import SamplingParams

    from vllm_specplug.targets import prepare_target
    from vllm_specplug.tree import DraftTree

    nodes = max(NODES)
    config = {"method": "ngram_tree", "num_speculative_tokens": nodes, "tree_budget": nodes}
    llm = make_engine(
        str(prepare_target("smollm2")), config, eager=eager, dtype=dtype, max_num_seqs=1,
        enable_prefix_caching=True,
    )  # fmt: skip
    runner = worker_of(llm).model_runner
    rng = random.Random(0)
    times: dict[str, list[float]] = defaultdict(list)
    state: dict[str, Any] = {"next": "tree", "in_flight": None, "nodes": 0}

    def propose(requests: Any) -> list[Any]:
        kind = state["next"]
        state["in_flight"], state["next"] = kind, "chain" if kind == "tree" else "tree"
        if kind == "tree":
            return [random_tree(state["nodes"], rng)]
        return [DraftTree.chain(rng.sample(range(1000, VOCAB), state["nodes"]))]

    runner.drafter.drafter.propose = propose
    end_step = runner.tree_metrics.end_step

    def timed_end_step() -> Any:
        payload = end_step()
        # The tree proposed in this step is verified in the next one.
        verified, state["verifying"] = state.get("verifying"), state["in_flight"]
        if payload and verified and "verify" in payload.get("ms", {}):
            times[verified].append(payload["ms"]["verify"][0])
        return payload

    runner.tree_metrics.end_step = timed_end_step
    rows = []
    cases = [(context, nodes) for context in CONTEXTS for nodes in NODES]
    for context, nodes in track(cases, description=f"verify steps, {dtype}"):
        state.update(nodes=nodes, verifying=None, in_flight=None)
        prompt = {"prompt_token_ids": [rng.randrange(1000, VOCAB) for _ in range(context)]}
        params = SamplingParams(temperature=0.0, max_tokens=2 * steps, ignore_eos=True)
        times.clear()
        llm.generate([prompt], params, use_tqdm=False)
        tree, chain = median(times["tree"][2:]), median(times["chain"][2:])
        rows.append(
            {"context": context, "nodes": nodes, "tree_ms": tree, "chain_ms": chain,
             "ratio": tree / chain}
        )  # fmt: skip
    return rows


def main() -> None:
    benchmark = Benchmark("step_cost", __doc__)
    add = benchmark.parser.add_argument
    add("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    add("--steps", type=int, default=40, help="steps of each kind")
    args = benchmark.parse()
    rows = measure(args.dtype, args.steps, args.eager)
    table = [
        [str(r["context"]), str(r["nodes"]), f"{r['tree_ms']:.1f}", f"{r['chain_ms']:.1f}",
         f"{r['ratio']:.2f}"]
        for r in rows
    ]  # fmt: skip
    benchmark.publish(
        args,
        ResultPage(
            name=f"step_cost_{args.dtype}",
            title=f"Verification step of a tree beside a chain, {args.dtype}",
            about="Median ms of one target forward and walk, SmolLM2-135M-Instruct, one request, "
            "trees and chains in alternating steps of one run.",
            sections=[Section(("context", "nodes", "tree ms", "chain ms", "tree / chain"), table)],
            data=rows,
            made_by=[benchmark.provenance(args)],
        ),
    )


if __name__ == "__main__":
    main()
