# SPDX-License-Identifier: Apache-2.0
"""Drafts of a token whose hidden states are NaN, against plain decoding.

It stands among the siblings of right ones, in lines, and in the slots that rejected drafts leave
behind, which the next step's single rows and other requests come to lie before.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
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


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A target whose token BAD has an embedding of NaN."""
    folder = make_target(tmp_path_factory.mktemp("llama"), VOCAB)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"][BAD] = float("nan")
    tensors["lm_head.weight"][BAD] = 0.0
    save_file(tensors, path, metadata={"format": "pt"})
    return {"model": str(folder), "skip_tokenizer_init": True}


@pytest.fixture(scope="module")
def zeros(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A target that divides by the size of an embedding, which is 0 for its padding token."""
    folder = tmp_path_factory.mktemp("gemma_3n")
    make_other_target(folder, "Gemma3nText", VOCAB, pads=False, **SIZES["Gemma3nText"])
    return pair("oracle", model=str(folder), skip_tokenizer_init=True)


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


def lines(llama: dict[str, Any]) -> Pair:
    """Attended by vLLM's own kernel."""
    return pair("oracle", **llama, speculative={"tree_width": 1})


@pytest.mark.parametrize("ahead", [False, True])
def test_siblings(llama: dict[str, Any], ahead: bool) -> None:
    compare(scheduled(ahead, **llama))


def test_lines(llama: dict[str, Any]) -> None:
    compare(lines(llama), branching=False)


def test_an_embedding_of_size_zero(zeros: Pair) -> None:
    compare(zeros)


@pytest.mark.parametrize("shape", [{}, {"kv_heads": 2}], ids=["keys and values", "keys as values"])
def test_a_heads_keys_and_values(tmp_path: Path, shape: dict[str, int]) -> None:
    """A head of finite weights whose keys and values are none, beside windows of the target; with
    two KV heads its keys lie where the target has values. Pages that it wrote become the target's.
    """
    folder = make_head(tmp_path, VOCAB, **shape)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in (n for n in tensors if n.endswith(("k_proj.weight", "v_proj.weight"))):
        tensors[name] = tensors[name].sign() * 3e38
    save_file(tensors, path, metadata={"format": "pt"})
    made = pair("jetspec", **engine_of("Mistral"), speculative={"model": str(folder)})
    assert len(made.runner.kv_cache_config.kv_cache_groups) > 1
    for _ in range(4):
        params = greedy(max_tokens=40, detokenize=False)
        made.compare(WINDOW_PROMPTS, params, least_accepted=0, branching=False)


def test_keys_where_another_group_has_values(tmp_path: Path) -> None:
    """A target with heads of two shapes in groups that share pages, whose token BAD is NaN."""
    make_other_target(tmp_path, "Gemma4Text", VOCAB, **SIZES["Gemma4Text"])
    tensors = load_file(path := tmp_path / "model.safetensors")
    # The other embedding is the LM head.
    tensors["model.embed_tokens_per_layer.weight"][BAD] = float("nan")
    save_file(tensors, path, metadata={"format": "pt"})
    made = pair("oracle", model=str(tmp_path), skip_tokenizer_init=True)
    for _ in range(3):
        compare(made)


# Last: see `differs_as_they_are`.
def test_stored_as_they_are_they_change_answers(llama: dict[str, Any], zeros: Pair) -> None:
    differs_as_they_are(scheduled(False, **llama))
    differs_as_they_are(scheduled(True, **llama))
    differs_as_they_are(lines(llama), branching=False)
    differs_as_they_are(zeros)
