# SPDX-License-Identifier: Apache-2.0
"""bfloat16 and quantised targets on a CPU: vLLM, trees and llama.cpp, side by side on one core.

The copies of the target are written once into the folder of prepared targets. llama.cpp comes from
the package llama-cpp-python.

    python bench/peers.py --data PROMPTS [--minutes 12] [--rounds 2] [--out FOLDER]
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from statistics import median
from typing import Any

from harness import BASELINE, Benchmark, Cells, by_load, decode_rate, ratios, total
from llama_cpp_engine import LlamaCppEngine
from lookups import JETSPEC, make_loads
from quantised_copies import gguf_copy, quantised_copy

from vllm_specplug.bench.result_page import ResultPage, Section
from vllm_specplug.targets import cache_dir, fetch_gguf, get_target, prepare_target

NO_DRAFTS = {"method": "ngram_tree", "tree_budget": 0}
BY_WEIGHTS: dict[str, dict[str, dict[str, Any] | None]] = {
    "bfloat16": {"": None, "no drafts": NO_DRAFTS, "jetspec": JETSPEC},
    "4 bits": {"plain": None, "no drafts": NO_DRAFTS, "jetspec": JETSPEC},
    "8 bits": {"plain": None, "no drafts": NO_DRAFTS, "jetspec": JETSPEC},
}
LLAMA_CPP = {"llama.cpp BF16": "BF16", "llama.cpp Q4_0": "Q4_0"}
FASTEST_PEER = "llama.cpp Q4_0"


def _name(weights: str, system: str) -> str:
    return f"{system}, {weights}" if system else BASELINE


SYSTEMS = {
    _name(weights, system): config
    for weights, systems in BY_WEIGHTS.items()
    for system, config in systems.items()
} | dict.fromkeys(LLAMA_CPP)


def plain_of(system: str) -> str:
    """Returns plain vLLM with the same weights; with bfloat16 weights for llama.cpp."""
    weights = system.partition(", ")[2]
    return BASELINE if weights in ("", "bfloat16") else f"plain, {weights}"


def page(cells: Cells) -> ResultPage:
    rows = []
    for load, found in by_load(cells).items():
        for system in (name for name in SYSTEMS if name in found):
            group = found[system]
            over = ratios(group, found[plain_of(system)], decode_rate)
            over_peer = ratios(group, found.get(FASTEST_PEER, []), decode_rate)
            rows.append(
                {
                    "load": load,
                    "system": system,
                    "tokens_per_s": median(decode_rate(cell) for cell in group),
                    "over_plain": median(over),
                    "over_plain_range": [min(over), max(over)],
                    "over_peer": median(over_peer) if over_peer else None,
                    "ttft_ms": median(cell["ttft_ms"] for cell in group),
                    "tokens_per_step": total(group, "decode_tokens") / total(group, "decode_steps"),
                    "tokens": total(group, "decode_tokens"),
                }
            )
    header = ("load", "system", "tokens/s", "over plain vLLM with these weights",
              f"over {FASTEST_PEER}", "first token after (ms)", "tokens per step",
              "tokens measured")  # fmt: skip
    table = [
        [
            r["load"],
            "plain, bfloat16" if r["system"] == BASELINE else r["system"],
            f"{r['tokens_per_s']:.1f}",
            "{:.2f} x ({:.2f} to {:.2f})".format(r["over_plain"], *r["over_plain_range"]),
            f"{r['over_peer']:.2f} x" if r["over_peer"] else "-",
            f"{r['ttft_ms']:.0f}",
            f"{r['tokens_per_step']:.2f}",
            f"{r['tokens']}",
        ]
        for r in rows
    ]
    return ResultPage(
        name="peers",
        title="Quantised targets, and llama.cpp",
        about="SmolLM2-135M-Instruct, greedy; chat, code and maths prompts in turn, served by all "
        "systems side by side in one process, in turns of a second. Output tokens per CPU second "
        "of one thread, over the steps in which that many requests were decoded and no prompt was "
        "taken in. Ratios are medians of the rounds' ratios, in brackets the lowest and the "
        "highest. 4 bits: compressed-tensors, asymmetric, groups of 32 inputs. 8 bits: weights by "
        "output and inputs by token. Embedding and LM head are bfloat16 in both. `plain` is vLLM "
        "without this package; `no drafts` is `ngram_tree` with budget 0, which shows what the "
        "package's products bring; `jetspec` is the shipped head, trained with bfloat16 weights, "
        "under the adaptive budget. llama.cpp decodes plainly, all requests in one batch, from "
        "copies of the Q4_1 file that the target was made of; its Q4_0 was its fastest 4-bit "
        "format on this CPU (Q4_1 and Q4_K_M took longer). For llama.cpp the fourth column "
        "compares with vLLM in bfloat16.",
        sections=[Section(header, table)],
        data=rows,
        made_by=[cell["provenance"] for cell in cells],
    )


def main() -> None:
    benchmark = Benchmark("peers", __doc__)
    benchmark.add_comparison_flags(minutes=12.0, rounds=2, tokens=96)
    add = benchmark.parser.add_argument
    add("--concurrency", type=int, nargs="+", default=(1, 4, 8))
    add("--prompts", type=int, default=4, help="per round, in addition to 4 per concurrent request")
    add("--systems", nargs="+", default=list(SYSTEMS), choices=list(SYSTEMS), metavar="SYSTEM",
        help=f"some of {', '.join(SYSTEMS)}; `{BASELINE}` always runs")  # fmt: skip
    args = benchmark.parse()
    if not args.report_only:
        target = prepare_target("smollm2")
        # In another process: this one is confined before it imports torch.
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            bits = {weights: int(weights[0]) for weights in ("4 bits", "8 bits")}
            copies = {
                weights: pool.submit(
                    quantised_copy, target, cache_dir() / f"smollm2-w{count}", count
                ).result()
                for weights, count in bits.items()
            }
        folder = cache_dir() / "smollm2-gguf"
        gguf = next(folder.rglob("*Q4_1.gguf"), None) or fetch_gguf(
            get_target("smollm2"), folder, print
        )

        def own_engine(system: str, target: str) -> Any:
            if system not in LLAMA_CPP:
                return None
            kind = LLAMA_CPP[system]
            copy = gguf_copy(gguf, folder / f"{kind}.gguf", kind)
            return LlamaCppEngine(copy, requests=max(args.concurrency), context=1024)

        benchmark.compare(
            args,
            {name: config for name, config in SYSTEMS.items() if name in (BASELINE, *args.systems)},
            lambda target: make_loads(args, target),
            engine={"max_num_seqs": max(args.concurrency), "max_num_batched_tokens": 2048},
            sampling={"max_tokens": args.tokens, "temperature": 0.0},
            engine_of={
                name: {"model": str(copies[weights])}
                for weights in copies
                for name in (_name(weights, system) for system in BY_WEIGHTS[weights])
            },
            own_engine=own_engine,
        )
    benchmark.publish(args, page(benchmark.cells(args)))


if __name__ == "__main__":
    main()
