# SPDX-License-Identifier: Apache-2.0
"""What runs take from features: their order, the draft vocabulary, the layers' scales."""

from __future__ import annotations

import pytest
import torch

from vllm_specplug.train.features import FeatureStore
from vllm_specplug.train.order import DataOrder
from vllm_specplug.train.vocabulary import draft_vocabulary, vocabulary_coverage


def test_data_order_visits_everything_once_an_epoch_and_restores(feature_folders):
    store = FeatureStore(feature_folders[0])
    order = DataOrder(store, 5)
    first = [next(order) for _ in range(12)]
    assert sorted(first) == list(range(12))
    begun = [next(order) for _ in range(4)]
    saved = order.state()
    rest = [next(order) for _ in range(20)]
    again = DataOrder(store, 5)
    again.restore(saved)
    assert [next(again) for _ in range(20)] == rest
    assert sorted(begun + rest[:8]) == list(range(12))
    assert begun + rest[:8] != first
    with pytest.raises(ValueError, match="99 sequences"):
        again.restore({"epoch": 0, "cursor": 0, "size": 99})


def test_draft_vocabulary_is_the_frequent_answer_tokens(feature_folders):
    store = FeatureStore(feature_folders[0])
    tokens = torch.cat([store[i].tokens[store[i].prompt_len :] for i in range(len(store))])
    counts = torch.bincount(tokens, minlength=64)
    ids = draft_vocabulary(store, 5, 64, always=[2])
    coverage = vocabulary_coverage(store, ids, 64)
    assert 2 in ids
    assert len(set(ids.tolist())) == 5
    others = [i for i in ids.tolist() if i != 2]
    assert counts[others].min() >= counts.sort(descending=True).values[4]
    assert coverage == pytest.approx(float(counts[ids].sum() / counts.sum()))
    whole = draft_vocabulary(store, 64, 64)
    assert torch.equal(whole, torch.arange(64))
    assert vocabulary_coverage(store, whole, 64) == 1.0
    with pytest.raises(ValueError, match=r"holds token \d+, legal: 0\.\.8 "):
        draft_vocabulary(store, 5, 9)
