# SPDX-License-Identifier: Apache-2.0
"""Verification and drafts at the sizes of served models, in units of a plain step.

    python bench/real_sizes.py [--model qwen3-4b llama-3.1-8b] [--layers 5] [--threads 1]

Targets and heads have the published shapes and random weights; nothing is downloaded. Of a target
so many layers are served, and in every other request all but the first of them are left out: step
times are continued linearly from these two depths to the whole one. Layers are alike, and a single
one is larger than the caches. With the target's own depth in `--layers` the whole model is
measured. Each engine has a process of its own; what is measured is kept, and a run that is started
again goes on from there. Nothing is compiled, as layers that are left out could not be.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from harness import Benchmark, Cells, make_engine, worker_of

from vllm_specplug.bench.cells import CellStore, digest
from vllm_specplug.bench.result_page import ResultPage, Section

NODES = (8, 16, 32, 64, 128)
CONTEXT = 512
BLOCK = 16
DRAFT_VOCAB = 32000
_MARK = "measured: "


@dataclass(frozen=True)
class Model:
    """A target's published shape, and the method whose head drafts for it.

    Args:
        config: of the target, with the whole depth.
        layers: that are served unless told otherwise.
        features: layers of the target that the head reads.
        published: tokens per step that the head's paper reports, by nodes and prompts.
        source: of these.
    """

    title: str
    config: dict[str, Any]
    method: str
    layers: int
    features: int
    published: dict[int, dict[str, float]]
    source: str


_SHARED = {
    "hidden_act": "silu", "attention_bias": False, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "torch_dtype": "bfloat16", "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
MODELS = {
    "qwen3-4b": Model(
        "Qwen3-4B with a JetSpec head of 5 layers",
        {
            **_SHARED, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3",
            "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
            "vocab_size": 151936, "tie_word_embeddings": True, "rms_norm_eps": 1e-6,
            "rope_theta": 1e6, "max_position_embeddings": 40960,
        },
        "jetspec", 5, 5,
        {
            16: {"GSM8K": 6.00, "HumanEval": 5.32, "MT-Bench": 3.98},
            64: {"GSM8K": 6.56, "HumanEval": 6.06, "MT-Bench": 4.77},
            128: {"GSM8K": 8.05, "HumanEval": 7.28, "MT-Bench": 5.52},
        },
        "the JetSpec paper for Qwen3-8B, greedy, root included; a chain of 16, trees beyond",
    ),
    "llama-3.1-8b": Model(
        "Llama-3.1-8B with an EAGLE-3 head",
        {
            **_SHARED, "architectures": ["LlamaForCausalLM"], "model_type": "llama",
            "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
            "vocab_size": 128256, "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
            "rope_theta": 5e5, "max_position_embeddings": 131072,
        },
        "eagle3_tree", 3, 3,
        {64: {"GSM8K": 4.31, "HumanEval": 4.26, "MT-Bench": 3.88}},
        "the JetSpec paper's EAGLE-3 of 64 nodes for Qwen3-8B, greedy",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Side:
    """How the target's products are made."""

    products: str
    int8: bool = False


SIDES = {
    "bf16, vLLM": Side("vllm"),
    "bf16, packed": Side("packed"),
    "int8, vLLM": Side("vllm", int8=True),
}
# Whose step without drafts is the unit.
UNITS = {"bf16, vLLM": "bf16, vLLM", "bf16, packed": "bf16, vLLM", "int8, vLLM": "int8, vLLM"}
_NUMBERS = {"num_bits": 8, "type": "int", "symmetric": True}
INT8 = {
    "quant_method": "compressed-tensors", "format": "int-quantized",
    "quantization_status": "compressed", "ignore": ["lm_head"],
    "config_groups": {"group_0": {
        "targets": ["Linear"],
        "weights": {**_NUMBERS, "strategy": "channel", "dynamic": False},
        "input_activations": {**_NUMBERS, "strategy": "token", "dynamic": True},
    }},
}  # fmt: skip


# An engine's process


def write_target(model: Model, side: Side, layers: int, folder: Path) -> dict[str, Any]:
    """Writes the config of a target of so many layers; returns it."""
    config = {**model.config, "num_hidden_layers": layers}
    if side.int8:
        config["quantization_config"] = INT8
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return config


