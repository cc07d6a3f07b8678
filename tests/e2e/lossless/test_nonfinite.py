# SPDX-License-Identifier: Apache-2.0
"""Drafts of a token whose hidden states are NaN, against plain decoding.

It stands among the siblings of right ones, in lines, and in the slots that rejected drafts leave
behind, which the next step's single rows and other requests come to lie before.
"""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest
from safetensors.torch import load_file, save_file
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

from tests.e2e.families import SIZES, VOCAB, WINDOW_PROMPTS, engine_of
from tests.e2e.oracle import OracleDrafter
from tests.e2e.pair import Pair, pair, scheduled
from tests.e2e.requests import greedy, seeded
from tests.e2e.tiny import make_head, make_other_target
from vllm_specplug.testing.target import make_target
from vllm_specplug.vllm_attention.cpu import TreeCPUAttentionBackendImpl

pytestmark = [pytest.mark.e2e, pytest.mark.own_process]

BAD = 2


@cache
def llama() -> str:
    """A target whose token BAD has an embedding of NaN."""
    folder = make_target(Path(tempfile.mkdtemp(prefix="specplug-nan-")), VOCAB)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"][BAD] = float("nan")
    tensors["lm_head.weight"][BAD] = 0.0
    save_file(tensors, path, metadata={"format": "pt"})
    return str(folder)


@cache
def gemma_3n() -> str:
    """A target that divides by the size of an embedding, which is 0 for its padding token."""
    folder = Path(tempfile.mkdtemp(prefix="specplug-nan-")) / "gemma"
    return str(make_other_target(folder, "Gemma3nText", VOCAB, pads=False, **SIZES["Gemma3nText"]))


@cache
def gemma_4() -> str:
    """A target with heads of two shapes in groups that share pages, whose token BAD is NaN."""
    folder = Path(tempfile.mkdtemp(prefix="specplug-nan-")) / "gemma"
    make_other_target(folder, "Gemma4Text", VOCAB, **SIZES["Gemma4Text"])
    tensors = load_file(path := folder / "model.safetensors")
    # The other embedding is the LM head.
    tensors["model.embed_tokens_per_layer.weight"][BAD] = float("nan")
    save_file(tensors, path, metadata={"format": "pt"})
    return str(folder)


def compare(made: Pair, *, branching: bool = True) -> None:
    # Plain vLLM would store its NaN, and read it in the block's next request.
    never = {"logit_bias": {BAD: -100.0}}
    params = [
        greedy(max_tokens=40, detokenize=False)
        if i % 2
        else seeded(i, max_tokens=40, detokenize=False, **never)
        for i in range(len(WINDOW_PROMPTS))
    ]
    with patch.object(OracleDrafter, "decoy", BAD):
        made.compare(WINDOW_PROMPTS, params, least_accepted=40, branching=branching)


def differs_as_they_are(made: Pair, *, branching: bool = True) -> None:
    """The control: written by vLLM alone. What it leaves in the caches stays there."""
    stock = CPUAttentionBackendImpl.do_kv_cache_update
    with (
        patch.object(TreeCPUAttentionBackendImpl, "do_kv_cache_update", stock),
        pytest.raises(AssertionError, match="differs"),
    ):
        compare(made, branching=branching)


def siblings(*, ahead: bool = False) -> Pair:
    return scheduled(ahead, model=llama(), skip_tokenizer_init=True)


def lines() -> Pair:
    """Attended by vLLM's own kernel."""
    return pair("oracle", model=llama(), skip_tokenizer_init=True, speculative={"tree_width": 1})


def zeros() -> Pair:
    return pair("oracle", model=gemma_3n(), skip_tokenizer_init=True)


def test_siblings() -> None:
    compare(siblings())


def test_siblings_scheduled_ahead() -> None:
    compare(siblings(ahead=True))


def test_lines() -> None:
    compare(lines(), branching=False)


def test_an_embedding_of_size_zero() -> None:
    compare(zeros())


def with_overflowing_head(**shape: int) -> Pair:
    """A head of finite weights whose keys and values are none, beside windows of the target."""
    folder = make_head(Path(tempfile.mkdtemp(prefix="specplug-nan-")) / "head", VOCAB, **shape)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in (n for n in tensors if n.endswith(("k_proj.weight", "v_proj.weight"))):
        tensors[name] = tensors[name].sign() * 3e38
    save_file(tensors, path, metadata={"format": "pt"})
    return pair("jetspec", **engine_of("Mistral"), speculative={"model": str(folder)})


def waves(made: Pair) -> None:
    """Pages that the head wrote become the target's."""
    assert len(made.runner.kv_cache_config.kv_cache_groups) > 1
    for _ in range(4):
        params = greedy(max_tokens=40, detokenize=False)
        made.compare(WINDOW_PROMPTS, params, least_accepted=0, branching=False)


def test_a_heads_keys_and_values() -> None:
    waves(with_overflowing_head())


def test_a_heads_keys_where_the_target_has_values() -> None:
    waves(with_overflowing_head(kv_heads=2))


def test_keys_where_another_group_has_values() -> None:
    made = pair("oracle", model=gemma_4(), skip_tokenizer_init=True)
    for _ in range(3):
        compare(made)


# Last: see `differs_as_they_are`.
def test_stored_as_they_are_they_change_answers() -> None:
    differs_as_they_are(siblings())
    differs_as_they_are(siblings(ahead=True))
    differs_as_they_are(lines(), branching=False)
    differs_as_they_are(zeros())
