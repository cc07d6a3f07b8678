# SPDX-License-Identifier: Apache-2.0
"""Answers and features read as text, and the counts over them."""

from __future__ import annotations

import json

import pytest
import torch

from vllm_specplug.methods.dels.train.unigram_counts import write_unigram
from vllm_specplug.methods.dels.unigram import load_unigram, log_prior
from vllm_specplug.train.answers import Answer, answer_path
from vllm_specplug.train.text import TextStore


def write_answers(folder, answers):
    folder.mkdir(parents=True)
    for shard in range(2):
        rows = [json.dumps(vars(a)) for a in answers[shard::2]]
        answer_path(folder, shard).write_text("\n".join(rows) + "\n")
    return folder


def answer(prompt, tokens, source="a/x"):
    return Answer(source, tuple(prompt), tuple(tokens), 0.0, True)


@pytest.fixture
def answers(tmp_path):
    made = [
        answer([1, 9, 9], [4, 5, 4, 6, 2]),
        answer([1, 7], [5, 5, 5, 5], "b/y"),
        answer([1, 7, 7, 7], [8, 8, 8, 3, 2, 10, 10]),
        answer([1], [11, 11, 11]),  # too short to draft in
    ]
    return write_answers(tmp_path / "answers", made)


def test_answers_are_read_and_short_ones_left_out(answers, caplog):
    store = TextStore(answers, min_supervised=5)
    assert "2 of 4 answers left out: shorter than 5 tokens" in caplog.text
    assert [s.tokens.tolist() for s in store] == [
        [1, 9, 9, 4, 5, 4, 6, 2],
        [1, 7, 7, 7, 8, 8, 8, 3, 2, 10, 10],
    ]
    assert [s.prompt_len for s in store] == [3, 4]
    assert store.features is None
    assert TextStore(answers, min_supervised=1).sources() == {"a": 2, "b": 1}
    with pytest.raises(ValueError, match="no answer of 8 tokens"):
        TextStore(answers, min_supervised=8)


def test_features_are_read_with_the_targets_states(feature_folders):
    store = TextStore(feature_folders[0])
    assert store.features is not None and len(store) == 12
    assert store.sources() == {"kind0": 6, "kind1": 6}
    assert store[3].hidden.shape == (len(store[3].tokens), 32)
    with pytest.raises(ValueError, match="neither answers nor features"):
        TextStore(feature_folders[0] / "shard-00000")


def test_counts_leave_prompts_out(answers, feature_folders):
    counts = TextStore(answers, min_supervised=1).answer_counts(12)
    assert counts.tolist() == [0, 0, 2, 1, 2, 5, 1, 0, 3, 0, 2, 0]
    with pytest.raises(ValueError, match="holds token 10, legal: 0..8"):
        TextStore(answers, min_supervised=1).answer_counts(9)
    store = TextStore(feature_folders[0])
    supervised = torch.cat([s.tokens[s.prompt_len :] for s in store])
    assert torch.equal(store.answer_counts(64), torch.bincount(supervised, minlength=64))


def test_unigram_file_has_the_counts_of_answers(answers, target_folder, tmp_path):
    out = tmp_path / "unigram.safetensors"
    facts = write_unigram(target_folder, answers, out)
    assert facts == json.loads(out.with_suffix(".json").read_text())
    assert (facts["total_tokens"], facts["distinct_tokens"], facts["sequences"]) == (16, 7, 3)
    counts = load_unigram(out)
    assert counts.tolist() == [0, 0, 2, 1, 2, 5, 1, 0, 3, 0, 2] + [0] * 53
    log_probs = log_prior(counts, 64)
    assert float(log_probs.exp().sum()) == pytest.approx(1.0, rel=1e-5)
    assert float((log_probs[5] - log_probs[0]).exp()) == pytest.approx(6.0, rel=1e-4)
    with pytest.raises(ValueError, match="legal: a file name"):
        write_unigram(target_folder, answers, tmp_path / "unigram.pt")
