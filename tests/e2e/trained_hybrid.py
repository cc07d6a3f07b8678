# SPDX-License-Identifier: Apache-2.0
"""A tiny target with recurrent states and an EAGLE-3 head for it, both trained: what the head
drafts is then accepted for what it has learnt and not by chance."""

from __future__ import annotations

from pathlib import Path

import torch

from vllm_specplug.methods.eagle3_tree.checkpoint import save_eagle3_head
from vllm_specplug.methods.eagle3_tree.config import Eagle3Config
from vllm_specplug.methods.eagle3_tree.head import Eagle3Head
from vllm_specplug.methods.eagle3_tree.train.run import Eagle3Run, train_eagle3
from vllm_specplug.methods.eagle3_tree.train.trainer import Eagle3Recipe
from vllm_specplug.train.features import TokenSequence, write_shard
from vllm_specplug.train.loop import LoopOptions

VOCAB, LAYERS = 40, (0, 2)
_TARGET_STEPS, _HEAD_STEPS = 150, 200


def texts(count: int, length: int, seed: int) -> torch.Tensor:
    """int64 [count, length] of two languages: a text's first token says which, and then a token
    nearly decides the next."""
    draw = torch.Generator().manual_seed(seed)
    follows = torch.stack([torch.randperm(VOCAB - 3, generator=_fixed(i)) + 3 for i in range(2)])
    tokens = torch.randint(3, VOCAB, (count, length), generator=draw)
    language = tokens[:, 0] % 2
    for n in range(1, length):
        decided = follows[language, tokens[:, n - 1] - 3]
        is_decided = torch.rand(count, generator=draw) < 0.95
        tokens[:, n] = torch.where(is_decided, decided, tokens[:, n])
    return tokens


def _fixed(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make_trained_hybrid(folder: Path) -> tuple[Path, Path, Path]:
    """Folders of a target, of a head trained on it and of the same head before."""
    target = folder / "target"
    model = _train_target(target)
    for part, seed in (("train", 2), ("held", 3)):
        sequences = [TokenSequence(row.numpy(), 4, "text") for row in texts(48, 64, seed)]
        shard = folder / part / "shard-00000"
        write_shard(shard, sequences[: 48 if part == "train" else 4], model, LAYERS)
    first = _random_head(folder / "first", model)
    run = Eagle3Run(str(target), str(folder / "train"), str(folder / "held"), init_from=str(first))
    recipe = Eagle3Recipe(
        total_steps=_HEAD_STEPS, warmup_steps=5, anchors_per_step=96, anchors_per_sequence=24,
        steps=4, learning_rate=4e-3,
    )  # fmt: skip
    out = folder / "run"
    loop = LoopOptions(out=str(out), eval_every=10**6, save_every=10**6)
    facts = train_eagle3(run, recipe, loop, lambda text: None)
    print(facts["heldout"]["mean_acceptance_length"])
    return target, out / "head", first


def _train_target(folder: Path) -> torch.nn.Module:
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3_5TextConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=4,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, max_position_embeddings=256,
        linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=16,
        linear_value_head_dim=16, linear_conv_kernel_dim=4, bos_token_id=0, eos_token_id=1,
        pad_token_id=2, tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for step in range(_TARGET_STEPS):
        rows = texts(16, 48, 100 + step)
        optimizer.zero_grad()
        model(input_ids=rows, labels=rows).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval().save_pretrained(folder)
    return model


def _random_head(folder: Path, model: torch.nn.Module) -> Path:
    torch.manual_seed(5)
    head = Eagle3Head(
        Eagle3Config(
            hidden_size=64, intermediate_size=128, num_attention_heads=2, num_key_value_heads=1,
            head_dim=32, vocab_size=VOCAB, draft_vocab_size=VOCAB, target_hidden_size=64,
            target_layer_ids=LAYERS,
        )
    )  # fmt: skip
    lm_head = model.lm_head.weight.detach().clone()  # type: ignore[union-attr, operator]
    save_eagle3_head(
        folder, head, target_ids=torch.arange(VOCAB), lm_head=lm_head, dtype=torch.float32
    )
    return folder
