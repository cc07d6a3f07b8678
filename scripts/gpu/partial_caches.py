# SPDX-License-Identifier: Apache-2.0
"""Checks of partial caches on a device, for `check.py`."""

from __future__ import annotations

import partial_cache_reference as partial_cache
import torch

from vllm_specplug.kernels.kv_compact_triton import LayerCaches


def check_partial_caches(record: dict, device: torch.device) -> None:
    """Compares scores, chosen tokens, appended tokens and counts of three requests with the
    reference."""
    from vllm_specplug.kernels import partial_cache_triton as kernels

    big = device.type == "cuda"
    page, heads, group, dim, layers = (16, 8, 4, 128, 4) if big else (16, 2, 2, 16, 2)
    budget, sink, lens = (1024, 16, [5000, 1025, 20000]) if big else (40, 4, [60, 41, 100])
    dtype = torch.bfloat16 if big else torch.float32
    draw = torch.Generator().manual_seed(0)
    columns = -(-max(lens) // page)
    order = torch.randperm(len(lens) * columns, generator=draw).view(len(lens), columns)
    table = order.int().to(device)
    caches = [
        # Sums of products of small integers are exact in every order.
        torch.randint(-9, 10, (order.numel(), heads, page, 2 * dim), generator=draw).to(
            device, dtype
        ).transpose(1, 2)
        for _ in range(layers)
    ]  # fmt: skip
    query = torch.randint(-9, 10, (3, group * heads, dim), generator=draw).to(device, dtype)
    lengths = torch.tensor(lens, device=device)
    chosen = torch.tensor([[0, 2], [0, 2], [1, 0], [1, 1]], dtype=torch.int32, device=device)
    limits = {"sink": sink, "recent": min(32, budget - sink), "most": max(lens)}
    given = query, caches[0], chosen, lengths, table
    scores = kernels.score_keys_triton(*given, **limits)
    wanted = partial_cache.score_keys(*given, **limits)
    assert torch.equal(scores[..., : max(lens)], wanted), "scores"

    blocks = -(-budget // page)
    pools = [
        [c.new_zeros(3 * blocks, page, heads, 2 * dim) for c in caches] for _ in range(2)
    ]  # fmt: skip
    positions = scores.topk(budget - sink, dim=-1).indices
    options = {"sink": sink, "blocks": blocks}
    partial_cache.gather_chosen(positions, caches[0], pools[0][0], chosen, table, **options)
    kernels.gather_chosen_triton(
        positions, caches[0], pools[1][0], chosen, lengths, table, **options
    )
    assert torch.equal(pools[0][0], pools[1][0]), "chosen tokens"

    # The second request appends twenty tokens.
    grown = torch.tensor([[1], [1], [2], [0]], dtype=torch.int32, device=device)
    covered = torch.tensor([0, 0, lens[1] - 20], device=device)
    tails = torch.tensor([0, 0, budget - 3], device=device)
    state = grown, lengths, covered, tails, table
    partial_cache.append_to_tail(list(zip(caches, pools[0], strict=True)), *state, blocks=blocks)
    pairs = LayerCaches.of(list(zip(caches, pools[1], strict=True)))
    kernels.append_to_tail_triton(pairs, *state, blocks=blocks)
    for layer, pair in enumerate(zip(*pools, strict=True)):
        assert torch.equal(*pair), f"appended tokens, layer {layer}"
    every = torch.cat([chosen, grown], dim=1)
    kept = [(covered.clone(), tails.clone()) for _ in range(2)]
    partial_cache.count_tokens(every, lengths, *kept[0], budget=budget)
    kernels.count_tokens_triton(every, lengths, *kept[1], budget=budget)
    assert torch.equal(torch.stack(kept[0]), torch.stack(kept[1])), "counts"
    record["contexts"] = lens
