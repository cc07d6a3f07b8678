# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of a target with Qwen3-8B's shape: plain, with vLLM's own chain, and with
trees.

    python bench/gpu/speed.py --out OUT [--seconds 440] [--batches 1 8 32 4 16]

Acceptance is imposed, but all costs are real. The target's weights determine a known next token,
and the head's candidates are overwritten with acceptance from a model that is fitted to JetSpec's
published tables (see `speed_engine` and `acceptance_model`). Engines of a phase share the device
and take turns in each cell. A cell with trees counts only if its tokens are the target's chain.
`--device cpu` is a dry run with a tiny model.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "scripts" / "gpu")]
# Last: the installed package goes first; dry runs use the checkout's tests.
sys.path.append(str(ROOT))

from acceptance_model import PUBLISHED, fit, mean_acceptance  # noqa: E402
from report import Report  # noqa: E402
from speed_engine import impose_target, serve  # noqa: E402

QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "torch_dtype": "bfloat16",
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 40960, "rope_theta": 1e6, "rms_norm_eps": 1e-6,
    "hidden_act": "silu", "tie_word_embeddings": False, "bos_token_id": 151643,
    "eos_token_id": 151645,
}  # fmt: skip
WIDTH = 8
TINY_VOCAB = 64
AUX_LAYERS = (1, 9, 17, 25, 33)


# By published head: our method and its draft depth, and vLLM's method for chains.
METHODS = {"jetspec": ("jetspec", 15, "dflash"), "eagle3": ("eagle3_tree", 5, "eagle3")}
# vLLM's default sizes up to 64, then coarser ones, for fewer graphs.
SIZES = [1, 2, 4, *range(8, 65, 8), *range(96, 257, 32), *range(320, 513, 64)]


@dataclass(frozen=True)
class Arm:
    """An engine to measure.

    Args:
        nodes: nodes per tree, or tokens per chain; 0 for plain decoding.
        batches: its batch sizes.
    """

    name: str
    nodes: int = 0
    batches: tuple[int, ...] = (1, 4, 8, 16, 32)
    is_stock: bool = False
    is_adaptive: bool = False
    kv_gib: float = 7.5
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def rows(self) -> list[int]:
        """Rows of a step with trees of the maximum size, by batch."""
        return [batch * (self.nodes + 1) for batch in self.batches]

    def sizes(self) -> list[int]:
        if self.is_adaptive:
            return SIZES
        # Graphs of drafts have as many requests as batches.
        return sorted({1, 2, *self.batches, *(rows for rows in self.rows if rows <= 1024)})


ARMS = {
    arm.name: arm
    for arm in (
        Arm("plain", kv_gib=5.5),
        Arm("7 nodes", 7, kv_gib=7.5),
        Arm("15 nodes", 15, kv_gib=7.5),
        Arm("31 nodes", 31, (1, 4, 8, 16), kv_gib=4.5),
        Arm("63 nodes", 63, (1, 4, 8), kv_gib=2.5),
        Arm("127 nodes", 127, (1, 4), kv_gib=1.5),
        Arm("auto", 63, is_adaptive=True, kv_gib=7.5),
        Arm("15 nodes, bfloat16 drafts", 15, kv_gib=7.5, options={"draft_weights": "full"}),
        Arm("15 nodes, cute", 15, kv_gib=7.5, options={"tree_kernel": "cute"}),
        Arm("vLLM chain of 15", 15, is_stock=True, kv_gib=7.5),
        Arm("vLLM chain of 7", 7, is_stock=True, kv_gib=7.5),
        Arm("vLLM chain of 3", 3, is_stock=True, kv_gib=7.5),
        Arm("plain, 64", batches=(64,), kv_gib=10.5),
        Arm("7 nodes, 64", 7, (64,), kv_gib=14),
        Arm("auto, 64", 63, (64,), is_adaptive=True, kv_gib=14),
    )
}  # fmt: skip
PHASES = [
    "plain;auto;vLLM chain of 15",
    "plain;15 nodes;63 nodes",
    "plain;127 nodes;7 nodes",
]


