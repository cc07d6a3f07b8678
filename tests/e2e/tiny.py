# SPDX-License-Identifier: Apache-2.0
"""A random two-layer Llama with a small vocabulary, and random heads for it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from vllm_specplug.drafting.checkpoint_files import save_head
from vllm_specplug.methods.block.checkpoint import save_block_head
from vllm_specplug.methods.block.config import BlockHeadConfig
from vllm_specplug.methods.block.head import BlockHead
from vllm_specplug.methods.dels.checkpoint import save_local_head
from vllm_specplug.methods.dels.unigram import save_unigram
from vllm_specplug.methods.local.head import LocalHead, LocalHeadConfig
from vllm_specplug.methods.longspec.checkpoint import save_longspec_head
from vllm_specplug.methods.longspec.config import LongSpecConfig
from vllm_specplug.methods.longspec.head import LongSpecHead
from vllm_specplug.testing.target import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, make_target

# Ids 0, 1, ... of `make_tokenizer`; the second ends a text.
SPECIAL_TOKENS = ("<s>", "</s>", "<think>", "</think>", "<tool_call>", "</tool_call>")
_CORPUS = (
    '{"name": "the cat", "age": 12, "tags": ["red", "blue"], "ok": true, "no": false}',
    "the quick brown fox jumps over the lazy dog and the other one is there",
    "1 2 3 10 20 30 100 200 300 4567 890 yes no maybe red green blue north south",
)


def make_other_target(
    folder: Path,
    family: str,
    vocab_size: int,
    *,
    seed: int = 0,
    sharp: float = 1.0,
    pads: bool = True,
    **sizes: Any,
) -> Path:
    """A random float32 target of another family of transformers, e.g. "GPT2"; peaked likewise.

    Args:
        sharp: factor for queries and keys: scores far apart, so that what attention does to them
            shows in the output. Sinks are then of the scores' size, too.
        pads: whether the padding token has an embedding. transformers' own is zeros, by whose size
            Gemma 3n divides.
    """
    import transformers

    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=vocab_size, bos_token_id=0, eos_token_id=1, pad_token_id=2, **sizes
    )
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(2.5)
        for name, parameter in model.named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                parameter.mul_(sharp)
            if name.endswith("sinks"):
                parameter.normal_(std=2.0)
        for module in model.modules():
            if pads and isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:
                module.weight[module.padding_idx].normal_(std=module.weight.std().item())
    model.save_pretrained(folder)
    return folder


def make_tokenizer(folder: Path) -> int:
    """Adds a small byte-level BPE tokenizer to a model's folder; returns its vocabulary size.

    Every text has an encoding, so that grammars compile against it.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        _CORPUS * 4,
        trainers.BpeTrainer(
            vocab_size=360,
            special_tokens=list(SPECIAL_TOKENS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }} {% endfor %}assistant:"
    )
    fast.save_pretrained(folder)
    return len(fast)


def make_text_target(folder: Path, *, seed: int = 0) -> Path:
    """`make_target` with a tokenizer and a vocabulary of that size."""
    folder.mkdir(parents=True, exist_ok=True)
    return make_target(folder, make_tokenizer(folder), seed=seed)


def make_head(
    folder: Path,
    vocab_size: int,
    *,
    causal: bool = True,
    block_size: int = 5,
    seed: int = 1,
    kv_heads: int = KV_HEADS,
) -> Path:
    """A random block head for `make_target`'s model."""
    head = make_block_head(
        vocab_size, causal=causal, block_size=block_size, seed=seed, kv_heads=kv_heads
    )
    save_block_head(folder, head, dtype=torch.float32)
    return folder


