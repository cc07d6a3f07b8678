# SPDX-License-Identifier: Apache-2.0
"""Packing of anchors: many blocks at once equal each block alone."""

from __future__ import annotations

import json

import torch

from tests.unit.methods.block.train.tiny_heads import make_head
from vllm_specplug.methods.block.train.blocks import (
    anchor_range,
    pack_blocks,
    run_blocks,
    sample_anchors,
    thin_anchors,
)
from vllm_specplug.train.features import FeatureStore


@torch.no_grad()
def test_packed_blocks_equal_single_blocks(feature_folders, target_folder):
    store = FeatureStore(feature_folders[0])
    for causal in (True, False):
        head, embed = make_head(target_folder, causal=causal)
        sequences = [store[0], store[7], store[3]]
        anchors = [torch.tensor([9, 10, 17]), torch.tensor([20]), torch.tensor([8, 26])]
        packed = pack_blocks(sequences, anchors, 4, context_multiple=16)
        assert [s.context for s in packed.segments] == [32, 32, 32]
        together = run_blocks(head, _floats(packed), embed).view(6, 3, -1)
        row = 0
        for sequence, at in zip(sequences, anchors, strict=True):
            for anchor in at:
                single = pack_blocks([sequence], [anchor[None]], 4)
                assert len(single.context_positions) == anchor  # strictly before the anchor
                alone = run_blocks(head, _floats(single), embed)
                torch.testing.assert_close(together[row], alone, rtol=1e-4, atol=1e-4)
                row += 1


def test_slots_carry_the_tokens_and_teachers_of_their_positions(feature_folders):
    store = FeatureStore(feature_folders[0])
    sequence = store[2]
    last = len(sequence.tokens) - 2
    batch = pack_blocks([sequence], [torch.tensor([10, last])], 5)
    assert batch.anchor_tokens.tolist() == sequence.tokens[[10, last]].tolist()
    assert batch.positions.tolist() == [*range(10, 15), *range(last, last + 5)]
    assert batch.labels[:4].tolist() == sequence.tokens[11:15].tolist()
    assert torch.equal(batch.teacher[:4], sequence.hidden[10:14])
    assert batch.valid.tolist() == [True] * 4 + [True, False, False, False]


def test_sampled_anchors_are_legal_spread_and_reproducible(feature_folders):
    sequence = FeatureStore(feature_folders[0])[4]
    legal = anchor_range(sequence)
    assert legal.start == sequence.prompt_len
    draws = [sample_anchors(sequence, 3, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    for anchors in draws:
        assert all(int(a) in legal for a in anchors)
        assert (anchors.diff() > 0).all()
        assert len(anchors) >= len(legal) // 3


def test_thinning_keeps_order_and_small_sets():
    generator = torch.Generator().manual_seed(0)
    anchors = torch.arange(0, 60, 3)
    thin = thin_anchors(anchors, 8, generator)
    assert len(thin) == 16
    assert (thin.diff() > 0).all()
    assert set(thin.tolist()) <= set(anchors.tolist())
    assert torch.equal(thin_anchors(anchors[:5], 8, generator), anchors[:5])
    assert torch.equal(thin_anchors(anchors[:16], 8, generator), anchors[:16])


def _floats(batch):
    from dataclasses import replace

    return replace(batch, aux=batch.aux.float())


def test_a_head_is_made_for_contexts_as_long_as_its_target(target_folder):
    """vLLM's own methods refuse one that is made for less than is served."""
    head, _ = make_head(target_folder)
    config = json.loads((target_folder / "config.json").read_text())
    assert head.config.max_position_embeddings == config["max_position_embeddings"] > 0
