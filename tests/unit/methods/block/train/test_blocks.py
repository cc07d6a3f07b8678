# SPDX-License-Identifier: Apache-2.0
"""Packing of anchors: many blocks at once equal each block alone."""

from __future__ import annotations

import pytest
import torch

from vllm_specplug.methods.block.head import BlockHead
from vllm_specplug.methods.block.train.blocks import (
    anchor_range,
    block_attention,
    pack_blocks,
    run_blocks,
    sample_anchors,
)
from vllm_specplug.methods.block.train.start import head_config_for
from vllm_specplug.methods.dspark_tree.train.objective import tokens_before
from vllm_specplug.train.features import FeatureStore
from vllm_specplug.train.target import TargetWeights


def make_head(target_folder, causal=True):
    weights = TargetWeights(target_folder)
    config = head_config_for(
        weights.config, (0, 2), num_layers=2, block_size=4, draft_vocab_size=64, causal=causal
    )
    torch.manual_seed(3)
    return BlockHead(config).eval(), weights.tables().embed_tokens.float()


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


@pytest.mark.parametrize("first_slot", [0, 1])
def test_slots_carry_the_tokens_and_teachers_of_their_positions(feature_folders, first_slot):
    """The first slot that drafts is the anchor's own in a DSpark head."""
    sequence = FeatureStore(feature_folders[0])[2]
    last = len(sequence.tokens) - 2
    size = 4 + first_slot
    batch = pack_blocks([sequence], [torch.tensor([10, last])], size, first_slot=first_slot)
    assert batch.anchor_tokens.tolist() == sequence.tokens[[10, last]].tolist()
    assert batch.positions.tolist() == [*range(10, 10 + size), *range(last, last + size)]
    assert batch.labels[:4].tolist() == sequence.tokens[11:15].tolist()
    assert torch.equal(batch.teacher[:4], sequence.hidden[10:14])
    assert batch.valid.tolist() == [True] * 4 + [True, False, False, False]
    assert tokens_before(batch)[:4].tolist() == sequence.tokens[10:14].tolist()


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


def _floats(batch):
    return batch._replace(aux=batch.aux.float())


@torch.no_grad()
@pytest.mark.parametrize("causal", [True, False])
def test_attention_equals_torch_sdpa(causal):
    """The concatenated-scores attention against scaled_dot_product_attention over a full mask."""
    blocks, size, context = 3, 5, 7
    q = torch.randn(blocks * size, 4, 8)
    k, v = torch.randn(blocks * size, 2, 8), torch.randn(blocks * size, 2, 8)
    ck, cv = torch.randn(context, 2, 8), torch.randn(context, 2, 8)
    seen = torch.tensor([1, 4, 7])
    visible = torch.arange(context)[None] < seen[:, None]
    mask = torch.zeros(blocks, context).masked_fill(~visible, float("-inf"))
    got = block_attention(q, k, v, ck, cv, mask, block_size=size, scale=0.4, causal=causal)
    rows = torch.arange(blocks * size)
    same = rows[:, None] // size == rows[None] // size
    inside = same & (rows[None] <= rows[:, None]) if causal else same
    allowed = torch.cat((visible.repeat_interleave(size, 0), inside), 1)
    keys, values = torch.cat((ck, k)), torch.cat((cv, v))
    want = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1),
        keys.transpose(0, 1),
        values.transpose(0, 1),
        attn_mask=allowed,
        scale=0.4,
        enable_gqa=True,
    ).transpose(0, 1)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