def make_block_head(
    vocab_size: int,
    *,
    causal: bool,
    block_size: int = 5,
    seed: int = 1,
    hidden: int = HIDDEN,
    kv_heads: int = KV_HEADS,
    anchor: bool = False,
    windows: tuple[int | None, ...] = (None,),
) -> BlockHead:
    """The same in memory; with `anchor` it samples from the anchor's slot. A layer per window."""
    torch.manual_seed(seed)
    head = BlockHead(
        BlockHeadConfig(
            hidden_size=hidden,
            intermediate_size=128,
            num_hidden_layers=len(windows),
            num_attention_heads=hidden // HEAD_DIM,
            num_key_value_heads=kv_heads,
            head_dim=HEAD_DIM,
            vocab_size=vocab_size,
            draft_vocab_size=vocab_size,
            target_hidden_size=hidden,
            target_layer_ids=(0, 1),
            block_size=block_size,
            causal=causal,
            sample_from_anchor=anchor,
            windows=windows if any(windows) else (),
            mask_token_id=2,
        )
    )
    with torch.no_grad():
        head.mask_embedding.normal_()
    return head


def make_dspark_head(
    folder: Path,
    vocab_size: int,
    *,
    kind: str = "vanilla",
    seed: int = 5,
    hidden: int = HIDDEN,
    windows: tuple[int | None, ...] = (24, None),
) -> Path:
    """A random DSpark head for `make_target`'s model; a layer, with its sliding window, each.

    `kind` is its `markov_head_type`, or "domino" for a Domino head.
    """
    from vllm_specplug.methods.dspark_tree.checkpoint import save_dspark_head
    from vllm_specplug.methods.dspark_tree.config import DSparkConfig

    block = make_block_head(
        vocab_size, causal=False, seed=seed, hidden=hidden, anchor=True, windows=windows
    )
    if kind != "vanilla":
        own = {"gru_hidden_dim": 24, "pure_draft_prefix_len": 1} if kind == "domino" else {}
        own |= {"markov_rank": 16, "markov_head_type": kind}
        config = DSparkConfig(**{**vars(block.config), **own})
        tensors = {name: torch.randn(shape) * 0.5 for name, shape in config.extra_tensors.items()}
        state = {**block.state_dict(), **tensors}
        save_head(folder, state, config.to_dict(), target_ids=None, dtype=torch.float32)
        return folder
    w1, w2 = torch.randn(2, vocab_size, 16) * 0.5
    confidence = (torch.randn(1, hidden + 16) * 0.3, torch.zeros(1))
    save_dspark_head(folder, block, w1, w2, confidence=confidence, dtype=torch.float32)
    return folder


def make_dflash2_head(
    folder: Path,
    vocab_size: int,
    *,
    seed: int = 6,
    block_size: int = 5,
    windows: tuple[int | None, ...] = (24, None),
) -> Path:
    """A random DFlash2 head for `make_target`'s model; a layer, with its sliding window, each."""
    from vllm_specplug.methods.dflash2_tree.config import DFlash2Config

    block = make_block_head(
        vocab_size, causal=False, seed=seed, block_size=block_size, windows=windows
    )
    selector = {
        "conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 16,
        "selector_top_k": min(12, vocab_size),
    }  # fmt: skip
    head = BlockHead(DFlash2Config(**{**vars(block.config), **selector}))
    head.load_state_dict(block.state_dict(), strict=False)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if "_conv." in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    predecessors, successors = torch.randn(2, vocab_size, 16) * 0.5
    projection = torch.randn(16, HIDDEN) / HIDDEN**0.5
    tables = (predecessors, successors, projection)
    extra = dict(zip(head.config.extra_tensors, tables, strict=True))
    save_block_head(folder, head, extra=extra, dtype=torch.float32)
    return folder


def make_local_head(folder: Path, vocab_size: int) -> Path:
    """A random local head for `make_target`'s model, with counts beside it."""
    torch.manual_seed(2)
    head = LocalHead(
        LocalHeadConfig(
            kind="gru",
            vocab_size=vocab_size,
            target_hidden_size=HIDDEN,
            rank=16,
            hidden_size=32,
        )
    )
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(std=0.5)
    save_local_head(folder, head, dtype=torch.float32)
    save_unigram(folder / "unigram.safetensors", torch.arange(vocab_size))
    return folder


