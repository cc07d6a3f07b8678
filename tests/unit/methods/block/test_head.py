# SPDX-License-Identifier: Apache-2.0
"""Promises of the block head as a module."""

from __future__ import annotations

import pytest
import torch

from vllm_specplug.methods.block.head import BlockHead, BlockHeadConfig
from vllm_specplug.methods.block.train.blocks import block_attention

CONTEXT = 11


def tiny_config(**changes) -> BlockHeadConfig:
    values = dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, vocab_size=50, draft_vocab_size=50,
        target_hidden_size=32, target_layer_ids=(0, 2), block_size=5,
    )  # fmt: skip
    return BlockHeadConfig(**{**values, **changes})


@pytest.fixture
def head() -> BlockHead:
    torch.manual_seed(0)
    head = BlockHead(tiny_config())
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return head.eval()


def draft(head: BlockHead, aux: torch.Tensor, anchor: torch.Tensor, causal=True, shift: int = 0):
    """Hidden states [block, H] of a block whose context is all of `aux`, from position `shift`."""
    size, context = head.config.block_size, aux.shape[0]
    positions = torch.arange(context + size) + shift
    keys, values = head.context_kv(head.context_features(aux), positions[:context])

    def attend(layer, q, k, v):
        return block_attention(
            q, k, v, keys[layer], values[layer], torch.zeros(1, context), block_size=size,
            scale=head.config.attention_scale, causal=causal,
        )  # fmt: skip

    embeds = anchor if anchor.ndim == 2 else head.block_embeds(anchor[None], size)[0]
    return head(embeds, positions[context:], attend)


@torch.no_grad()
def test_later_slots_do_not_change_earlier_outputs(head):
    aux, inputs = torch.randn(CONTEXT, 64), torch.randn(5, 32)
    changed = inputs.clone()
    changed[3] += 1.0
    before, after = draft(head, aux, inputs), draft(head, aux, changed)
    assert torch.equal(before[:3], after[:3])
    assert not torch.allclose(before[3:], after[3:])


@torch.no_grad()
def test_bidirectional_block_sees_later_slots(head):
    aux, inputs = torch.randn(CONTEXT, 64), torch.randn(5, 32)
    changed = inputs.clone()
    changed[4] += 1.0
    before = draft(head, aux, inputs, causal=False)
    assert not torch.allclose(before[:4], draft(head, aux, changed, causal=False)[:4])


@torch.no_grad()
def test_context_features_and_anchor_decide_the_draft(head):
    aux, anchor = torch.randn(CONTEXT, 64), torch.randn(32)
    base = draft(head, aux, anchor)
    other = aux.clone()
    other[2] += 1.0
    assert not torch.allclose(base, draft(head, other, anchor))
    assert not torch.allclose(base[1:], draft(head, aux, anchor + 1.0)[1:])


@torch.no_grad()
def test_context_kv_in_pieces_equals_one_shot(head):
    features = head.context_features(torch.randn(CONTEXT, 64))
    positions = torch.arange(CONTEXT)
    keys, values = head.context_kv(features, positions)
    pieces = [head.context_kv(features[a:b], positions[a:b]) for a, b in ((0, 4), (4, 5), (5, 11))]
    assert keys.shape == (2, CONTEXT, 2, 8)
    torch.testing.assert_close(torch.cat([k for k, _ in pieces], 1), keys)
    torch.testing.assert_close(torch.cat([v for _, v in pieces], 1), values)


@torch.no_grad()
def test_only_relative_positions_matter(head):
    """Rotary positions: shifting context and block together leaves the draft unchanged."""
    aux, anchor = torch.randn(CONTEXT, 64), torch.randn(32)
    outputs = [draft(head, aux, anchor, shift=shift) for shift in (0, 100)]
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_block_embeds_are_anchor_then_masks(head):
    anchors = torch.randn(3, 32)
    embeds = head.block_embeds(anchors, 4)
    assert embeds.shape == (3, 4, 32)
    assert torch.equal(embeds[:, 0], anchors)
    assert torch.equal(embeds[:, 1:], head.mask_embedding.expand(3, 3, 32))


@torch.no_grad()
def test_attention_equals_torch_sdpa(head):
    """The concatenated-scores attention against scaled_dot_product_attention over a full mask."""
    blocks, size, context = 3, 5, 7
    q = torch.randn(blocks * size, 4, 8)
    k, v = torch.randn(blocks * size, 2, 8), torch.randn(blocks * size, 2, 8)
    ck, cv = torch.randn(context, 2, 8), torch.randn(context, 2, 8)
    seen = torch.tensor([1, 4, 7])
    visible = torch.arange(context)[None] < seen[:, None]
    mask = torch.zeros(blocks, context).masked_fill(~visible, float("-inf"))
    got = block_attention(q, k, v, ck, cv, mask, block_size=size, scale=0.4, causal=True)
    rows = torch.arange(blocks * size)
    same = rows[:, None] // size == rows[None] // size
    allowed = torch.cat(
        (visible.repeat_interleave(size, 0), same & (rows[None] <= rows[:, None])), 1
    )
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
