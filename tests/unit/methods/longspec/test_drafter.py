# SPDX-License-Identifier: Apache-2.0
"""The LongSpec drafter drafts the trees that the plain module drafts, for many requests at once."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.e2e.longspec_module import module_tree
from tests.e2e.tiny import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, make_longspec_head
from tests.unit.dense_trees import DenseTarget
from tests.unit.drafters import load_drafter, requests_of
from vllm_specplug.drafting.caches import TargetCacheSpec
from vllm_specplug.drafting.requests import DraftRequests
from vllm_specplug.methods.longspec.checkpoint import load_longspec_head
from vllm_specplug.methods.longspec.drafter import LongSpecDrafter
from vllm_specplug.methods.longspec.train.features import KVSequence
from vllm_specplug.vllm_worker.memory.window_cache import WindowCache

pytestmark = pytest.mark.usefixtures("vllm_kernels")

VOCAB, WINDOW, MAX_LEN = 20, 16, 128
LENGTHS = [0, 5, 16, 40, 100]
TARGET = SimpleNamespace(
    hidden_size=HIDDEN, vocab_size=VOCAB, num_hidden_layers=2, num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, intermediate_size=128, rms_norm_eps=1e-6,
    rope_parameters={"rope_theta": 10000.0, "rope_type": "default"},
)  # fmt: skip


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_longspec_head(tmp_path_factory.mktemp("head"), VOCAB, window=WINDOW)


def tables() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(VOCAB, HIDDEN), torch.randn(VOCAB, HIDDEN)


def make_drafter(head: Path, **options: Any) -> LongSpecDrafter:
    embed, lm_head = tables()
    given = {"settings": None, "num_nodes": 16, "max_depth": 16,
             "tree_width": 8, "max_model_len": MAX_LEN, **options}  # fmt: skip
    drafter: LongSpecDrafter = load_drafter(
        LongSpecDrafter, head, lm_head=lm_head, embed=embed, text_config=TARGET, **given
    )
    drafter.bind_window(WindowCache(drafter.window_spec(), len(LENGTHS), torch.float32))
    # The last layer's keys and values of each request.
    spec = TargetCacheSpec(KV_HEADS, HEAD_DIM, HEAD_DIM**-0.5)
    caches = [(text.key, text.value) for text in sequences()]
    drafter.bind_target_caches([DenseTarget(caches, spec, on_device=False)])
    return drafter


def sequences() -> list[KVSequence]:
    rng = np.random.default_rng(4)
    torch.manual_seed(9)
    made = []
    for length in LENGTHS:
        count = length + 8
        made.append(
            KVSequence(
                torch.from_numpy(rng.integers(0, VOCAB, count)), torch.arange(count), 1,
                torch.randn(count, KV_HEADS, HEAD_DIM), torch.randn(count, KV_HEADS, HEAD_DIM),
                torch.zeros(count, HIDDEN),
            )
        )  # fmt: skip
    return made


def requests_for(texts: list[KVSequence], budgets: list[int], width: int) -> DraftRequests:
    tokens = [t.tokens[: n + 1] for t, n in zip(texts, LENGTHS, strict=True)]
    return requests_of(tokens, budgets, width)


def test_batched_trees_are_those_of_each_request_alone(head: Path) -> None:
    drafter = make_drafter(head)
    texts = sequences()
    budgets, width = [16, 9, 16, 1, 12], 8
    trees = drafter.propose(requests_for(texts, budgets, width))
    module, _ = load_longspec_head(head, TARGET)
    for r, (tree, text) in enumerate(zip(trees, texts, strict=True)):
        tree.validate()
        expected = module_tree(
            module, text, tables(), LENGTHS[r], budget=budgets[r], depth=4, width=width
        )
        assert tree.token_ids.tolist() == expected.token_ids.tolist()
        assert tree.parent_indices.tolist() == expected.parent_indices.tolist()
        np.testing.assert_allclose(tree.scores, expected.scores, atol=2e-4)
    assert max(tree.num_nodes for tree in trees) > 1


@pytest.mark.parametrize("shares", [True, False])
def test_ranks_with_other_bits_draft_the_first_ranks_rows(head: Path, shares: bool) -> None:
    """Without what the first rank sends, the other one would draft other trees."""
    texts, sent = sequences(), []
    first, later = make_drafter(head), make_drafter(head)
    later.embed_tokens = later.embed_tokens + torch.randn(VOCAB, HIDDEN)
    trees = []
    for drafter in (first, later):
        if shares:

            def first_rank(tensor: torch.Tensor, is_first: bool = drafter is first) -> torch.Tensor:
                sent.extend([tensor.clone()] * is_first)
                message = sent[-1] if is_first else sent.pop(0)
                # All ranks must send the same shape and dtype.
                assert (message.shape, message.dtype) == (tensor.shape, tensor.dtype)
                return tensor.copy_(message)

            drafter.first_rank = first_rank
        trees.append(drafter.propose(requests_for(texts, [16] * 5, 8)))
    assert not sent
    same = [
        a.token_ids.tolist() == b.token_ids.tolist() and np.array_equal(a.scores, b.scores)
        for a, b in zip(*trees, strict=True)
    ]
    assert all(same) if shares else not any(same)


def test_prompt_tokens_past_the_vocabulary_stop_nothing(head: Path) -> None:
    """vLLM takes every id its tokenizer knows, and pads the target's embedding."""
    drafter = make_drafter(head)
    texts = sequences()
    for text in texts:
        text.tokens[:-9:3] = VOCAB + 1
    trees = drafter.propose(requests_for(texts, [8] * 5, 8))
    assert all(tree.fault(VOCAB) is None and tree.num_nodes for tree in trees)


@pytest.mark.parametrize(("max_model_len", "size"), [(MAX_LEN, WINDOW), (10, 10)])
def test_a_window_is_no_longer_than_the_model(head: Path, max_model_len: int, size: int) -> None:
    assert make_drafter(head, max_model_len=max_model_len).window_spec().size == size


def test_positions_past_the_models_end_are_not_looked_up(head: Path) -> None:
    drafter = make_drafter(head, max_model_len=102)
    trees = drafter.propose(requests_for(sequences(), [8] * 5, 8))
    assert trees[-1].num_nodes == 8