def make_longspec_head(folder: Path, vocab_size: int, *, window: int = 64, seed: int = 3) -> Path:
    """A random LongSpec layer for `make_target`'s model."""
    torch.manual_seed(seed)
    head = LongSpecHead(
        LongSpecConfig(
            hidden_size=HIDDEN,
            intermediate_size=128,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            vocab_size=vocab_size,
            draft_vocab_size=vocab_size,
            window_size=window,
            rms_norm_eps=1e-6,
        )
    )
    save_longspec_head(folder, head, dtype=torch.float32)
    return folder


def make_eagle3_head(
    folder: Path,
    vocab_size: int,
    *,
    draft_vocab_size: int | None = None,
    seed: int = 5,
    num_heads: int = HEADS,
    num_kv_heads: int = KV_HEADS,
    head_dim: int = HEAD_DIM,
    windows: tuple[int | None, ...] = (None,),
    mask_token_id: int | None = None,
) -> Path:
    """A random EAGLE-3 head for `make_target`'s model; its attention may have another shape. With
    `mask_token_id` it is a P-EAGLE head."""
    from vllm_specplug.methods.eagle3_tree.checkpoint import save_eagle3_head
    from vllm_specplug.methods.eagle3_tree.config import Eagle3Config
    from vllm_specplug.methods.eagle3_tree.head import Eagle3Head

    torch.manual_seed(seed)
    size = draft_vocab_size or vocab_size
    head = Eagle3Head(
        Eagle3Config(
            hidden_size=HIDDEN,
            intermediate_size=128,
            num_attention_heads=num_heads,
            num_key_value_heads=num_kv_heads,
            head_dim=head_dim,
            vocab_size=vocab_size,
            draft_vocab_size=size,
            target_hidden_size=HIDDEN,
            target_layer_ids=(0, 1),
            windows=windows,
            mask_token_id=mask_token_id,
        )
    )
    if mask_token_id is not None:
        torch.nn.init.normal_(head.mask_hidden)
    ids = torch.randperm(vocab_size)[:size].sort().values
    lm_head = torch.randn(size, HIDDEN) / HIDDEN**0.5
    save_eagle3_head(folder, head, target_ids=ids, lm_head=lm_head, dtype=torch.float32)
    return folder


def make_tokenswift_heads(
    folder: Path, vocab_size: int, *, num_heads: int = 3, seed: int = 4
) -> Path:
    """Random TokenSwift heads for `make_target`'s model."""
    from vllm_specplug.methods.tokenswift.head import TokenSwiftConfig, TokenSwiftHeads, save_heads

    torch.manual_seed(seed)
    heads = TokenSwiftHeads(TokenSwiftConfig(HIDDEN, vocab_size, vocab_size, num_heads))
    save_heads(folder, heads, dtype=torch.float32)
    return folder


def make_adapter(
    folder: Path, target: Path, modules: Sequence[str], *, seed: int, size: float = 1.0
) -> Path:
    """A random LoRA adapter of a target, in PEFT's files; of `size` 1 it changes most answers."""
    folder.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "bias": "none",
              "target_modules": list(modules)}  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    draw, tensors = torch.Generator().manual_seed(seed), {}
    for name, weight in load_file(target / "model.safetensors").items():
        path, _, kind = name.rpartition(".")
        if path.rpartition(".")[2] not in modules or kind != "weight":
            continue
        rows, columns = weight.shape
        a, b = "lora_A.weight", "lora_B.weight"
        if path.endswith("embed_tokens"):
            a, b, rows, columns = "lora_embedding_A", "lora_embedding_B", columns, rows
        key = f"base_model.model.{path}"
        scale = float(weight.std()) * columns**0.5
        tensors[f"{key}.{a}"] = torch.randn(8, columns, generator=draw) / columns**0.5
        tensors[f"{key}.{b}"] = torch.randn(rows, 8, generator=draw) * scale * size / 8
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder
