# SPDX-License-Identifier: Apache-2.0
"""Targets of other families than Llama: served like plain decoding, or refused when they start.

See test_targets.py.
"""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.option_checks import PROMPTS, greedy, seeded
from tests.e2e.pair import make_engine, pair
from tests.e2e.tiny import (
    make_head,
    make_other_target,
    make_quantised_target,
    make_weight_only_target,
)

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
    "Gemma2": {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1,
               "head_dim": 32, "num_hidden_layers": 2, "intermediate_size": 128,
               "max_position_embeddings": 256},
    "Mistral": {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1,
                "head_dim": 32, "num_hidden_layers": 2, "intermediate_size": 128,
                "max_position_embeddings": 256, "sliding_window": 64},
}  # fmt: skip


QUANTISED_VOCAB = 96


@cache
def engine_of(family: str) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix="specplug-target-")) / family
    make_other_target(folder, family, 300, **SIZES[family])
    return {"model": str(folder), "skip_tokenizer_init": True}


def _is_lossless(family: str) -> None:
    params = [greedy(detokenize=False), seeded(3, detokenize=False)]
    prompts, each = (
        [p for p in PROMPTS for _ in params],
        [p.clone() for _ in PROMPTS for p in params],
    )
    # The oracle's trees branch and are often right; it also has the LM head looked up.
    for method in ("oracle", "ngram_tree"):
        engines = pair(method, **engine_of(family))
        engines.compare(prompts, each, branching=method == "oracle")


def check_learned_positions_and_a_tied_head() -> None:
    _is_lossless("GPT2")


def check_a_body_below_the_decoder() -> None:
    _is_lossless("OPT")


def check_partial_rotary_and_another_lm_head() -> None:
    _is_lossless("GPTNeoX")


def _is_refused(family: str, message: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=message):
        make_engine("ngram_tree", **engine_of(family))


def check_a_quantised_target_and_its_lm_head() -> None:
    """The head drafts with the numbers that the target itself computes with."""
    from vllm_specplug.vllm_worker.proposer import full_vocab_weight, vocabulary_tables

    folder = Path(tempfile.mkdtemp(prefix="specplug-quantised-"))
    target = make_quantised_target(folder / "target", QUANTISED_VOCAB)
    head = make_head(folder / "head", QUANTISED_VOCAB)
    engines = pair(
        "jetspec",
        model=str(target),
        skip_tokenizer_init=True,
        speculative={"model": str(head)},
    )
    params = [greedy(detokenize=False), seeded(3, detokenize=False)]
    prompts = [[p % QUANTISED_VOCAB for p in prompt] for prompt in PROMPTS for _ in params]
    engines.compare(prompts, [p.clone() for _ in PROMPTS for p in params])
    model, config = engines.runner.model, engines.runner.model_config
    embedding, lm_head = vocabulary_tables(model, config, "jetspec")
    assert lm_head is not embedding
    stored = load_file(target / "model.safetensors")
    expected = stored["lm_head.weight"].float() * stored["lm_head.weight_scale"]
    torch.testing.assert_close(full_vocab_weight(lm_head, config), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(
        full_vocab_weight(embedding, config), stored["model.embed_tokens.weight"]
    )


def check_four_bit_weights() -> None:
    """GPTQ and AWQ run on the CPU in bfloat16 alone, where rounding may decide between tokens that
    are equally likely; the target's choices here are clear."""
    for kind in ("gptq", "awq"):
        folder = Path(tempfile.mkdtemp(prefix="specplug-quantised-"))
        target = make_weight_only_target(folder / "target", QUANTISED_VOCAB, kind)
        head = make_head(folder / "head", QUANTISED_VOCAB)
        engine = {"model": str(target), "skip_tokenizer_init": True, "dtype": "bfloat16"}
        prompts = [[p % QUANTISED_VOCAB for p in prompt] for prompt in PROMPTS]
        for method, options in (("oracle", {}), ("jetspec", {"model": str(head)})):
            engines = pair(method, **engine, speculative=options)
            linear = engines.runner.model.model.layers[0].mlp.down_proj
            assert linear.qweight.dtype == torch.int32
            engines.compare(prompts, greedy(detokenize=False), branching=method == "oracle")


def check_alibi_is_refused() -> None:
    _is_refused("Bloom", "'ngram_tree' .*transformer.h.0.*has ALiBi")


def check_soft_caps_and_windows_are_refused() -> None:
    _is_refused("Gemma2", "'ngram_tree' .*sliding-window")
    _is_refused("Mistral", "'ngram_tree' .*sliding-window")


def check_layers_decide_where_the_config_does_not_tell() -> None:
    import vllm_specplug.vllm_process.engine_args as engine_args

    original = engine_args.check_engine_config
    engine_args.check_engine_config = lambda config: None
    try:
        _is_refused("Gemma2", "layers.0.*has (soft-capped logits|a sliding window)")
        _is_refused("Mistral", "layers.0.*has a sliding window")
    finally:
        engine_args.check_engine_config = original