def write_head(model: Model, target: dict[str, Any], folder: Path) -> None:
    """Writes a random head of the published shape, reading as many layers as there are."""
    import torch

    hidden = target["hidden_size"]
    ids = tuple(range(min(model.features, target["num_hidden_layers"])))
    shape = {
        "hidden_size": hidden, "intermediate_size": target["intermediate_size"],
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": target["vocab_size"], "target_hidden_size": hidden, "target_layer_ids": ids,
        "max_position_embeddings": target["max_position_embeddings"],
    }  # fmt: skip

    def randomize(head: torch.nn.Module) -> Any:
        head.to_empty(device="cpu")
        for name, parameter in head.state_dict().items():
            is_norm = parameter.dim() == 1 and "norm" in name
            parameter.fill_(1) if is_norm else parameter.normal_(std=parameter.shape[-1] ** -0.5)
        return head

    torch.set_default_dtype(torch.bfloat16)
    if model.method == "eagle3_tree":
        from vllm_specplug.methods.eagle3_tree.checkpoint import save_eagle3_head
        from vllm_specplug.methods.eagle3_tree.config import Eagle3Config
        from vllm_specplug.methods.eagle3_tree.head import Eagle3Head

        with torch.device("meta"):
            eagle = Eagle3Head(Eagle3Config(**shape, draft_vocab_size=DRAFT_VOCAB))
        save_eagle3_head(
            folder, randomize(eagle), target_ids=torch.arange(DRAFT_VOCAB),
            lm_head=torch.randn(DRAFT_VOCAB, hidden) / hidden**0.5,
        )  # fmt: skip
    else:
        from vllm_specplug.methods.block.checkpoint import save_block_head
        from vllm_specplug.methods.block.config import BlockHeadConfig
        from vllm_specplug.methods.block.head import BlockHead

        with torch.device("meta"):
            block = BlockHead(
                BlockHeadConfig(
                    **shape,
                    num_hidden_layers=5,
                    draft_vocab_size=target["vocab_size"],
                    block_size=BLOCK,
                    mask_token_id=target["vocab_size"] - 1,
                )  # fmt: skip
            )
        save_block_head(folder, randomize(block))
    torch.set_default_dtype(torch.float32)


def measure(model: Model, side: Side, layers: int, args: Any) -> dict[str, Any]:
    """Median milliseconds of a step beside drafting ("verify"), and of drafting ("draft"), by depth
    and by the nodes that the step verifies; "0" is a plain step. They are of the main thread's CPU
    time, which waits for the others busily: other processes delay it less than the clock."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

    folder = Path(tempfile.mkdtemp())
    config = write_target(model, side, layers, folder / "target")
    write_head(model, config, folder / "head")
    import torch

    torch.set_num_threads(args.threads)
    speculative = {
        "method": model.method, "model": str(folder / "head"), "target_products": side.products,
        "num_speculative_tokens": max(NODES), "max_request_budget": max(NODES), "tree_budget": 0,
        "ngram_topk": 0,
    }  # fmt: skip
    llm = make_engine(
        str(folder / "target"), speculative, eager=args.eager, load_format="dummy",
        skip_tokenizer_init=True, max_num_seqs=1, max_model_len=CONTEXT + 128,
        max_num_batched_tokens=CONTEXT + 128, enable_prefix_caching=True, async_scheduling=False,
        num_gpu_blocks_override=64,
    )  # fmt: skip
    for file in sorted(folder.rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    runner = worker_of(llm).model_runner
    propose = runner.propose_draft_token_ids
    drafted: list[tuple[float, int]] = []

    def timed_propose(*given: Any, **named: Any) -> Any:
        start = time.thread_time()
        drafts = propose(*given, **named)
        drafted.append((1e3 * (time.thread_time() - start), len(drafts[0])))
        return drafts

    runner.propose_draft_token_ids = timed_propose
    rng = random.Random(0)
    prompt = {"prompt_token_ids": [rng.randrange(1000, 30000) for _ in range(CONTEXT)]}
    depths = [layers] if layers == model.config["num_hidden_layers"] else [layers, 1]
    times: dict[Any, Any] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    # The first round computes the prompt and compiles products for these rows.
    for number in range(1 + args.rounds):
        for depth in depths:
            for nodes in (0, *NODES):
                with _first_layers(runner.model.model.layers, depth):
                    steps = args.steps if number else 0
                    found = _request(llm, prompt, nodes, steps, drafted)
                for verify, draft in found:
                    times[str(depth)][str(nodes)]["verify"].append(verify)
                    times[str(depth)][str(nodes)]["draft"].append(draft)
    return {
        depth: {
            nodes: {part: median(values) for part, values in parts.items()}
            for nodes, parts in by_nodes.items()
        }
        for depth, by_nodes in times.items()
    }


@contextmanager
def _first_layers(layers: Any, depth: int) -> Iterator[None]:
    """While entered, a forward passes through the first `depth` layers alone."""
    for layer in layers[depth:]:
        layer.forward = lambda positions, hidden_states, residual, **_: (hidden_states, residual)
    try:
        yield
    finally:
        for layer in layers[depth:]:
            del layer.forward


def _request(
    llm: Any, prompt: Any, nodes: int, steps: int, drafted: list[tuple[float, int]]
) -> list[tuple[float, float]]:
    """Milliseconds of each step of one request that verifies so many nodes: beside drafting, and
    drafting."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0.0, max_tokens=CONTEXT, ignore_eos=True, detokenize=False,
        extra_args={"specplug_tree_budget": nodes},
    )  # fmt: skip
    engine = llm.llm_engine
    name = str(time.monotonic_ns())
    engine.add_request(name, prompt, params)
    found: list[tuple[float, float]] = []
    # The prompt's step, and the first one of its kind.
    for step in range(2 + steps):
        drafted.clear()
        start = time.thread_time()
        engine.step()
        whole = 1e3 * (time.thread_time() - start)
        ((draft, proposed),) = drafted
        assert proposed == nodes, f"{proposed} nodes were drafted, not {nodes}"
        if step > 1:
            found.append((whole - draft, draft))
    engine.abort_request([name])
    engine.step()
    return found


