# SPDX-License-Identifier: Apache-2.0
"""Verification and drafts at the sizes of served models, in units of a plain step.

    python bench/real_sizes.py [--model qwen3-4b llama-3.1-8b] [--layers 5] [--threads 1]

Targets and heads have the published shapes and random weights; nothing is downloaded. A target is
served with a few layers and with a single one, and step times are continued linearly from these
two depths to the whole one: layers are alike, and a single one is larger than the caches. With the
target's own depth in `--layers` the whole model is measured. Each engine has a process of its own;
those of one depth whose times are divided by each other measure in turns. What is measured is kept,
and a run that is started again goes on from there.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from harness import Benchmark, Cells, execution, make_engine, worker_of
from sides import Side, answer, in_turns

from vllm_specplug.bench.cells import CellStore, digest
from vllm_specplug.bench.result_page import ResultPage, Section

NODES = (8, 16, 32, 64, 128)
CONTEXT = 512
BLOCK = 16
DRAFT_VOCAB = 32000


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
class Products:
    """How the target's products are made."""

    option: str
    """Value of `target_products`."""
    int8: bool = False


SIDES = {
    "bf16, vLLM": Products("vllm"),
    "bf16, packed": Products("packed"),
    "int8, vLLM": Products("vllm", int8=True),
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


def write_target(model: Model, products: Products, layers: int, folder: Path) -> dict[str, Any]:
    """Writes the config of a target of so many layers; returns it."""
    config = {**model.config, "num_hidden_layers": layers}
    if products.int8:
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


def serve(model: Model, products: Products, layers: int, args: Any) -> None:
    """An engine's process: median milliseconds of a step beside drafting ("verify"), and of
    drafting ("draft"), for the nodes that are asked for; none is a plain step. They are of the main
    thread's CPU time, which waits for the others busily: other processes delay it less than the
    clock."""
    folder = Path(tempfile.mkdtemp())
    config = write_target(model, products, layers, folder / "target")
    write_head(model, config, folder / "head")
    import torch

    torch.set_num_threads(args.threads)
    speculative = {
        "method": model.method, "model": str(folder / "head"), "target_products": products.option,
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
    folder.rmdir()
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

    def measure(nodes: int) -> dict[str, float]:
        # All others are divided by plain steps.
        steps = args.steps if nodes else 4 * args.steps
        verify, draft = zip(*_request(llm, prompt, nodes, steps, drafted), strict=True)
        return {"verify": median(verify), "draft": median(draft)}

    answer(measure)


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

Times = dict[str, dict[str, float]]
"""Milliseconds by nodes and part of a step."""
MEDIANS = "medians"


def whole(times: dict[int, float], layers: int) -> float:
    """Milliseconds at a depth: on the line through the least and the largest measured one."""
    low, high = min(times), max(times)
    if high == layers:
        return times[high]
    return times[high] + (layers - high) * (times[high] - times[low]) / (high - low)


def at_whole_depth(by_layers: dict[int, Times], layers: int) -> Times:
    """Times of the whole target, from those of the measured depths."""
    deepest = by_layers[max(by_layers)]
    return {
        nodes: {
            "verify": whole({n: ms[nodes]["verify"] for n, ms in by_layers.items()}, layers),
            # A head does not grow with its target; the deepest one reads all its layers.
            "draft": deepest[nodes]["draft"],
        }
        for nodes in deepest
    }


def medians(rounds: Sequence[Times]) -> Times:
    """Of each time over the rounds."""
    return {
        nodes: {part: median(ms[nodes][part] for ms in rounds) for part in parts}
        for nodes, parts in rounds[0].items()
    }


def whole_times(cells: Cells, name: str) -> dict[str, dict[str, Times]]:
    """Of a model: times at its whole depth, by side and round. The round `MEDIANS` is continued
    from the medians at each depth: continuing multiplies what disturbs a single round."""
    depth = MODELS[name].config["num_hidden_layers"]
    found: dict[str, dict[str, Times]] = {}
    for side in SIDES:
        rounds: dict[str, dict[int, Times]] = defaultdict(dict)
        for cell in cells:
            if (cell["model"], cell["side"]) == (name, side):
                rounds[str(cell["round"])][cell["layers"]] = cell["ms"]
        rounds = {n: own for n, own in sorted(rounds.items()) if len(own) > 1 or depth in own}
        if not rounds:
            continue
        layers = set.intersection(*map(set, rounds.values()))
        rounds[MEDIANS] = {n: medians([own[n] for own in rounds.values()]) for n in layers}
        found[side] = {n: at_whole_depth(own, depth) for n, own in rounds.items()}
    return found


def weights(config: dict[str, Any]) -> tuple[int, int]:
    """Numbers in the matrices that a step multiplies: all layers', the LM head's."""
    hidden, heads = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * heads, config["num_key_value_heads"] * heads
    layer = hidden * (2 * queries + 2 * keys + 3 * config["intermediate_size"])
    return config["num_hidden_layers"] * layer, hidden * config["vocab_size"]


def spread(values: dict[str, float], digits: int, unit: str = "") -> str:
    """The value of the medians, in brackets the lowest and the highest of the rounds."""
    rounds = [value for number, value in values.items() if number != MEDIANS]
    low, high = min(rounds), max(rounds)
    return f"{values[MEDIANS]:.{digits}f}{unit} ({low:.{digits}f} to {high:.{digits}f})"


def sections_of(name: str, times: dict[str, dict[str, Times]]) -> list[Section]:
    """Tables of a model: plain steps, what limits them, predicted speeds."""
    model, lines, limits, predicted = MODELS[name], [], [], []
    in_layers, in_head = weights(model.config)
    few, many = NODES[-2:]
    for side, rounds in times.items():
        units = times.get(UNITS[side], {})
        shared = {n: (own, units[n]["0"]["verify"]) for n, own in rounds.items() if n in units}
        if not shared:
            continue

        def steps(nodes: int, *parts: str, shared: Any = shared) -> dict[str, float]:
            return {
                number: sum(own[str(nodes)][part] for part in parts) / unit
                for number, (own, unit) in shared.items()
            }

        plain = {n: own["0"]["verify"] for n, (own, _) in shared.items()}
        usual = rounds[MEDIANS]
        more = usual[str(many)]["verify"] - usual[str(few)]["verify"]
        verify = [spread(steps(n, "verify"), 2) for n in (0, *NODES)]
        drafts = [spread(steps(n, "draft"), 2) for n in NODES]
        lines += [
            [side, "step", spread(plain, 0, " ms"), *verify],
            [side, "drafts", "", "", *drafts],
        ]
        size = in_layers * (1 if SIDES[side].int8 else 2) + in_head * 2
        flops = 2 * (many - few) * (in_layers + in_head)
        reading = spread({n: size / ms / 1e6 for n, ms in plain.items()}, 1)
        multiplying = f"{flops / more / 1e6:.0f}"
        limits.append([side, f"{size / 1e9:.2f}", reading, multiplying])
        for nodes, published in model.published.items():
            cost = steps(nodes, "verify", "draft")[MEDIANS]
            gains = [f"{tokens:.2f}: {tokens / cost:.2f} x" for tokens in published.values()]
            predicted.append([side, str(nodes), f"{cost:.2f}", *gains])
    prompts = list(next(iter(model.published.values())))
    return [
        Section(
            ("products", "in plain steps", "plain", "no drafts", *(f"{n} nodes" for n in NODES)),
            lines,
            title=model.title,
        ),
        Section(
            ("products", "GB of weights", "GB/s", "GFLOP/s"),
            limits,
            title=f"{model.title}: reading and multiplying",
            notes=[
                "GB/s: the weights over the step without drafts. GFLOP/s: the products of "
                f"{many - few} rows over what {many} nodes take longer than {few}, by the medians."
            ],
        ),
        Section(
            ("products", "nodes", "plain steps a round", *prompts),
            predicted,
            title=f"{model.title}: predicted, not measured",
            notes=[f"Tokens per step as published ({model.source}), over the round's cost."],
        ),
    ]


def page(cells: Cells, threads: int, how: str) -> ResultPage:
    """The page of what was measured; `how` the models ran."""
    sections, data, depths = [], [], []
    for name, model in MODELS.items():
        times = whole_times(cells, name)
        if not times:
            continue
        sections += sections_of(name, times)
        layers = model.config["num_hidden_layers"]
        data.append({"model": name, "layers": layers, "ms": times})
        measured = sorted({cell["layers"] for cell in cells if cell["model"] == name})
        depths.append(f"{name}: {' and '.join(map(str, measured))} of {layers}")
    return ResultPage(
        name="real_sizes",
        title="Steps at the sizes of served models",
        about=f"One request with {CONTEXT} tokens of context on {threads} thread(s), {how}. "
        "Weights are random, shapes are the published ones, embedding and LM head included. CPU "
        f"times were measured with few layers ({'; '.join(depths)}) and continued linearly to the "
        "whole depth, from the medians over the rounds; in brackets, continued from single rounds, "
        "the lowest and the highest. The unit is the step without drafts of the same rounds, with "
        "vLLM's products and the same weights; engines of one depth measured in turns. `step` is "
        "everything but drafting; `drafts` includes what the head reads of committed tokens, with "
        "int8 weights as is the default here. int8 products are vLLM's W8A8; the LM head stays in "
        "bfloat16 there.",
        sections=sections,
        data=data,
        made_by=[cell["provenance"] for cell in cells],
    )


def main() -> None:
    benchmark = Benchmark("real_sizes", __doc__)
    add = benchmark.parser.add_argument
    add("--model", choices=list(MODELS), nargs="+", default=list(MODELS))
    add("--side", choices=list(SIDES), nargs="+", default=list(SIDES))
    add("--layers", type=int, help="of a target that are served; default: by model")
    add("--threads", type=int, default=1)
    add("--steps", type=int, default=2, help="of each request, 4 times as many plain ones")
    add("--rounds", type=int, default=5)
    add("--minutes", type=float, default=60.0, help="start no engine after this long")
    add("--report-only", action="store_true", help="make the page of what was measured")
    add("--measure", nargs=3, metavar=("MODEL", "SIDE", "LAYERS"), help="internal: one engine")
    args = benchmark.parse()
    if args.measure:
        name, side, layers = args.measure
        serve(MODELS[name], SIDES[side], int(layers), args)
        return
    store = CellStore(args.out / f"{args.name}_cells.jsonl")
    record = benchmark.provenance(args)
    key = digest([execution(args), args.threads, args.steps])
    deadline = time.monotonic() + 60 * args.minutes
    places = [
        (name, [side for side in args.side if UNITS[side] == unit], layers)
        for name in args.model
        for unit in dict.fromkeys(UNITS[side] for side in args.side)
        for layers in depths_of(MODELS[name], args.layers)
    ]
    for name, sides, layers in places if not args.report_only else ():
        missing = [
            number
            for number in range(args.rounds)
            if any(store.get(key, (name, side, layers, number)) is None for side in sides)
        ]
        if not missing or time.monotonic() > deadline:
            continue
        print(f"{name}, {layers} layers: {'; '.join(sides)}", file=sys.stderr)
        rounds = in_turns(partial(_start, args, name, layers), sides, (0, *NODES), len(missing))
        for number, by_side in zip(missing, rounds, strict=True):
            for side, ms in by_side.items():
                values = {"model": name, "side": side, "layers": layers, "round": number, "ms": ms}
                place = (name, side, layers, number)
                store.add(key, place, {**values, "provenance": record})
    cells = store.rows(key)
    if not cells:
        benchmark.parser.exit(1, f"{store.path} holds no results of these settings\n")
    benchmark.publish(args, page(cells, args.threads, execution(args)))


def depths_of(model: Model, layers: int | None) -> Sequence[int]:
    """The depths to measure: a few layers and one, or the whole target."""
    layers = layers or model.layers
    return [layers] if layers == model.config["num_hidden_layers"] else [layers, 1]


def _start(args: Any, name: str, layers: int, side: str) -> Side:
    flags = [f"--threads={args.threads}", f"--steps={args.steps}"]
    flags += ["--eager"] if args.eager else []
    place = ["--measure", name, side, str(layers)]
    return Side(__file__, [*flags, *place], {"OMP_NUM_THREADS": str(args.threads)})


if __name__ == "__main__":
    main()
