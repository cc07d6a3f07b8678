# SPDX-License-Identifier: Apache-2.0
"""Step times of a real size and a real model on a device: `make gpu-e2e`.

    python bench/gpu/e2e.py --out OUT [--parts smoke,smollm,ar,verify,stock] [--seconds 560]

`ar` and `verify` run a Qwen3-8B-shaped target with dummy weights and a random JetSpec head of the
published shape (5 layers, block 16): a plain decode step, a step that verifies 16-256 nodes, the
draft in it, and the speed-up that these times give with the published acceptance lengths. `stock`
is a step of vLLM's own EAGLE-3 chain over the same target. `smollm`
runs SmolLM2-135M with the heads of this repository, plainly and with trees, on real prompts, and
compares outputs; `model` does so with `--model` and its `--head`. `--device cpu` is a dry run of
everything with a tiny model.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "gpu"))
# Last: the installed package goes first; dry runs use the checkout's tests.
sys.path.append(str(ROOT))

from demo_prompts import demo_prompts  # noqa: E402
from report import Report  # noqa: E402

ENGINE = Path(__file__).with_name("e2e_engine.py")
# Mean acceptance lengths of JetSpec on Qwen3-8B at temperature 0, as its paper gives them (tables
# of linear drafts for 16, of trees above), by node budget.
PUBLISHED = {
    16: {"GSM8K": 6.00, "HumanEval": 5.32, "MT-Bench": 3.98},
    64: {"GSM8K": 6.56, "HumanEval": 6.06, "MT-Bench": 4.77},
    128: {"GSM8K": 8.05, "HumanEval": 7.28, "MT-Bench": 5.52},
    256: {"GSM8K": 8.62, "HumanEval": 7.78, "MT-Bench": 5.94},
}
TEXTS = (
    "Explain photosynthesis to a child in a few sentences.",
    "Write a Python function that returns the prime numbers below n.",
    "A shop sells pens for 3 dollars. Ann buys 12 and pays with 50. What is left?",
    "Give three tips for learning a language.",
)
QWEN3_8B = {
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 40960, "rope_theta": 1e6, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "bos_token_id": 151643, "eos_token_id": 151645,
}  # fmt: skip


class OutOfTime(Exception):
    """Another engine would not start in what is left."""


class Bench:
    """The parts, over one folder of models."""

    def __init__(self, args: argparse.Namespace, report: Report, folder: Path) -> None:
        self.args, self.report, self.folder = args, report, folder
        self.on_gpu = args.device == "cuda"
        self.ar_ms: dict[tuple[int, int], float] = {}
        self.longest_start_s = 0.0

    # -- models -------------------------------------------------------------------------------

    def dummy_target(self) -> Path:
        """A config of Qwen3-8B's shape; weights are made up at load."""
        path = self.folder / "qwen3-8b-shape"
        if not path.exists():
            if not self.on_gpu:
                from tests.e2e.tiny import make_target

                return make_target(path, 64)
            from transformers import Qwen3Config

            config = Qwen3Config(**QWEN3_8B, architectures=["Qwen3ForCausalLM"], dtype="bfloat16")
            config.save_pretrained(path)
        return path

    def dummy_head(self) -> Path:
        """A random JetSpec head of the published shape."""
        path = self.folder / "jetspec-head"
        if path.exists():
            return path
        if not self.on_gpu:
            from tests.e2e.tiny import make_head

            return make_head(path, 64)
        import torch

        from vllm_specplug.methods.block.checkpoint import save_block_head
        from vllm_specplug.methods.block.config import BlockHeadConfig
        from vllm_specplug.methods.block.head import BlockHead

        with torch.device("cuda"):
            head = BlockHead(
                BlockHeadConfig(
                    hidden_size=4096, intermediate_size=12288, num_hidden_layers=5,
                    num_attention_heads=32, num_key_value_heads=8, head_dim=128, vocab_size=151936,
                    draft_vocab_size=151936, target_hidden_size=4096,
                    target_layer_ids=(1, 9, 17, 25, 33), block_size=16, causal=True,
                    mask_token_id=151669, rope_theta=1e6,
                )
            )  # fmt: skip
            with torch.no_grad():
                head.mask_embedding.normal_()
        save_block_head(path, head.cpu())
        torch.cuda.empty_cache()
        return path

    def stock_head(self) -> Path:
        """A config of an EAGLE-3 head for the target; its weights are made up at load."""
        path = self.folder / "eagle3-head"
        if not path.exists():
            if not self.on_gpu:
                from tests.e2e.tiny import make_eagle3_head

                return make_eagle3_head(path, 64)
            from vllm_specplug.methods.eagle3_tree.config import Eagle3Config, default_target_layers

            config = Eagle3Config(
                hidden_size=4096, intermediate_size=12288, num_attention_heads=32,
                num_key_value_heads=8, head_dim=128, vocab_size=151936, draft_vocab_size=32000,
                target_hidden_size=4096, target_layer_ids=default_target_layers(36),
                max_position_embeddings=40960, rope_theta=1e6,
            )  # fmt: skip
            path.mkdir()
            (path / "config.json").write_text(json.dumps(config.to_dict()))
        return path

    def engine_args(self, model: Path, **changes: Any) -> dict[str, Any]:
        engine: dict[str, Any] = {
            "model": str(model), "skip_tokenizer_init": True, "max_model_len": 4096,
            "max_num_seqs": 32, "max_num_batched_tokens": 16384, "dtype": "bfloat16",
            "gpu_memory_utilization": 0.6, **changes,
        }  # fmt: skip
        if self.args.attention:
            engine["attention_backend"] = self.args.attention
        if self.args.eager:
            engine["enforce_eager"] = True
        if self.args.compilation:
            engine["compilation_config"] = json.loads(self.args.compilation)
        if not self.on_gpu:
            engine |= {
                "dtype": "float32", "max_model_len": 256, "max_num_seqs": 4,
                "max_num_batched_tokens": 1024, "enforce_eager": True, "block_size": 32,
            }  # fmt: skip
            engine.pop("gpu_memory_utilization")
            engine.pop("load_format", None)
        return engine

    # -- running ------------------------------------------------------------------------------

    def check_time(self) -> None:
        """An engine is not started to be cut short: what is left must do for the slowest start so
        far and half of it again for calls.

        Raises:
            OutOfTime: when it does not.
        """
        needed, left = 1.5 * self.longest_start_s, self.report.seconds_left
        if left < needed:
            raise OutOfTime(
                f"{left:.0f} s are left, and an engine took {self.longest_start_s:.0f} s to start"
            )

    def run(
        self, engine: dict, calls: list[dict], speculative: dict | None = None,
        limit_s: float = 240, stock: bool = False,
    ) -> dict[str, Any]:  # fmt: skip
        """One engine in a process of its own; what it had finished counts if it dies. `stock` for a
        method of vLLM's, which takes none of our options."""
        self.check_time()
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            job, result, log = (Path(folder) / n for n in ("job.json", "result.json", "log"))
            if speculative is not None and self.on_gpu and not stock:
                speculative = {**speculative, "tree_kernel": self.args.tree_kernel}
            job.write_text(
                json.dumps({"engine": engine, "calls": calls, "speculative": speculative})
            )
            env = dict(os.environ)
            if not self.on_gpu:
                env |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                        "OMP_NUM_THREADS": "1"}  # fmt: skip
            problem = None
            with log.open("w") as stream:
                try:
                    code = subprocess.run(
                        [sys.executable, str(ENGINE), str(job), str(result)], stdout=stream,
                        stderr=subprocess.STDOUT, env=env,
                        timeout=max(20.0, min(limit_s, self.report.deadline - time.monotonic())),
                    ).returncode  # fmt: skip
                    if code:
                        problem = f"engine ended with {code}"
                except subprocess.TimeoutExpired:
                    problem = "engine ran out of time"
            text = log.read_text(errors="replace")
            kernel = [line[-160:] for line in text.splitlines() if "Tree attention: " in line]
            data = json.loads(result.read_text()) if result.is_file() else {"calls": []}
            if problem:
                self.report.row(problem=problem, log=text[-1500:])
                if not data["calls"]:
                    raise RuntimeError(f"{problem}: {text[-800:]}")
            # With the imports of its process and the loading of a model.
            calls_s = sum(c["seconds"] + c["first_token_seconds"] for c in data["calls"])
            taken = time.monotonic() - started - calls_s
            self.longest_start_s = max(self.longest_start_s, taken)
            data["kernel"] = kernel[:2]
            return data

    def cells(self) -> list[tuple[int, int]]:
        """(batch, context)."""
        return [(1, 1024), (1, 3072), (8, 1024)] if self.on_gpu else [(1, 24)]

    # -- parts --------------------------------------------------------------------------------

    def smoke(self, record: dict) -> None:
        """The 8B shape, eager, with trees: does it start and step at all."""
        calls = [{"batch": 2, "context": 40, "tokens": 12, "phases": True}]
        data = self.run(
            self.engine_args(self.dummy_target(), load_format="dummy", enforce_eager=True), calls,
            self.jetspec(16), limit_s=200,
        )  # fmt: skip
        record.update(data)
        assert data["calls"][0]["drafts"] > 0, "nothing was drafted"

    def jetspec(self, nodes: int, **changes: Any) -> dict[str, Any]:
        options = {
            "method": "jetspec", "model": str(self.dummy_head()), "ngram_topk": 0,
            "num_speculative_tokens": nodes, "tree_budget": nodes,
            "max_step_rows": 16384 if self.on_gpu else 1024,
        }  # fmt: skip
        return {**options, **changes}

    def ar(self, record: dict) -> None:
        """A plain decode step."""
        tokens = 128 if self.on_gpu else 12
        calls = [{"batch": b, "context": c, "tokens": tokens} for b, c in self.cells()]
        data = self.run(self.engine_args(self.dummy_target(), load_format="dummy"), calls)
        record["start_seconds"] = data["start_seconds"]
        for call in data["calls"]:
            steps = tokens - 1
            ms = 1e3 * (call["seconds"] - call["first_token_seconds"]) / steps
            self.ar_ms[call["batch"], call["context"]] = ms
            self.report.row(part="ar", batch=call["batch"], context=call["context"], step_ms=ms)

    def verify(self, record: dict) -> None:
        """A step that verifies N nodes and drafts, by node budget, in one engine."""
        most = 256 if self.on_gpu else 9
        budgets = (64, 16, 256, 128) if self.on_gpu else (9, 3)
        tokens = 48 if self.on_gpu else 8
        calls = []
        for batch, context in self.cells():
            for nodes in budgets:
                common = {
                    "batch": batch, "context": context, "tokens": tokens, "nodes": nodes,
                    "extra_args": {"specplug_tree_budget": nodes},
                }  # fmt: skip
                calls += [common, {**common, "phases": True}]
        data = self.run(
            self.engine_args(self.dummy_target(), load_format="dummy"), calls, self.jetspec(most),
            limit_s=300,
        )  # fmt: skip
        record.update(kernel=data["kernel"], start_seconds=data["start_seconds"])
        for call in data["calls"]:
            steps = max(1.0, call["drafts"] / call["batch"])
            ms = 1e3 * (call["seconds"] - call["first_token_seconds"]) / steps
            row = {"part": "verify", "batch": call["batch"], "context": call["context"],
                   "nodes": call["nodes"], "step_ms": ms, **call["phases_ms"]}  # fmt: skip
            plain = self.ar_ms.get((call["batch"], call["context"]))
            if plain and not call.get("phases"):
                row["of_plain_step"] = ms / plain
                for task, length in PUBLISHED.get(call["nodes"], {}).items():
                    row[f"speedup {task} (published length {length})"] = length * plain / ms
            self.report.row(**row)

    def stock(self, record: dict) -> None:
        """A step of vLLM's own chain of 3 over the same target."""
        tokens = 48 if self.on_gpu else 8
        nodes = 3
        calls = [
            {"batch": b, "context": c, "tokens": tokens, "nodes": nodes} for b, c in self.cells()
        ]
        chain = {
            "method": "eagle3", "model": str(self.stock_head()), "num_speculative_tokens": nodes,
        }  # fmt: skip
        engine = self.engine_args(self.dummy_target()) | {"load_format": "dummy"}
        data = self.run(engine, calls, chain, stock=True)
        record["start_seconds"] = data["start_seconds"]
        for call in data["calls"]:
            steps = max(1.0, call["drafts"] / call["batch"])
            ms = 1e3 * (call["seconds"] - call["first_token_seconds"]) / steps
            self.report.row(
                part="stock", batch=call["batch"], context=call["context"], nodes=nodes, step_ms=ms
            )

    def compare(
        self, part: str, record: dict, target: Path | str, prompts: list[list[int]],
        speculative: dict[str, Any], budgets: Sequence[int], dtype: str, eager: bool = False,
    ) -> None:  # fmt: skip
        """A model plainly and with trees of each budget, all in one engine: tokens per second, and
        whether outputs are equal."""
        tokens = 256 if self.on_gpu else 8
        call = {"prompts": prompts, "batch": len(prompts), "context": 0, "tokens": tokens,
                "ignore_eos": not self.on_gpu, "keep_tokens": True}  # fmt: skip
        calls = [call, *({**call, "prompts": [p], "batch": 1} for p in prompts[:2])]
        engine = self.engine_args(target, max_model_len=2048, dtype=dtype)
        if eager:
            engine["enforce_eager"] = True
        if not self.on_gpu:
            engine |= {"max_model_len": 256, "dtype": "float32"}
        # Warm-up first: the first call of a shape compiles.
        plain = self.run(engine, [call, *calls])["calls"][1:]
        of_budgets = [
            {**c, "nodes": nodes, "extra_args": {"specplug_tree_budget": nodes}}
            for nodes in budgets
            for c in calls
        ]
        tree = self.run(engine, [of_budgets[0], *of_budgets], speculative)
        for number, b in enumerate(tree["calls"][1:]):
            if number % len(calls) >= len(plain):
                continue
            a, nodes = plain[number % len(calls)], b["nodes"]
            same = a["token_ids"] == b["token_ids"]
            self.report.row(
                part=part, dtype=dtype, nodes=nodes, batch=a["batch"], same_output=same,
                plain_tok_s=a["generated"] / a["seconds"],
                tree_tok_s=b["generated"] / b["seconds"],
                speedup=(b["generated"] / b["seconds"]) / (a["generated"] / a["seconds"]),
                mean_acceptance_length=1 + b["accepted"] / max(1.0, b["drafts"]),
                kernel=tree["kernel"][:1],
            )  # fmt: skip
            # Two prompts are asked one by one.
            key = f"{dtype} {nodes} B{a['batch']}"
            outputs = record.setdefault("same_output", {})
            outputs[key] = outputs.get(key, True) and same

    def model(self, record: dict) -> None:
        """The model that was asked for, in its own dtype, with its users' defaults."""
        target = self.args.model or str(self.dummy_target())
        prompts = [[3, 7, 5, 3, 7], [9, 4, 9, 4]]
        if self.args.model:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(target)
            prompts = [tokenizer(text).input_ids for text in TEXTS]
        speculative: dict[str, Any] = {"method": "ngram_tree", "num_speculative_tokens": 16}
        if self.args.head:
            speculative = {"method": "tree", "model": self.args.head, "num_speculative_tokens": 64}
        budgets = [speculative["num_speculative_tokens"]]
        self.compare("model", record, target, prompts, speculative, budgets, "auto")

    def smollm(self, record: dict) -> None:
        """SmolLM2-135M and the heads of this repository: tokens per second and equal outputs."""
        if self.on_gpu:
            target, prompts = demo_prompts(TEXTS)
            head = str(ROOT / "heads" / "smollm2-135m-jetspec")
        else:
            target, prompts, head = self.dummy_target(), [[3, 7, 5], [9, 4]], str(self.dummy_head())
        budgets = (16, 64) if self.on_gpu else (3, 6)
        most = max(budgets)
        speculative = {"method": "jetspec", "model": head, "num_speculative_tokens": most,
                       "tree_budget": most, "max_step_rows": 1024}  # fmt: skip
        try:
            # float32 keeps greedy ties apart; in bfloat16 a near tie can round differently. It is
            # for outputs alone, so that nothing is compiled for it.
            for dtype in ("float32", "bfloat16") if self.on_gpu else ("float32",):
                self.compare(
                    "smollm", record, target, prompts, speculative, budgets, dtype,
                    eager=dtype == "float32",
                )  # fmt: skip
        finally:
            outputs = record.get("same_output", {})
            wrong = [k for k, same in outputs.items() if k.startswith("float32") and not same]
            assert not wrong, f"outputs differ in float32: {wrong}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/gpu-e2e"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--parts", default="smoke,smollm,ar,verify,stock")
    parser.add_argument("--seconds", type=float, default=560)
    parser.add_argument("--attention", help="vLLM's attention backend, e.g. TRITON_ATTN")
    parser.add_argument("--tree-kernel", default="auto")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs, no compilation")
    parser.add_argument("--compilation", help="vLLM's compilation_config, as JSON")
    parser.add_argument("--models", type=Path, help="folder of made-up models, kept between runs")
    parser.add_argument("--model", help="of part `model`: a folder or a name")
    parser.add_argument("--head", help="its draft head; n-gram trees without one")
    parser.add_argument("--name", default="gpu_e2e", help="of the result file")
    args = parser.parse_args()
    report = Report(args.out, args.name, args.seconds)
    models = args.models or Path(tempfile.mkdtemp(prefix="specplug-models-"))
    models.mkdir(parents=True, exist_ok=True)
    bench = Bench(args, report, models)
    for name in args.parts.split(","):
        if report.is_out_of_time:
            report.data["parts"][name] = {"status": "skipped", "reason": "no time was left"}
            continue
        with report.part(name) as record:
            try:
                getattr(bench, name)(record)
            except OutOfTime as reason:
                record.update(status="skipped", reason=str(reason))
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