# The comparison


def whole(times: dict[int, float], layers: int) -> float:
    """Milliseconds at a depth: on the line through the least and the largest measured one."""
    low, high = min(times), max(times)
    if high == layers:
        return times[high]
    return times[high] + (layers - high) * (times[high] - times[low]) / (high - low)


def whole_times(cells: Cells, name: str) -> dict[str, dict[str, dict[str, float]]]:
    """Of a model: milliseconds at its whole depth, by side, nodes and part."""
    depth = MODELS[name].config["num_hidden_layers"]
    found: dict[str, dict[str, dict[str, float]]] = {}
    for side in SIDES:
        own = {
            int(layers): ms
            for cell in cells
            if (cell["model"], cell["side"]) == (name, side)
            for layers, ms in cell["ms"].items()
        }
        if not own:
            continue
        deepest = own[max(own)]
        found[side] = {
            nodes: {
                "verify": whole({n: ms[nodes]["verify"] for n, ms in own.items()}, depth),
                # A head does not grow with its target, and the deepest one reads all its layers.
                "draft": deepest[nodes]["draft"],
            }
            for nodes in deepest
        }
    return found


def sections_of(name: str, times: dict[str, dict[str, dict[str, float]]]) -> list[Section]:
    """Tables of a model: milliseconds, plain steps, predicted speeds."""
    model, lines, predicted = MODELS[name], [], []
    for side, by_nodes in times.items():
        if UNITS[side] not in times:
            continue
        unit = times[UNITS[side]]["0"]["verify"]
        plain = f"{by_nodes['0']['verify']:.0f} ms, {by_nodes['0']['verify'] / unit:.2f}"
        verify = [f"{by_nodes[str(n)]['verify'] / unit:.2f}" for n in NODES]
        drafts = [f"{by_nodes[str(n)]['draft'] / unit:.2f}" for n in NODES]
        lines += [[side, "step", plain, *verify], [side, "drafts", "", *drafts]]
        for nodes, published in model.published.items():
            cost = sum(by_nodes[str(nodes)].values()) / unit
            cells = [f"{tokens:.2f}: {tokens / cost:.2f} x" for tokens in published.values()]
            predicted.append([side, str(nodes), f"{cost:.2f}", *cells])
    prompts = list(next(iter(model.published.values())))
    return [
        Section(
            ("products", "in plain steps", "no drafts", *(f"{n} nodes" for n in NODES)),
            lines,
            title=model.title,
        ),
        Section(
            ("products", "nodes", "plain steps a round", *prompts),
            predicted,
            title=f"{model.title}: predicted, not measured",
            notes=[f"Tokens per step as published ({model.source}), over the round's cost."],
        ),
    ]


