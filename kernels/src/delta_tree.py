# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet layers over trees: one committed state per sequence, all nodes at once.

Such a layer keeps a matrix S [K, V] per value head and the last W - 1 inputs of a causal
convolution. A token with key k, value v, decay d = exp(g) and strength b does (Yang et al., "Gated
Delta Networks", arXiv 2412.06464, equation 10, with S transposed)

    S' = d S + k (b (v - d Sᵀ k))ᵀ        o = scale · S'ᵀ q

In a tree every row continues the state of its parent. Nothing forgets which rows a state is made
of, so no row's state is ever stored: with A the ancestor-or-self mask, D[i, j] = A[i, j] · the
product of the decays on the way from j (not included) down to i, and e[i] the product from the
committed state S0 down to i,

    (I + strictly lower part of (b D ∘ K Kᵀ)) U = b (V - e K S0)
    O = scale · (e Q S0 + (D ∘ Q Kᵀ) U)
    state of row n = e[n] S0 + sum over j of D[n, j] k_j u_jᵀ

which is the chunked form of the rule (equations 7 to 9 there) with an ancestor mask where a chunk
has a causal one. A row stands behind its parent, so the system is unit lower triangular. D is made
of products, not of differences of logarithms: a decay of exactly 0 stays one.

Letters: R trees, M rows of all of them (roots and nodes), S slots of states, Hk and Hv key and
value heads, K and V their sizes, C convolved channels, W width of the convolution.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from .extension import has_cpu_extension

_LANES = 16
_COMPILED_STATES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class StateTrees:
    """A batch of trees over committed states."""

    # [R + 1] int64 first row of each tree, and M
    starts: torch.Tensor
    # [M] int64 row of each row's parent, before it and of the same tree; -1: the committed state
    parents: torch.Tensor
    # [R] int64 slot of each tree's committed state
    slots: torch.Tensor

    @cached_property
    def trees(self) -> torch.Tensor:
        """Returns the tree of each row, int64 [M]."""
        counts = self.starts.diff()
        index = torch.arange(len(counts), device=counts.device)
        return torch.repeat_interleave(index, counts, output_size=len(self.parents))

    def windows(self, width: int) -> torch.Tensor:
        """Returns the inputs of a causal convolution at each row, int64 [M, W], the row itself
        last.

        Indices count the W - 1 committed inputs of each tree, tree by tree, then all rows.
        """
        kept = width - 1
        num_kept = kept * (len(self.starts) - 1)
        device = self.parents.device
        before = torch.arange(num_kept, device=device) - 1
        newest = self.trees * kept + kept - 1
        above = torch.where(self.parents < 0, newest, self.parents + num_kept)
        # No window reaches before a tree's oldest committed input.
        above = torch.cat((before.clamp_min(0), above))
        at = torch.arange(num_kept, num_kept + len(self.parents), device=device)
        columns = [at]
        for _ in range(kept):
            at = above[at]
            columns.append(at)
        return torch.stack(columns[::-1], dim=1)


@dataclass(frozen=True)
class DeltaUpdates:
    """The updates of the committed states by a layer's rows; float32."""

    # [M, Hk, K] normalised
    keys: torch.Tensor
    # [M, Hv, V] the rows u of the system above
    updates: torch.Tensor
    # [M, Hv]
    decays: torch.Tensor


def tree_conv(
    # [R * (W - 1) + M, C] committed inputs of each tree, oldest first, then the rows' own
    inputs: torch.Tensor,
    # [M, W] int64, see `StateTrees.windows`
    windows: torch.Tensor,
    # [C, W]
    weight: torch.Tensor,
    # [C]
    bias: torch.Tensor | None,
    *,
    silu: bool,
) -> torch.Tensor:
    """Causal depthwise convolution in which a row follows its ancestors, [M, C], float32 within
    and rounded once to the dtype of `inputs`.

    Raises:
        RuntimeError: if shapes disagree or a window points outside the inputs.
    """
    if has_cpu_extension() and inputs.device.type == "cpu" and inputs.dtype != torch.float64:
        out = torch.empty((len(windows), inputs.shape[1]), dtype=torch.float32)
        torch.ops.specplug.tree_conv.default(
            inputs.float().contiguous(),
            windows.contiguous(),
            weight.float().t().contiguous(),
            None if bias is None else bias.float().contiguous(),
            silu,
            out,
        )
        return out.to(inputs.dtype)
    return tree_conv_reference(inputs, windows, weight, bias, silu=silu)


def tree_conv_reference(
    inputs: torch.Tensor,
    windows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    silu: bool,
) -> torch.Tensor:
    """`tree_conv` in torch; float64 stays float64."""
    wide = torch.promote_types(inputs.dtype, torch.float32)
    out = torch.einsum("mwc,cw->mc", inputs[windows].to(wide), weight.to(wide))
    if bias is not None:
        out = out + bias.to(wide)
    if silu:
        out = torch.nn.functional.silu(out)
    return out.to(inputs.dtype)


def tree_delta_rule(
    # [M, Hk, K]
    query: torch.Tensor,
    key: torch.Tensor,
    # [M, Hv, V]
    value: torch.Tensor,
    # [M, Hv] factors of the state, 0 to 1
    decays: torch.Tensor,
    # [M, Hv]
    strengths: torch.Tensor,
    # [S, Hv, K, V] committed states, not changed
    states: torch.Tensor,
    trees: StateTrees,
    *,
    scale: float,
    eps: float,
) -> tuple[torch.Tensor, DeltaUpdates]:
    """The gated delta rule along every branch, with query and key divided by their norms.

    Value head h reads key head h * Hk // Hv.

    Args:
        eps: added to the sum of squares under the root.

    Returns:
        Output [M, Hv, V] of the dtype of `value`, and what `commit_states` needs.

    Raises:
        RuntimeError: if shapes disagree, a parent does not precede its row or a slot is outside.
    """
    wide = torch.promote_types(value.dtype, torch.float32)
    query, key = (_normalised(x.to(wide), eps).contiguous() for x in (query, key))
    decays, strengths = decays.to(wide).contiguous(), strengths.to(wide).contiguous()
    if _is_compiled(value, states, wide):
        output = torch.empty(value.shape, dtype=wide)
        updates = torch.empty(value.shape, dtype=wide)
        torch.ops.specplug.tree_delta_rule.default(
            query, key, value.float().contiguous(), decays, strengths, states,
            trees.starts, trees.parents, trees.slots, scale, output, updates,
        )  # fmt: skip
    else:
        output, updates = tree_delta_rule_reference(
            query, key, value.to(wide), decays, strengths, states, trees, scale
        )
    return output.to(value.dtype), DeltaUpdates(key, updates, decays)


def tree_delta_rule_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decays: torch.Tensor,
    strengths: torch.Tensor,
    states: torch.Tensor,
    trees: StateTrees,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns output and U [M, Hv, V] of normalised queries and keys by the equations."""
    group = value.shape[1] // key.shape[1]
    output, updates = torch.empty_like(value), torch.empty_like(value)
    starts = trees.starts.tolist()
    for r, slot in enumerate(trees.slots.tolist()):
        at = slice(starts[r], starts[r + 1])
        # [Hv, N, ...]
        q, k = (x[at].repeat_interleave(group, dim=1).transpose(0, 1) for x in (query, key))
        v, b = value[at].transpose(0, 1), strengths[at].t()[:, :, None]
        parents = (trees.parents[at] - starts[r]).clamp_min(-1)
        within, entering = _products(decays[at], parents)
        state = states[slot].to(value.dtype)
        system = b * within * (k @ k.mT)
        u = b * (v - entering[:, :, None] * (k @ state))
        weights = within * (q @ k.mT)
        o = entering[:, :, None] * (q @ state)
        # Only rows of the path are read: rows of other branches may be NaN.
        paths: list[list[int]] = []
        for i, parent in enumerate(parents.tolist()):
            above = paths[parent] if parent >= 0 else []
            paths.append([*above, i])
            u[:, i] -= (system[:, i, None, above] @ u[:, above])[:, 0]
            o[:, i] += (weights[:, i, None, paths[i]] @ u[:, paths[i]])[:, 0]
        output[at], updates[at] = (scale * o).transpose(0, 1), u.transpose(0, 1)
    return output, updates


def _products(
    # [N, Hv]
    decays: torch.Tensor,
    # [N] within the tree
    parents: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns D [Hv, N, N] and e [Hv, N]."""
    count, heads = decays.shape
    within = torch.zeros((heads, count, count), dtype=decays.dtype)
    entering = torch.ones((heads, count), dtype=decays.dtype)
    for i, parent in enumerate(parents.tolist()):
        if parent >= 0:
            within[:, i] = decays[i, :, None] * within[:, parent]
        within[:, i, i] = 1
        entering[:, i] = decays[i] * (entering[:, parent] if parent >= 0 else 1)
    return within, entering


def commit_states(
    # [S, Hv, K, V], written in place
    states: torch.Tensor,
    updates: DeltaUpdates,
    trees: StateTrees,
    # [R] int64 last accepted row of each tree
    last_rows: torch.Tensor,
) -> None:
    """Commits the state after the `last_rows` of each tree.

    Raises:
        RuntimeError: if shapes disagree, or a row or a slot is outside.
    """
    if _is_compiled(updates.updates, states, updates.updates.dtype):
        torch.ops.specplug.commit_states.default(
            states, updates.keys, updates.updates, updates.decays,
            trees.starts, trees.parents, trees.slots, last_rows.contiguous(),
        )  # fmt: skip
        return
    commit_states_reference(states, updates, trees, last_rows)


def commit_states_reference(
    states: torch.Tensor, updates: DeltaUpdates, trees: StateTrees, last_rows: torch.Tensor
) -> None:
    """`commit_states` in torch."""
    group = updates.updates.shape[1] // updates.keys.shape[1]
    parents = trees.parents.tolist()
    for slot, last in zip(trees.slots.tolist(), last_rows.tolist(), strict=True):
        added = torch.zeros_like(states[slot], dtype=updates.updates.dtype)
        product = torch.ones_like(updates.decays[last])
        row = last
        while row >= 0:
            key = updates.keys[row].repeat_interleave(group, dim=0)
            added += (product[:, None] * key)[:, :, None] * updates.updates[row][:, None, :]
            product = product * updates.decays[row]
            row = parents[row]
        entered = product[:, None, None] * states[slot].to(added.dtype)
        states[slot] = (entered + added).to(states.dtype)


def _normalised(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.square().sum(-1, keepdim=True) + eps).sqrt()


def _is_compiled(rows: torch.Tensor, states: torch.Tensor, wide: torch.dtype) -> bool:
    return (
        has_cpu_extension()
        and rows.device.type == "cpu"
        and wide == torch.float32
        and states.dtype in _COMPILED_STATES
        and states.shape[-1] % _LANES == 0
        and states[0].is_contiguous()
    )
