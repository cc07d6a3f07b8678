# SPDX-License-Identifier: Apache-2.0
"""Pairs on targets of other families."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.pair import Counts, Pair
from tests.e2e.requests import greedy, seeded
from tests.e2e.tiny import make_other_target

_ROPED: dict[str, Any] = {
    "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
    "intermediate_size": 128, "max_position_embeddings": 256,
}  # fmt: skip
SIZES: dict[str, dict[str, Any]] = {
    # The body is `transformer`, positions are learned, the LM head is the embedding.
    "GPT2": {"n_embd": 64, "n_head": 2, "n_layer": 2, "n_positions": 256},
    # `model.decoder`, learned positions with an offset.
    "OPT": {"hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2, "ffn_dim": 128,
            "word_embed_proj_dim": 64, "max_position_embeddings": 256},
    # `gpt_neox`, rotary over a quarter of a head, `embed_out` for an LM head.
    "GPTNeoX": {"hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2,
                "intermediate_size": 128, "max_position_embeddings": 256},
    "Bloom": {"hidden_size": 64, "n_head": 2, "n_layer": 2},
    # Windows in every other layer, soft caps in all; two KV cache groups.
    "Gemma2": {**_ROPED, "num_hidden_layers": 2, "sliding_window": 24,
               "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 32, "sharp": 6.0},
    # Two layers with a window per layer without one, each with rotary embeddings of its own.
    "Gemma3Text": {**_ROPED, "num_hidden_layers": 3, "sliding_window": 40,
                   "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
                   "query_pre_attn_scalar": 32, "sharp": 3.0},
    # A window in all layers, shorter than a tree is deep.
    "Mistral": {**_ROPED, "num_hidden_layers": 2, "sliding_window": 6, "sharp": 3.0},
    # A sink per head, experts, windows in every other layer.
    "GptOss": {**_ROPED, "num_hidden_layers": 2, "sliding_window": 16, "num_local_experts": 4,
               "num_experts_per_tok": 2, "layer_types": ["sliding_attention", "full_attention"],
               "sharp": 3.0},
    # The last layers read the keys and values of earlier ones.
    "Gemma3nText": {**_ROPED, "num_hidden_layers": 4, "num_kv_shared_layers": 2,
                    "sliding_window": 16, "sharp": 3.0,
                    "layer_types": ["sliding_attention", "full_attention"] * 2,
                    "vocab_size_per_layer_input": 300, "hidden_size_per_layer_input": 8,
                    "laurel_rank": 8, "activation_sparsity_pattern": [0.0] * 4},
    # Heads of another number and size in layers without a window; the last two read others' keys.
    "Gemma4Text": {**_ROPED, "num_hidden_layers": 5, "num_kv_shared_layers": 2,
                   "sliding_window": 16, "num_key_value_heads": 2,
                   "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]
                   + ["sliding_attention", "full_attention"],
                   "per_layer_config": {2: {"head_dim": 64, "num_key_value_heads": 1},
                                        4: {"head_dim": 64, "num_key_value_heads": 1}},
                   "vocab_size_per_layer_input": 300, "hidden_size_per_layer_input": 16,
                   "sharp": 3.0},
}  # fmt: skip


VOCAB = 300


@cache
def engine_of(family: str) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix="specplug-target-")) / family
    make_other_target(folder, family, VOCAB, **SIZES[family])
    return {"model": str(folder), "skip_tokenizer_init": True}


# Prompts around block edges (32) and windows (6, 16, 24, 40): shorter, as long, much longer.
WINDOW_PROMPTS = [
    [(7 * i + 11 * n) % 290 + 5 for i in range(n)] for n in (3, 15, 23, 39, 41, 64, 70, 150)
]


def around_windows(made: Pair) -> Counts:
    """Compares greedy and seeded decoding from contexts that straddle windows and blocks."""
    params = [
        greedy(max_tokens=40, detokenize=False)
        if i % 2
        else seeded(i, max_tokens=40, detokenize=False)
        for i in range(len(WINDOW_PROMPTS))
    ]
    _, counts = made.compare(WINDOW_PROMPTS, params, least_accepted=40)
    return counts


def num_groups(made: Pair) -> int:
    return len(made.runner.kv_cache_config.kv_cache_groups)


def diverges(made: Pair) -> None:
    with pytest.raises(AssertionError, match="differs"):
        around_windows(made)