def page(cells: Cells, threads: int) -> ResultPage:
    """The page of what was measured."""
    sections, data = [], []
    for name, model in MODELS.items():
        times = whole_times(cells, name)
        if not times:
            continue
        sections += sections_of(name, times)
        data.append({"model": name, "layers": model.config["num_hidden_layers"], "ms": times})
    measured = {
        name: sorted({n for c in cells if c["model"] == name for n in c["ms"]}) for name in MODELS
    }
    depths = "; ".join(
        f"{name} {' and '.join(layers)} of {MODELS[name].config['num_hidden_layers']}"
        for name, layers in measured.items()
        if layers
    )
    return ResultPage(
        name="real_sizes",
        title="Steps at the sizes of served models",
        about=f"One request with {CONTEXT} tokens of context on {threads} thread(s), not compiled. "
        "Weights are random, shapes are the published ones, embedding and LM head included. CPU "
        f"times were measured with the first layers ({depths}) and continued linearly to the whole "
        "depth. The unit is the step without drafts with vLLM's products and the same weights. "
        "`step` is everything but drafting; `drafts` includes what the head reads of committed "
        "tokens, with int8 weights as is the default here. int8 products are vLLM's W8A8.",
        sections=sections,
        data={"whole": data, "measured": cells},
        made_by=[cell["provenance"] for cell in cells],
    )


def main() -> None:
    benchmark = Benchmark("real_sizes", __doc__)
    benchmark.parser.set_defaults(eager=True)
    add = benchmark.parser.add_argument
    add("--model", choices=list(MODELS), nargs="+", default=list(MODELS))
    add("--side", choices=list(SIDES), nargs="+", default=list(SIDES))
    add("--layers", type=int, help="of a target that are served; default: by model")
    add("--threads", type=int, default=1)
    add("--steps", type=int, default=3, help="of each request")
    add("--rounds", type=int, default=1)
    add("--minutes", type=float, default=60.0, help="start no engine after this long")
    add("--report-only", action="store_true", help="make the page of what was measured")
    add("--measure", nargs=3, metavar=("MODEL", "SIDE", "LAYERS"), help="internal: one engine")
    args = benchmark.parse()
    if args.measure:
        name, side, layers = args.measure
        found = measure(MODELS[name], SIDES[side], int(layers), args)
        print(_MARK + json.dumps(found), flush=True)
        return
    store = CellStore(args.out / "real_sizes_cells.jsonl")
    record = benchmark.provenance(args)
    key = digest([args.threads, args.steps, args.rounds])
    deadline = time.monotonic() + 60 * args.minutes
    places = [
        (name, side, layers)
        for side in args.side
        for name in args.model
        for layers in [args.layers or MODELS[name].layers]
    ]
    for place in places if not args.report_only else ():
        if store.get(key, place) is not None or time.monotonic() > deadline:
            continue
        name, side, layers = place
        print(f"{name}, {side}, {layers} layers", file=sys.stderr)
        values = {"model": name, "side": side, "layers": layers, "provenance": record}
        times = _in_child(args, place)
        if times is not None:
            store.add(key, place, {**values, "ms": times})
    cells = store.rows(key)
    if not cells:
        benchmark.parser.exit(1, f"{store.path} holds no results of these settings\n")
    benchmark.publish(args, page(cells, args.threads))


def _in_child(args: Any, place: tuple[str, str, int]) -> dict[str, Any] | None:
    """What an engine of its own process measures; None, with its error shown, where it ended."""
    flags = [f"--{flag}={getattr(args, flag)}" for flag in ("threads", "steps", "rounds")]
    done = subprocess.run(
        [sys.executable, __file__, "--allow-changes", *flags, "--measure", *map(str, place)],
        env={**os.environ, "OMP_NUM_THREADS": str(args.threads)},
        capture_output=True,
        text=True,
    )
    for line in done.stdout.splitlines():
        if line.startswith(_MARK):
            found: dict[str, Any] = json.loads(line.removeprefix(_MARK))
            return found
    print(f"the engine ended:\n{done.stderr[-4000:]}", file=sys.stderr)
    return None


if __name__ == "__main__":
    main()