class Running:
    """The engine of an arm in its own process."""

    def __init__(self, arm: Arm, job: dict[str, Any]) -> None:
        self.arm, self.job = arm, job
        context = multiprocessing.get_context("spawn")
        self.connection, far = context.Pipe()
        self.process = context.Process(target=serve, args=(job, far), daemon=True)
        self.process.start()
        far.close()

    def receive(self, seconds: float) -> dict[str, Any]:
        try:
            if self.connection.poll(max(0.0, seconds)):
                return self.connection.recv()
        except EOFError:
            return {"problem": "the engine's process ended"}
        return {"problem": f"no answer within {seconds:.0f} s"}

    def call(self, cell: dict[str, Any], seconds: float) -> dict[str, Any]:
        self.connection.send(cell)
        return self.receive(seconds)

    def stop(self) -> None:
        self.process.kill()
        self.process.join()


class Speed:
    """The measurement with a folder of generated models."""

    def __init__(self, args: argparse.Namespace, report: Report, folder: Path) -> None:
        self.args, self.report, self.folder = args, report, folder
        self.published, self.head = PUBLISHED[args.head], folder / args.head
        report.data["head"] = args.head
        self.on_gpu = args.device == "cuda"
        self.vocab_size = QWEN3_8B["vocab_size"] if self.on_gpu else TINY_VOCAB
        self.running: dict[str, Running] = {}

    # -- models ---------------------------------------------------------------------------------

    def make_models(self) -> None:
        target = self.folder / "target"
        if not self.on_gpu:
            if not target.exists():
                make_tiny_target(target)
            make_tiny_head(self.head)
            return
        if not target.exists():
            target.mkdir()
            (target / "config.json").write_text(json.dumps(QWEN3_8B))
        if not self.head.exists():
            # CUDA must not be initialised in this process, because engines use the device.
            make = {"jetspec": make_block_heads, "eagle3": make_eagle3_head}[self.head.name]
            context = multiprocessing.get_context("spawn")
            process = context.Process(target=make, args=(str(self.head),))
            process.start()
            process.join()

    def job(self, arm: Arm) -> dict[str, Any]:
        engine: dict[str, Any] = {
            "model": str(self.folder / "target"), "skip_tokenizer_init": True,
            "max_model_len": self.args.context + 1024, "max_num_seqs": max(arm.batches),
            "max_num_batched_tokens": 4096, "dtype": "bfloat16", "load_format": "dummy",
            "gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": int(arm.kv_gib * 2**30),
            "compilation_config": {"cudagraph_capture_sizes": arm.sizes(), **self.args.compilation},
        }  # fmt: skip
        env = {}
        if not self.on_gpu:
            engine |= {
                "dtype": "float32", "enforce_eager": True, "block_size": 32, "max_num_seqs": 4,
                "max_num_batched_tokens": 1024, "max_model_len": 512,
            }  # fmt: skip
            for key in ("load_format", "gpu_memory_utilization", "compilation_config"):
                engine.pop(key)
            engine["kv_cache_memory_bytes"] = 2**28
            env = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                   "OMP_NUM_THREADS": "1"}  # fmt: skip
        log = self.report.path.parent / f"{arm.name.replace(', ', '-').replace(' ', '_')}.log"
        return {
            "engine": engine, "speculative": self.speculative(arm), "stock": arm.is_stock,
            "vocab_size": self.vocab_size, "depth": self.published.depth, "width": WIDTH,
            "env": env, "log": str(log), "is_dummy": self.on_gpu,
        }  # fmt: skip

    def speculative(self, arm: Arm) -> dict[str, Any] | None:
        if not arm.nodes:
            return None
        method, _, stock = METHODS[self.head.name]
        if arm.is_stock:
            rates = [0.8 ** (d + 1) for d in range(arm.nodes)]
            return {
                "method": stock, "model": str(self.head / "stock"),
                "num_speculative_tokens": arm.nodes, "rejection_sample_method": "synthetic",
                "synthetic_acceptance_rates": rates,
            }  # fmt: skip
        fixed = {} if arm.is_adaptive else {"tree_budget": arm.nodes, "ngram_topk": 0}
        return {
            "method": method, "model": str(self.head),
            "num_speculative_tokens": arm.nodes, **fixed, **arm.options,
        }  # fmt: skip

    # -- running --------------------------------------------------------------------------------

    def start(self, names: list[str]) -> None:
        """Starts the missing engines of a phase; stops all others.

        They start together, except adaptive ones, which time their steps at start.
        """
        for name in [name for name in self.running if name not in names]:
            self.running.pop(name).stop()
        new = [name for name in names if name not in self.running]
        alone = [[name] for name in new if ARMS[name].is_adaptive]
        for together in (*alone, [name for name in new if [name] not in alone]):
            self.start_together(together)
        self.report.save()

    def start_together(self, names: list[str]) -> None:
        started = {name: Running(ARMS[name], self.job(ARMS[name])) for name in names}
        for name, engine in started.items():
            answer = engine.receive(min(200.0, self.report.seconds_left))
            self.report.data["parts"].setdefault("engines", {"status": "ok"})[name] = answer
            print(f"   {name}: {answer}", flush=True)
            if "problem" in answer:
                print(Path(engine.job["log"]).read_text()[-3000:], flush=True)
                engine.stop()
            else:
                self.running[name] = engine

    def phase(self, names: list[str]) -> None:
        self.start(names)
        for number in range(self.args.rounds):
            for batch in self.args.batches:
                for profile in self.args.profiles:
                    for name in names:
                        self.cell(name, batch, profile, number)
        if self.args.profile_batches:
            for batch in self.args.profile_batches:
                for name in names:
                    self.cell(name, batch, self.args.profiles[0], None)

    def cell(self, name: str, batch: int, profile: str, number: int | None) -> None:
        """Makes a call of an arm; if `number` is None, it is profiled."""
        if name not in self.running or batch not in ARMS[name].batches:
            return
        if self.report.seconds_left < 10 or (
            not ARMS[name].nodes and profile != self.args.profiles[0]
        ):
            return
        arm = ARMS[name]
        tokens = self.args.tokens // (1 if arm.nodes else 4)
        if batch > 8 and arm.nodes:
            tokens //= 2
        cell = {"batch": batch, "context": self.args.context, "tokens": tokens}
        if arm.nodes:
            published = self.published
            a = fit(published.lengths[profile], published.nodes, published.depth, WIDTH)
            depth, width = METHODS[self.head.name][1], WIDTH
            if arm.is_stock:
                depth, width = published.depth, 1
            imposed = mean_acceptance(a, arm.nodes, min(depth, arm.nodes), width)
            cell |= {"a": a, "nodes": arm.nodes, "imposed": imposed}
        if number is None:
            cell["profile"] = True
        elif arm.is_adaptive and not number:
            # It must adapt to the load before it is measured.
            self.running[name].call(cell, min(120.0, self.report.seconds_left))
        answer = self.running[name].call(cell, min(120.0, self.report.seconds_left))
        if "problem" in answer:
            print(f"   {name}, batch {batch}: {answer['problem']}", flush=True)
            print(Path(self.running[name].job["log"]).read_text()[-3000:], flush=True)
            self.running.pop(name).stop()
        kernels = answer.pop("kernels", None)
        if kernels is not None:
            row = {"arm": name, "batch": batch, **kernels}
            self.report.data.setdefault("kernels", []).append(row)
            short = {key: row[key] for key in ("wall_ms", "device_ms", "launches")}
            print(f"   {name}, batch {batch}: {short}", flush=True)
            self.report.save()
            return
        row = {"arm": name, "profile": profile if arm.nodes else "-", "round": number, **answer}
        self.report.row(**row)


