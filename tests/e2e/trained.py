# SPDX-License-Identifier: Apache-2.0
"""Tiny targets of each family and draft heads for them, trained: what a head drafts is then
accepted for what it has learnt and not by chance.

All families learn the same texts, and all heads are made by the trainers that users have.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.e2e.latent import latent_config
from tests.e2e.pair import Counts, Pair, pair
from tests.e2e.requests import greedy, seeded
from tests.e2e.tiny import make_tokenizer
from tests.e2e.vision import vision_config
from vllm_specplug.methods.block.train import run as block
from vllm_specplug.methods.block.train.options import BlockRecipe, BlockRun
from vllm_specplug.methods.eagle3_tree.checkpoint import save_eagle3_head
from vllm_specplug.methods.eagle3_tree.config import Eagle3Config
from vllm_specplug.methods.eagle3_tree.head import Eagle3Head
from vllm_specplug.methods.eagle3_tree.train import run as eagle3
from vllm_specplug.methods.eagle3_tree.train.options import Eagle3Recipe, Eagle3Run
from vllm_specplug.train.features import TokenSequence, write_shard
from vllm_specplug.train.options import Recipe, RunOptions
from vllm_specplug.train.run import train_head
from vllm_specplug.train.target import TargetWeights

# The first word, and the one behind the last. Markers of languages are before, and before those
# what tokenizers and images need.
WORDS, VOCAB = 12, 48
_MARKERS = (10, 11)
LAYERS = (0, 2)
_TARGET_STEPS, _HEAD_STEPS = 150, 200

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
    "max_position_embeddings": 256, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
    "tie_word_embeddings": False,
}  # fmt: skip
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
_STATES = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4,
}  # fmt: skip
_WINDOWS = {"sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"] * 2}  # fmt: skip

# vLLM knows no other embeddings of theirs.
_GEMMA = {**_WINDOWS, "query_pre_attn_scalar": 32, "tie_word_embeddings": True}


def _of(name: str, **fields: Any) -> Callable[[], Any]:
    def make() -> Any:
        import transformers

        return getattr(transformers, f"{name}Config")(**{**_SIZES, **fields})

    return make


def _learned(name: str, **sizes: Any) -> Any:
    """Of a family with learned positions, biases and field names of its own."""
    import transformers

    tokens = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    return getattr(transformers, f"{name}Config")(**tokens, **sizes)


# transformers' config of each family.
FAMILIES: dict[str, Callable[[], Any]] = {
    "Llama": _of("Llama"),
    "Mistral": _of("Mistral", sliding_window=16),
    "Gemma2": _of("Gemma2", **_GEMMA, attn_logit_softcapping=20.0),
    "Gemma3": _of("Gemma3Text", **_GEMMA),
    "GptOss": _of("GptOss", **_WINDOWS, num_local_experts=4, num_experts_per_tok=2),
    "Qwen3Moe": _of("Qwen3Moe", **_EXPERTS, num_experts=4, norm_topk_prob=True),
    "Qwen3Next": _of("Qwen3Next", **_EXPERTS, **_STATES, num_experts=4,
                     shared_expert_intermediate_size=64),
    "Qwen3_5": _of("Qwen3_5Text", **_STATES),
    "DeepseekV2": lambda: latent_config("DeepseekV2", vocab_size=VOCAB, num_hidden_layers=4),
    "Mixtral": _of("Mixtral", num_local_experts=4, num_experts_per_tok=2),
    "GPT2": lambda: _learned("GPT2", n_embd=64, n_head=2, n_layer=4, n_positions=256, n_inner=128),
    "OPT": lambda: _learned(
        "OPT", hidden_size=64, ffn_dim=128, num_attention_heads=2, num_hidden_layers=4,
        max_position_embeddings=256, word_embed_proj_dim=64, dropout=0.0,
    ),
    "Bloom": _of("Bloom", n_head=2, n_layer=4, tie_word_embeddings=True),
    "Qwen2_5_VL": lambda: vision_config("Qwen2_5_VL", num_hidden_layers=4),
}  # fmt: skip


@dataclass(frozen=True)
class Trained:
    """Folders of a target, of a head trained on it, and of that head with each weight's numbers
    in another order: as large, and of nothing learnt."""

    target: Path
    head: Path
    shuffled: Path


@cache
def trained(family: str, kind: str) -> Trained:
    """Made once for all processes of a test run.

    Args:
        family: of `FAMILIES`.
        kind: "eagle3", "jetspec" or "dflash".
    """
    shared = os.environ.get("SPECPLUG_TESTS_SHARED") or tempfile.mkdtemp(prefix="specplug-heads-")
    folder = Path(shared) / "trained" / family
    target, head = folder / "target", folder / kind
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "held").is_dir():
            _train_target(folder, FAMILIES[family]())
        if not (head / "shuffled").is_dir():
            _TRAINERS[kind](folder, head)
            _shuffle(head / "run" / "head", head / "shuffled")
    return Trained(target, head / "run" / "head", head / "shuffled")


def texts(count: int, length: int, seed: int) -> torch.Tensor:
    """int64 [count, length] of two languages: a text's first token says which, and then a word
    nearly decides the next."""
    draw = torch.Generator().manual_seed(seed)
    follows = torch.stack([torch.randperm(VOCAB - WORDS, generator=_fixed(i)) for i in range(2)])
    follows += WORDS
    tokens = torch.randint(WORDS, VOCAB, (count, length), generator=draw)
    language = torch.randint(2, (count,), generator=draw)
    tokens[:, 0] = torch.tensor(_MARKERS)[language]
    for n in range(2, length):
        decided = follows[language, tokens[:, n - 1] - WORDS]
        is_decided = torch.rand(count, generator=draw) < 0.95
        tokens[:, n] = torch.where(is_decided, decided, tokens[:, n])
    return tokens


def _fixed(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _train_target(folder: Path, config: Any) -> None:
    """The target and its features."""
    import transformers

    torch.manual_seed(0)
    has_tower = hasattr(config, "vision_config")
    kind = "ImageTextToText" if has_tower else "CausalLM"
    model = getattr(transformers, f"AutoModelFor{kind}").from_config(config).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for step in range(_TARGET_STEPS):
        rows = texts(16, 48, 100 + step)
        optimizer.zero_grad()
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    print(f"{type(model).__name__}: loss {loss.item():.3f}")
    model.eval().save_pretrained(folder / "target")
    if has_tower:
        assert make_tokenizer(folder / "target") <= config.get_text_config().vocab_size
    for part, seed in (("train", 2), ("held", 3)):
        sequences = [TokenSequence(row, 4, "text") for row in texts(48, 64, seed)]
        shard = folder / part / "shard-00000"
        write_shard(shard, sequences[: 48 if part == "train" else 4], model, LAYERS)


def _options(folder: Path, out: Path) -> dict[str, Any]:
    return {
        "target": folder / "target", "features": folder / "train", "heldout": folder / "held",
        "out": out, "eval_every": 10**6, "save_every": 10**6,
    }  # fmt: skip


def _train(start: Callable[..., Any], run: RunOptions, recipe: Recipe) -> None:
    facts = train_head(start, run, recipe, lambda text: None)
    print(facts["heldout"]["mean_acceptance_length"])


def _train_eagle3(folder: Path, head: Path) -> None:
    torch.manual_seed(5)
    lm_head = TargetWeights(folder / "target").tables().lm_head
    vocab = len(lm_head)
    first = Eagle3Head(
        Eagle3Config(
            hidden_size=64, intermediate_size=128, num_attention_heads=2, num_key_value_heads=1,
            head_dim=32, vocab_size=vocab, draft_vocab_size=vocab, target_hidden_size=64,
            target_layer_ids=LAYERS,
        )
    )  # fmt: skip
    ids = torch.arange(vocab)
    save_eagle3_head(head / "first", first, target_ids=ids, lm_head=lm_head, dtype=torch.float32)
    run = Eagle3Run(**_options(folder, head / "run"), init_from=str(head / "first"))
    recipe = Eagle3Recipe(
        total_steps=_HEAD_STEPS, warmup_steps=5, anchors_per_step=96, anchors_per_sequence=24,
        steps=4, learning_rate=4e-3,
    )  # fmt: skip
    _train(eagle3.start, run, recipe)


def _train_block(causal: bool) -> Callable[[Path, Path], None]:
    def train(folder: Path, head: Path) -> None:
        run = BlockRun(
            **_options(folder, head / "run"), causal=causal, num_layers=2, block_size=5,
            draft_vocab_size=VOCAB,
        )  # fmt: skip
        recipe = BlockRecipe(
            total_steps=_HEAD_STEPS, warmup_steps=5, anchors_per_step=96, learning_rate=4e-3,
            compile=False,
        )  # fmt: skip
        _train(block.start, run, recipe)

    return train


_TRAINERS = {
    "eagle3": _train_eagle3,
    "jetspec": _train_block(causal=True),
    "dflash": _train_block(causal=False),
}


def _shuffle(head: Path, folder: Path) -> None:
    partial, draw = folder.with_name("partial"), _fixed(0)
    partial.mkdir(exist_ok=True)
    tensors = {
        name: tensor.flatten()[torch.randperm(tensor.numel(), generator=draw)].view_as(tensor)
        if tensor.is_floating_point() and "lm_head" not in name
        else tensor
        for name, tensor in load_file(head / "model.safetensors").items()
    }
    save_file(tensors, partial / "model.safetensors")
    (partial / "config.json").write_text((head / "config.json").read_text())
    partial.rename(folder)


# -- serving them ---------------------------------------------------------------------------

METHODS = {"eagle3": "eagle3_tree", "jetspec": "jetspec", "dflash": "ddtree"}
PROMPTS = texts(8, 12, seed=1).tolist()


def engines(family: str, kind: str, head: Path, **engine: Any) -> Pair:
    """Without n-grams: whatever is accepted was the head's."""
    speculative = {**engine.pop("speculative", {}), "model": str(head), "ngram_topk": 0}
    engine = {"model": str(trained(family, kind).target), "skip_tokenizer_init": True, **engine}
    return pair(METHODS[kind], **engine, speculative=speculative)


def drafted(made: Pair, **options: Any) -> Counts:
    """Greedy and seeded."""
    params = [
        make(max_tokens=40, ignore_eos=True, detokenize=False)
        for make in [greedy, lambda **kw: seeded(1, **kw)] * 4
    ]
    return made.compare(PROMPTS, params, least_accepted=0, **options)[1]


def is_accepted_as_learnt(
    family: str,
    kind: str,
    compared: Callable[[Pair], Counts] = drafted,
    build: Callable[..., Pair] = engines,
    least: float = 0.5,
    **engine: Any,
) -> None:
    """Most of the head's trees, `least` of all, are accepted at depth two and below, and hardly any
    of the shuffled head's, which is as lossless."""
    made = trained(family, kind)
    shares = []
    for head in (made.head, made.shuffled):
        counts = compared(build(family, kind, head, **engine))
        print(f"{family}, {kind}: {counts}")
        shares.append(counts.deep / counts.drafts)
    assert shares[0] > least and shares[0] > 5 * shares[1], shares
