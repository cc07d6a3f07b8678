# SPDX-License-Identifier: Apache-2.0
"""LongSpec's trainer: attention by slices and chunks, features, steps, resume, evaluation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.e2e.longspec_module import module_tree
from vllm_specplug.methods.longspec.config import LongSpecConfig
from vllm_specplug.methods.longspec.head import LongSpecHead
from vllm_specplug.methods.longspec.train.features import (
    KVFeatureStore,
    draw_offset,
    offset_positions,
)
from vllm_specplug.methods.longspec.train.objective import (
    CHAIN_DEPTH,
    LongSpecObjective,
    attention,
    pack,
    run_packed,
    stale_attention,
    window_attention,
)
from vllm_specplug.methods.longspec.train.options import LongSpecRecipe
from vllm_specplug.train.vocabulary import DraftTables

VOCAB = 64


def masked(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor):
    return attention(query[None], key[None], value[None], mask[None, None])[0]


def rows_and_columns(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    at = torch.arange(length)
    return at[:, None], at[None]


@pytest.mark.parametrize("length", [1, 7, 8, 9, 10, 16, 17, 41])
def test_window_attention_sees_itself_and_the_window_before_it(length: int) -> None:
    torch.manual_seed(length)
    q, k, v = torch.randn(length, 4, 8), torch.randn(length, 2, 8), torch.randn(length, 2, 8)
    row, column = rows_and_columns(length)
    mask = (column <= row) & (column >= row - 8)
    torch.testing.assert_close(window_attention(q, k, v, 8), masked(q, k, v, mask))


@pytest.mark.parametrize("staleness", [1, 2, 4])
@pytest.mark.parametrize("length", [1, 2, 5, 30])
def test_stale_attention_ends_before_the_query(length: int, staleness: int) -> None:
    torch.manual_seed(length)
    q, k, v = torch.randn(length, 4, 8), torch.randn(length, 2, 8), torch.randn(length, 2, 8)
    out = stale_attention(q, k, v, staleness)
    assert torch.equal(out[:staleness], torch.zeros_like(out[:staleness]))
    if length > staleness:
        row, column = rows_and_columns(length)
        mask = column <= row - staleness
        expected = masked(q[staleness:], k, v, mask[staleness:])
        torch.testing.assert_close(out[staleness:], expected)


@pytest.fixture(scope="module")
def store(kv_folders: tuple[Path, Path]) -> KVFeatureStore:
    return KVFeatureStore(kv_folders[0])


def test_features_are_the_targets_last_layer_at_shifted_positions(
    target_model: Any, store: KVFeatureStore
) -> None:
    assert any(int(s.positions[-1]) >= len(s) for s in (store[i] for i in range(len(store))))
    for sequence in (store[0], store[3]):
        with torch.no_grad():
            output = target_model.model(
                input_ids=sequence.tokens[None],
                position_ids=sequence.positions[None],
                attention_mask=torch.ones(1, len(sequence), dtype=torch.int64),
                use_cache=True,
            )
        last = output.past_key_values.layers[-1]
        states = last.keys[0].transpose(0, 1), last.values[0].transpose(0, 1)
        for ours, theirs in (
            (sequence.key, states[0]), (sequence.value, states[1]),
            (sequence.hidden, output.last_hidden_state[0]),
        ):  # fmt: skip
            torch.testing.assert_close(ours, theirs, atol=0.06, rtol=0.06)


def test_first_positions_stay_where_they_are() -> None:
    assert offset_positions(6, 2, 100).tolist() == [0, 1, 102, 103, 104, 105]
    rng = np.random.default_rng(1)
    for _ in range(200):
        keep, offset = draw_offset(50, 60, rng)
        assert 0 <= keep <= 4 and 0 <= offset < 10
    assert draw_offset(70, 60, rng)[1] == 0


def make_head(window: int = 16) -> LongSpecHead:
    torch.manual_seed(1)
    config = LongSpecConfig(32, 48, 4, 2, 8, VOCAB, VOCAB, window_size=window)
    return LongSpecHead(config)


def random_tables() -> DraftTables:
    return DraftTables(torch.randn(VOCAB, 32), torch.randn(VOCAB, 32), torch.arange(VOCAB))


def test_checkpointing_changes_memory_and_not_the_gradient(make_job: Any) -> None:
    grads = []
    for flag in (False, True):
        trainer = make_job("longspec", gradient_checkpointing=flag).trainer()
        trainer.accelerator.backward(trainer.step_loss().total)
        grads.append(trainer.head.cross_attn.q_proj.weight.grad.clone())
    torch.testing.assert_close(*grads)


def test_noise_draws_every_staleness_and_can_be_switched_off(make_job: Any) -> None:
    trainer = make_job("longspec").trainer()
    drawn = set()
    for trainer.step in range(30):
        drawn.update(trainer.objective.draw(trainer).staleness)
    assert drawn == {1, 2, 3, 4}
    quiet = make_job("longspec", max_staleness=1).trainer()
    assert set(quiet.objective.draw(quiet).staleness) == {1}


def test_supervised_rows_start_at_the_last_prompt_token(store: KVFeatureStore) -> None:
    batch = pack([store[0], store[1]], [1, 2])
    first = torch.arange(store[0].prompt_len - 1, len(store[0]) - 1)
    second = torch.arange(store[1].prompt_len - 1, len(store[1]) - 1) + len(store[0])
    assert torch.equal(batch.rows, torch.cat([first, second]))
    assert torch.equal(batch.labels, batch.tokens[batch.rows + 1])


def test_padding_changes_no_state_that_counts(store: KVFeatureStore) -> None:
    sequences = [store[0], store[1]]
    head, embed = make_head().eval(), torch.randn(VOCAB, 32)
    plain, padded = pack(sequences, [1, 2]), pack(sequences, [1, 2], multiple=64)
    assert len(padded.tokens) % 64 == 0 and sum(padded.lengths) == len(padded.tokens)
    assert torch.equal(plain.rows, padded.rows)
    with torch.no_grad():
        expected = run_packed(head, plain, embed)
        actual = run_packed(head, padded, embed)
    torch.testing.assert_close(actual[: len(expected)], expected)


def test_heldout_chains_are_those_of_the_module(store: KVFeatureStore) -> None:
    """Depth d of a draft reads a cache that ends d + 1 positions before it."""
    head, tables = make_head(window=64).eval(), random_tables()
    # Large values, so that one more or less of the cache changes the drafts.
    sequence = replace(store[3], value=30 * store[3].value)
    anchor, tokens = torch.tensor([20]), sequence.tokens.clone()
    chain = module_tree(
        head, sequence, (tables.embed_tokens, tables.lm_head), 20,
        budget=CHAIN_DEPTH, depth=CHAIN_DEPTH, width=1,
    ).token_ids.tolist()  # fmt: skip
    objective = LongSpecObjective(LongSpecRecipe())
    assert len(set(chain)) > 1
    with torch.no_grad():
        apart = objective.drafts(head, sequence, anchor, tables)[0].tolist()
        # The drafted chain stands in for the text; its cache entries are never read.
        tokens[21 : 21 + CHAIN_DEPTH] = torch.tensor(chain)
        followed = objective.drafts(head, replace(sequence, tokens=tokens), anchor, tables)
    assert followed[0].tolist() == chain
    # Without the text's agreement only the first draft is that of the chain.
    assert apart[0] == chain[0] and apart != chain