def make_tiny_target(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    from tests.e2e.tiny import make_target

    file = make_target(folder, TINY_VOCAB) / "model.safetensors"
    weights = load_file(file)
    impose_target(weights, TINY_VOCAB)
    save_file(weights, file, metadata={"format": "pt"})


def make_tiny_head(folder: Path) -> None:
    from tests.e2e import tiny

    if folder.name == "jetspec":
        tiny.make_head(folder, TINY_VOCAB, block_size=PUBLISHED["jetspec"].depth + 1)
    else:
        tiny.make_eagle3_head(folder, TINY_VOCAB)


def make_block_heads(folder: str) -> None:
    """Writes a random JetSpec head of the published shape, and the config of a DFlash head of that
    shape for vLLM's own chain."""
    import torch

    from vllm_specplug.methods.block.checkpoint import save_block_head
    from vllm_specplug.methods.block.config import BlockHeadConfig
    from vllm_specplug.methods.block.head import BlockHead

    depth, stock = PUBLISHED["jetspec"].depth, Path(folder) / "stock"
    with torch.device("cuda"):
        head = BlockHead(
            BlockHeadConfig(
                hidden_size=4096, intermediate_size=12288, num_hidden_layers=5,
                num_attention_heads=32, num_key_value_heads=8, head_dim=128, vocab_size=151936,
                draft_vocab_size=151936, target_hidden_size=4096, target_layer_ids=AUX_LAYERS,
                block_size=depth + 1, causal=True, mask_token_id=151669, rope_theta=1e6,
            )
        )  # fmt: skip
        with torch.no_grad():
            head.mask_embedding.normal_()
    save_block_head(folder, head.bfloat16().cpu())
    shape = {
        **QWEN3_8B, "num_hidden_layers": 5, "block_size": depth + 1,
        "architectures": ["DFlashDraftModel"], "layer_types": ["full_attention"] * 5,
        "dflash_config": {"mask_token_id": 151669, "target_layer_ids": list(AUX_LAYERS)},
    }  # fmt: skip
    stock.mkdir()
    (stock / "config.json").write_text(json.dumps(shape))


def make_eagle3_head(folder: str) -> None:
    """Writes a random EAGLE-3 head of the published shape with 32,000 draft tokens, which vLLM's
    own chain also reads."""
    import torch

    from vllm_specplug.methods.eagle3_tree.checkpoint import save_eagle3_head as save
    from vllm_specplug.methods.eagle3_tree.config import Eagle3Config, default_target_layers
    from vllm_specplug.methods.eagle3_tree.head import Eagle3Head

    draft_vocab = 32000
    with torch.device("cuda"):
        head = Eagle3Head(
            Eagle3Config(
                hidden_size=4096, intermediate_size=12288, num_attention_heads=32,
                num_key_value_heads=8, head_dim=128, vocab_size=151936,
                draft_vocab_size=draft_vocab, target_hidden_size=4096,
                target_layer_ids=default_target_layers(36), rope_theta=1e6,
            )
        )  # fmt: skip
        lm_head = torch.randn(draft_vocab, 4096).bfloat16() / 64
    save(folder, head.bfloat16().cpu(), target_ids=torch.arange(draft_vocab), lm_head=lm_head)
    Path(folder, "stock").symlink_to(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/gpu-speed"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--head", choices=METHODS, default="jetspec", help="and its acceptance")
    parser.add_argument(
        "--phases", nargs="+", default=PHASES, help="arms that run together, by semicolons"
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 4, 16])
    parser.add_argument("--profiles", nargs="+", default=["GSM8K", "MT-Bench"])
    parser.add_argument("--profile-batches", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=512, help="per request; plain: a quarter")
    parser.add_argument("--seconds", type=float, default=440)
    parser.add_argument("--compilation", type=json.loads, default={}, help="as vLLM's, JSON")
    parser.add_argument("--models", type=Path, help="folder of generated models, kept between runs")
    args = parser.parse_args()
    report = Report(args.out, "gpu_speed", args.seconds)
    models = args.models or Path(tempfile.mkdtemp(prefix="specplug-models-"))
    models.mkdir(parents=True, exist_ok=True)
    speed = Speed(args, report, models)
    with report.part("models"):
        speed.make_models()
    for phase in args.phases:
        with report.part(phase):
            speed.phase(phase.split(";"))
        if not speed.running:
            break
    for engine in speed.running.values():
        engine.stop()
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
