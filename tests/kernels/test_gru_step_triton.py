# SPDX-License-Identifier: Apache-2.0
"""The fused GRU step equals the readable one, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.local_trees import builder, candidates
from vllm_specplug.methods.local.head import LocalHead, LocalHeadConfig

V, H = 40, 24


@pytest.mark.parametrize(("size", "nodes"), [(32, 1), (70, 5), (128, 16), (96, 40)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_new_states_equal_the_readable_step(
    interpreter: None, size: int, nodes: int, dtype: torch.dtype
) -> None:
    from vllm_specplug.kernels.gru_step_triton import gru_step_triton

    torch.manual_seed(size)
    head = LocalHead(
        LocalHeadConfig(kind="gru", vocab_size=V, target_hidden_size=H, hidden_size=size, rank=8)
    ).requires_grad_(False)
    embed = torch.randn(V, H)
    w_hh = head.prefix_gru.weight_hh_l0.normal_(std=0.3).to(dtype)
    gates = (embed @ head.prefix_gru.weight_ih_l0.normal_(std=0.3).T).to(dtype)
    states = torch.randn(7, size).to(dtype)
    tokens = torch.randint(0, V, (nodes,))
    parents = torch.randint(-1, 7, (nodes,)).int()
    parents[0] = -1
    actual = gru_step_triton(tokens, parents, states, gates, w_hh)
    assert actual.dtype == dtype and actual.shape == (nodes, size)

    # The readable step of the same rounded numbers, in float32.
    head.prefix_gru.weight_hh_l0.copy_(w_hh.float())
    before = torch.where(parents[:, None] >= 0, states[parents.clamp(min=0)].float(), 0.0)
    reset_x, update_x, new_x = gates[tokens].float().chunk(3, -1)
    reset_h, update_h, new_h = (before @ w_hh.float().T).chunk(3, -1)
    update = (update_x + update_h).sigmoid()
    new = (new_x + (reset_x + reset_h).sigmoid() * new_h).tanh()
    expected = (1 - update) * new + update * before
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert torch.allclose(actual.float(), expected, atol=tolerance, rtol=tolerance)
    assert torch.equal(actual[0], gru_step_triton(tokens[:1], parents[:1], states, gates, w_hh)[0])
    if dtype == torch.float32:
        _, stepped = head.step(tokens, before, embed)
        assert torch.allclose(actual, stepped, atol=1e-4)


@pytest.mark.parametrize("budgets", [[10, 6], [10, 0]])
def test_trees_with_the_fused_step_equal_the_readable_ones(
    interpreter: None, budgets: list[int]
) -> None:
    """Rows of a frontier hold places without a node, whose parents are rows all the same."""
    b = builder("gru", torch.float32, anchor=True)
    ids, log_probs = candidates(2, 32)
    args = (ids, log_probs, [5, 299], budgets, [4, 3], 4)
    expected = b.build(*args, compiled=False)
    assert b.gates is None
    b._make_gates()
    assert b.gates is not None
    for tree, oracle in zip(b.build(*args, compiled=False), expected, strict=True):
        tree.validate()
        assert tree.token_ids.tolist() == oracle.token_ids.tolist()
        assert tree.parent_indices.tolist() == oracle.parent_indices.tolist()
        assert torch.allclose(torch.tensor(tree.scores), torch.tensor(oracle.scores), atol=1e-4)
