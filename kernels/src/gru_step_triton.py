# SPDX-License-Identifier: Apache-2.0
"""One step of a local head's GRU for a frontier of nodes, in one kernel.

`methods.local.head.LocalHead.step` is the readable version. The product with the recurrent
weights, the gather of each node's precomputed input gates, and the cell are fused; only the new
state is written. Each program owns a block of the state for all nodes of a block of the
frontier, and reads its share of W_hh once.

Letters: F nodes of the frontier, P nodes of the one before, S state, V' draft vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_nodes"])
def _gru_step_kernel(
    # [F] int64: token each node reads, as a row of `gates`
    tokens,
    # [F] int32: the node it extends, as a row of `states`; -1 starts from zeros
    parents,
    # [P, S]
    states,
    # [V', 3 * S]: input gates reset, update, new
    gates,
    # [3 * S, S]
    weight,
    # [F, S]
    output,
    num_nodes,
    size,
    NODES: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    node = tl.program_id(1) * NODES + tl.arange(0, NODES)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_node, is_column = node < num_nodes, column < size
    parent = tl.load(parents + node, mask=is_node, other=-1)
    token = tl.load(tokens + node, mask=is_node, other=0)
    has_parent = is_node & (parent >= 0)
    row = tl.where(parent >= 0, parent, 0).to(tl.int64) * size

    reset = tl.zeros((NODES, COLUMNS), tl.float32)
    update = tl.zeros((NODES, COLUMNS), tl.float32)
    fresh = tl.zeros((NODES, COLUMNS), tl.float32)
    for start in range(0, size, DEPTH):
        k = start + tl.arange(0, DEPTH)
        h = tl.load(
            states + row[:, None] + k[None, :],
            mask=has_parent[:, None] & (k < size)[None, :],
            other=0.0,
        )
        # [DEPTH, COLUMNS] of each gate's weights, transposed
        at = weight + column[None, :].to(tl.int64) * size + k[:, None]
        inside = is_column[None, :] & (k < size)[:, None]
        gate = size.to(tl.int64) * size
        reset = tl.dot(h, tl.load(at, mask=inside, other=0.0), reset, input_precision="ieee")
        update = tl.dot(
            h, tl.load(at + gate, mask=inside, other=0.0), update, input_precision="ieee"
        )
        fresh = tl.dot(
            h, tl.load(at + 2 * gate, mask=inside, other=0.0), fresh, input_precision="ieee"
        )

    block = is_node[:, None] & is_column[None, :]
    x = gates + token[:, None] * (3 * size) + column[None, :]
    reset = tl.sigmoid(reset + tl.load(x, mask=block, other=0.0).to(tl.float32))
    update = tl.sigmoid(update + tl.load(x + size, mask=block, other=0.0).to(tl.float32))
    fresh = tl.load(x + 2 * size, mask=block, other=0.0).to(tl.float32) + reset * fresh
    fresh = 2.0 * tl.sigmoid(2.0 * fresh) - 1.0  # tanh
    old = tl.load(
        states + row[:, None] + column[None, :],
        mask=has_parent[:, None] & is_column[None, :],
        other=0.0,
    ).to(tl.float32)
    new = fresh + update * (old - fresh)
    tl.store(
        output + node[:, None].to(tl.int64) * size + column[None, :],
        new.to(output.dtype.element_ty),
        mask=block,
    )


def gru_step_triton(
    # [F] int64
    tokens: torch.Tensor,
    # [F] int32
    parents: torch.Tensor,
    # [P, S]
    states: torch.Tensor,
    # [V', 3 * S]
    gates: torch.Tensor,
    # [3 * S, S]
    weight: torch.Tensor,
) -> torch.Tensor:
    """New states [F, S] of nodes that read `tokens` after their parents. No host synchronisation.

    Args:
        tokens: rows of `gates`.
        parents: rows of `states`; -1 for a node that starts from a state of zeros.
        states: of the nodes before.
        gates: input gates of every token, E W_ih^T.
        weight: recurrent weights W_hh, gates in the order reset, update, new.
    """
    num_nodes, size = len(tokens), states.shape[1]
    assert weight.shape == (3 * size, size), (weight.shape, size)
    assert gates.shape[1] == 3 * size, (gates.shape, size)
    for tensor in (tokens, parents, states, gates, weight):
        assert tensor.is_contiguous(), tensor.shape
    output = torch.empty((num_nodes, size), dtype=states.dtype, device=states.device)
    if num_nodes == 0:
        return output
    # The minimum height of a product on tensor cores; frontiers are seldom larger.
    nodes = 16 if num_nodes <= 16 else 32
    columns, depth = 32, 64
    grid = (triton.cdiv(size, columns), triton.cdiv(num_nodes, nodes))
    _gru_step_kernel[grid](
        tokens, parents, states, gates, weight, output, num_nodes, size,
        NODES=nodes, COLUMNS=columns, DEPTH=depth,
    )  # fmt: skip
    return output
