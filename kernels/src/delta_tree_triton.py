# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet layers over trees, on the device; `delta_tree` has the equations.

Sums are float32 in full precision, whatever the states are stored in. States are read by their
strides, [S, Hv, K, V] in any order in memory (vLLM's on CUDA have V outside K), and no tensor is
read on the host.

The products of decays D [i, j] are made first: every row walks up to its root. Then a program owns
some columns of V of one tree and head and processes blocks of rows in order: products with the
state, with the blocks before (whose u it wrote itself), and the triangular system of the block row
by row. D is 0 if j is no ancestor, so no mask is needed. A commit reads only the accepted path.

0 x NaN is NaN, and a row multiplies rows of other branches, so all factors must be finite. If a
key, value or gate of a row and head is not finite, they are replaced by zeros, and the decay by
NaN, which marks the row and all rows below. The mark has an effect only in a row's state, its
output and its commit. Selecting in the products would need registers that compute capability 8.0
does not have.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Rows of the triangular systems that are solved at once.
_BLOCK = 16
# Columns of V that a program owns, and rows of K that are read at once.
_COLUMNS, _DEPTH = 32, 32
# Rows of K that a program commits.
_COMMIT_KEYS = 64
_CHANNELS = 256


@triton.jit(do_not_specialize=["channels", "num_trees"])
def _tree_conv_kernel(
    # [M, C]
    inputs,
    # [S, W - 1, C], any strides
    conv_states,
    # [R] int64
    slots,
    # [M, W] int64
    windows,
    # [C, W]
    weight,
    # [C]
    bias,
    # [M, C]
    output,
    channels,
    num_trees,
    conv_slot,
    conv_step,
    conv_channel,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = channel < channels
    total = tl.zeros((BLOCK,), tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + channel, mask=valid, other=0.0).to(tl.float32)
    for w in tl.static_range(WIDTH):
        at = tl.load(windows + row * WIDTH + w) - num_trees * (WIDTH - 1)
        if at >= 0:
            x = tl.load(inputs + at * channels + channel, mask=valid, other=0.0).to(tl.float32)
        else:
            kept = at + num_trees * (WIDTH - 1)
            state = conv_states + tl.load(slots + kept // (WIDTH - 1)) * conv_slot
            state += kept % (WIDTH - 1) * conv_step + channel * conv_channel
            x = tl.load(state, mask=valid, other=0.0).to(tl.float32)
        total += x * tl.load(weight + channel * WIDTH + w, mask=valid, other=0.0).to(tl.float32)
    if SILU:
        total = total * tl.sigmoid(total)
    tl.store(output + row * channels + channel, total.to(output.dtype.element_ty), mask=valid)


# The gates may be parts of one projection.
@triton.jit(
    do_not_specialize=["channels", "row_stride_a", "row_stride_b"],
    do_not_specialize_on_alignment=["a", "b"],
)
def _tree_inputs_kernel(
    # [M, C] convolved: queries, keys and values of all heads
    mixed,
    # [T, Hv], any row stride
    a,
    b,
    # [M] int64 rows of those two
    rows,
    # [Hv]
    a_log,
    dt_bias,
    # [M, Hk, K] float32
    query,
    key,
    # [M, Hv, V]
    value,
    # [M, Hv] float32
    decays,
    strengths,
    eps,
    channels,
    row_stride_a,
    row_stride_b,
    key_heads,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    GROUP: tl.constexpr,
):
    row, key_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    from_row = mixed + row * channels
    k = tl.arange(0, KEYS)
    is_key = k < KEY_SIZE
    own_key = key_head * KEY_SIZE + k
    q = tl.load(from_row + own_key, mask=is_key, other=0.0).to(tl.float32)
    x = tl.load(from_row + key_heads * KEY_SIZE + own_key, mask=is_key, other=0.0).to(tl.float32)
    to_row = row * key_heads * KEY_SIZE + own_key
    # A query only affects its own row.
    tl.store(query + to_row, q / tl.sqrt(tl.sum(q * q) + eps), mask=is_key)
    x = x / tl.sqrt(tl.sum(x * x) + eps)
    # NaN compares as false.
    finite = tl.abs(x) < float("inf")
    tl.store(key + to_row, tl.where(finite, x, 0.0), mask=is_key)
    key_is_finite = tl.min(finite.to(tl.int32), 0)
    column = tl.arange(0, VALUES)
    is_column = column < VALUE_SIZE
    at = tl.load(rows + row)
    for member in tl.static_range(GROUP):
        head = key_head * GROUP + member
        own_value = head * VALUE_SIZE + column
        v = tl.load(from_row + 2 * key_heads * KEY_SIZE + own_value, mask=is_column, other=0.0)
        finite = tl.abs(v.to(tl.float32)) < float("inf")
        v = tl.where(finite, v, 0.0)
        tl.store(value + row * key_heads * GROUP * VALUE_SIZE + own_value, v, mask=is_column)
        gate = tl.load(a + at * row_stride_a + head).to(tl.float32)
        gate += tl.load(dt_bias + head).to(tl.float32)
        # vLLM's gates have this limit too.
        rate = tl.where(gate <= 20.0, tl.log(1.0 + tl.exp(tl.minimum(gate, 20.0))), gate)
        rate *= tl.exp(tl.load(a_log + head).to(tl.float32))
        strength = tl.sigmoid(tl.load(b + at * row_stride_b + head).to(tl.float32))
        all_finite = (tl.min(finite.to(tl.int32), 0) & key_is_finite) == 1
        all_finite = all_finite & (strength == strength)
        to_head = row * key_heads * GROUP + head
        tl.store(decays + to_head, tl.where(all_finite, tl.exp(-rate), float("nan")))
        tl.store(strengths + to_head, tl.where(strength == strength, strength, 0.0))


@triton.jit(do_not_specialize=["num_rows", "width"])
def _tree_products_kernel(
    # [M, Hv] float32
    decays,
    # [R + 1] int64
    starts,
    # [M] int64
    parents,
    # [Hv, M, width] float32, zeros: D of every row, by row of its tree
    within,
    # [M, Hv] float32
    entering,
    num_rows,
    heads,
    width,
    ROWS: tl.constexpr,
):
    tree, head = tl.program_id(0), tl.program_id(1)
    first = tl.load(starts + tree)
    end = tl.load(starts + tree + 1)
    row = first + tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    valid = row < end
    out = within + (head * num_rows + row) * width
    tl.store(out + (row - first), 1.0, mask=valid)
    decay = tl.load(decays + row * heads + head, mask=valid, other=0.0)
    # For a NaN decay D is 0: only the update of the state may be NaN.
    product = tl.where(decay == decay, decay, 0.0)
    enters = decay
    at = tl.load(parents + row, mask=valid, other=-1)
    while tl.max(at, 0) >= 0:
        above = at >= 0
        tl.store(out + (at - first), product, mask=above)
        decay = tl.load(decays + at * heads + head, mask=above, other=1.0)
        product *= tl.where(decay == decay, decay, 0.0)
        enters *= decay
        at = tl.load(parents + at, mask=above, other=-1)
    tl.store(entering + row * heads + head, enters, mask=valid)


@triton.jit(do_not_specialize=["num_rows", "width"])
def _tree_solve_kernel(
    # [M, Hk, K] float32
    query,
    key,
    # [M, Hv, V]
    value,
    # [M, Hv] float32
    strengths,
    # [Hv, M, width] and [M, Hv] float32
    within,
    entering,
    # [S, Hv, K, V]
    states,
    # [R + 1], [R] int64
    starts,
    slots,
    # [M, Hv, V] float32
    output,
    updates,
    scale,
    num_rows,
    width,
    key_heads,
    heads,
    state_slot,
    state_head,
    state_key,
    state_value,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    tree, head = tl.program_id(0), tl.program_id(1)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < VALUE_SIZE
    key_head = head * key_heads // heads
    first = tl.load(starts + tree)
    end = tl.load(starts + tree + 1)
    state = states + tl.load(slots + tree) * state_slot + head * state_head
    step = tl.arange(0, BLOCK)
    for block in range(first, end, BLOCK):
        row = block + step
        is_row = row < end
        own = is_row[:, None] & is_column[None, :]
        at_key = (row * key_heads + key_head) * KEY_SIZE
        at_value = (row * heads + head)[:, None] * VALUE_SIZE + column[None, :]
        read_k = tl.zeros((BLOCK, COLUMNS), tl.float32)
        read_q = tl.zeros((BLOCK, COLUMNS), tl.float32)
        for start in range(0, KEY_SIZE, DEPTH):
            k = start + tl.arange(0, DEPTH)
            inside = is_row[:, None] & (k < KEY_SIZE)[None, :]
            s = tl.load(
                state + k.to(tl.int64)[:, None] * state_key + column[None, :] * state_value,
                mask=(k < KEY_SIZE)[:, None] & is_column[None, :],
                other=0.0,
            ).to(tl.float32)
            keys = tl.load(key + at_key[:, None] + k[None, :], mask=inside, other=0.0)
            queries = tl.load(query + at_key[:, None] + k[None, :], mask=inside, other=0.0)
            read_k = tl.dot(keys, s, read_k, input_precision="ieee")
            read_q = tl.dot(queries, s, read_q, input_precision="ieee")
        entered = tl.load(entering + row * heads + head, mask=is_row, other=0.0)[:, None]
        strength = tl.load(strengths + row * heads + head, mask=is_row, other=0.0)[:, None]
        u = tl.load(value + at_value, mask=own, other=0.0).to(tl.float32)
        u -= tl.where(entered == entered, entered, 0.0) * read_k
        out = entered * read_q
        at_within = within + (head * num_rows + row)[:, None] * width
        for other in range(first, block + 1, BLOCK):
            before = other + step
            is_before = before < end
            at_other = (before * key_heads + key_head) * KEY_SIZE
            products_k = tl.zeros((BLOCK, BLOCK), tl.float32)
            products_q = tl.zeros((BLOCK, BLOCK), tl.float32)
            for start in range(0, KEY_SIZE, DEPTH):
                k = start + tl.arange(0, DEPTH)
                is_key = (k < KEY_SIZE)[None, :]
                keys = tl.load(
                    key + at_key[:, None] + k[None, :], mask=is_row[:, None] & is_key, other=0.0
                )
                queries = tl.load(
                    query + at_key[:, None] + k[None, :], mask=is_row[:, None] & is_key, other=0.0
                )
                others = tl.load(
                    key + at_other[:, None] + k[None, :],
                    mask=is_before[:, None] & is_key,
                    other=0.0,
                )
                products_k = tl.dot(keys, tl.trans(others), products_k, input_precision="ieee")
                products_q = tl.dot(queries, tl.trans(others), products_q, input_precision="ieee")
            weights = tl.load(
                at_within + (before - first)[None, :],
                mask=is_row[:, None] & is_before[None, :],
                other=0.0,
            )
            products_k *= weights
            products_q *= weights
            if other < block:
                known = tl.load(
                    updates + (before * heads + head)[:, None] * VALUE_SIZE + column[None, :],
                    mask=is_before[:, None] & is_column[None, :],
                    other=0.0,
                )
                u -= tl.dot(products_k, known, input_precision="ieee")
                out = tl.dot(products_q, known, out, input_precision="ieee")
            else:
                # The block itself. `u` of a row is computed after all rows before it.
                u *= strength
                products_k *= strength
                for i in range(1, BLOCK):
                    coefficients = tl.sum(
                        tl.where((step[:, None] == i) & (step[None, :] < i), products_k, 0.0), 0
                    )
                    known_sum = tl.sum(coefficients[:, None] * u, 0)
                    u = tl.where(step[:, None] == i, u - known_sum[None, :], u)
                out = tl.dot(products_q, u, out, input_precision="ieee")
        tl.store(updates + at_value, u, mask=own)
        tl.store(output + at_value, scale * out, mask=own)
        # Other threads of the program read these in its next blocks.
        tl.debug_barrier()


@triton.jit
def _commit_states_kernel(
    # [S, Hv, K, V], written in place
    states,
    # [M, Hk, K], [M, Hv, V], [M, Hv] float32
    keys,
    updates,
    decays,
    # [M], [R], [R], [R] int64; the last has the target slots, -1 for none
    parents,
    slots,
    last_rows,
    targets,
    key_heads,
    heads,
    state_slot,
    state_head,
    state_key,
    state_value,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    tree, head = tl.program_id(0), tl.program_id(1)
    k = tl.program_id(2) // BLOCKS * KEYS + tl.arange(0, KEYS)
    column = tl.program_id(2) % BLOCKS * COLUMNS + tl.arange(0, COLUMNS)
    is_key, is_column = k < KEY_SIZE, column < VALUE_SIZE
    key_head = head * key_heads // heads
    added = tl.zeros((KEYS, COLUMNS), tl.float32)
    product = 1.0
    target = tl.load(targets + tree)
    row = tl.where(target < 0, -1, tl.load(last_rows + tree))
    while row >= 0:
        key = tl.load(keys + (row * key_heads + key_head) * KEY_SIZE + k, mask=is_key, other=0.0)
        u = tl.load(updates + (row * heads + head) * VALUE_SIZE + column, mask=is_column, other=0.0)
        added += (product * key)[:, None] * u[None, :]
        product *= tl.load(decays + row * heads + head)
        row = tl.load(parents + row)
    at = (
        states
        + head * state_head
        + k.to(tl.int64)[:, None] * state_key
        + column[None, :] * state_value
    )
    inside = is_key[:, None] & is_column[None, :] & (target >= 0)
    source = at + tl.load(slots + tree) * state_slot
    state = product * tl.load(source, mask=inside, other=0.0).to(tl.float32) + added
    tl.store(at + target * state_slot, state.to(states.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["channels"])
def _commit_conv_kernel(
    # [S, W - 1, C], written in place
    conv_states,
    # [M, C]
    inputs,
    # [M], [R], [R], [R] int64
    parents,
    slots,
    last_rows,
    targets,
    channels,
    conv_slot,
    conv_step,
    conv_channel,
    KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tree = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(targets + tree)
    valid = (channel < channels) & (target >= 0)
    own = conv_states + channel * conv_channel
    source = own + tl.load(slots + tree) * conv_slot
    last = tl.load(last_rows + tree)
    # The oldest first: kept inputs move to the front, over inputs that were read.
    for tap in tl.static_range(KEPT):
        row = last
        outside = last * 0
        for _ in tl.static_range(KEPT - 1 - tap):
            row = tl.where(row >= 0, tl.load(parents + tl.maximum(row, 0)), row)
            outside += tl.where(row < 0, 1, 0)
        if row >= 0:
            x = tl.load(inputs + row * channels + channel, mask=valid, other=0.0)
            x = x.to(conv_states.dtype.element_ty)
        else:
            x = tl.load(source + (KEPT - outside) * conv_step, mask=valid, other=0.0)
        tl.store(own + target * conv_slot + tap * conv_step, x, mask=valid)


def tree_conv_triton(
    # [M, C]
    inputs: torch.Tensor,
    # [S, W - 1, C] committed inputs, oldest first; any strides
    conv_states: torch.Tensor,
    # [R] int64
    slots: torch.Tensor,
    # [M, W] int64
    windows: torch.Tensor,
    # [C, W]
    weight: torch.Tensor,
    # [C]
    bias: torch.Tensor | None,
    *,
    silu: bool,
) -> torch.Tensor:
    """`delta_tree.tree_conv`, [M, C], of committed inputs in place. Windows are not checked."""
    inputs, windows, weight = inputs.contiguous(), windows.contiguous(), weight.contiguous()
    rows, channels = len(windows), inputs.shape[1]
    output = torch.empty((rows, channels), dtype=inputs.dtype, device=inputs.device)
    if rows:
        _tree_conv_kernel[(rows, triton.cdiv(channels, _CHANNELS))](
            inputs, conv_states, slots, windows, weight,
            weight if bias is None else bias.contiguous(), output, channels, len(slots),
            *conv_states.stride(), WIDTH=windows.shape[1], HAS_BIAS=bias is not None, SILU=silu,
            BLOCK=_CHANNELS,
        )  # fmt: skip
    return output


def tree_inputs_triton(
    # [M, C] convolved
    mixed: torch.Tensor,
    # [T, Hv]
    a: torch.Tensor,
    b: torch.Tensor,
    # [M] int64 rows of `a` and `b`
    rows: torch.Tensor,
    # [Hv]
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    *,
    key_heads: int,
    key_size: int,
    value_size: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the rows' inputs of `tree_delta_rule_triton`: query, key, value, decays, strengths.

    If they are not finite, they are 0, and the decay of the row and head is NaN.

    Args:
        eps: added to the sum of squares of a query or key under the root.
    """
    (num_rows, channels), heads = mixed.shape, a.shape[1]
    assert mixed.is_contiguous() and a.stride(1) == b.stride(1) == 1, mixed.shape
    assert channels == 2 * key_heads * key_size + heads * value_size, (channels, key_heads, heads)
    query = mixed.new_empty((num_rows, key_heads, key_size), dtype=torch.float32)
    key = torch.empty_like(query)
    value = mixed.new_empty((num_rows, heads, value_size))
    decays = mixed.new_empty((num_rows, heads), dtype=torch.float32)
    strengths = torch.empty_like(decays)
    if num_rows:
        _tree_inputs_kernel[(num_rows, key_heads)](
            mixed, a, b, rows, a_log, dt_bias, query, key, value, decays, strengths, eps, channels,
            a.stride(0), b.stride(0), key_heads, KEY_SIZE=key_size, VALUE_SIZE=value_size,
            KEYS=triton.next_power_of_2(key_size), VALUES=triton.next_power_of_2(value_size),
            GROUP=heads // key_heads, num_warps=1,
        )  # fmt: skip
    return query, key, value, decays, strengths


def tree_delta_rule_triton(
    # [M, Hk, K] float32, normalised
    query: torch.Tensor,
    key: torch.Tensor,
    # [M, Hv, V]
    value: torch.Tensor,
    # [M, Hv] float32
    decays: torch.Tensor,
    strengths: torch.Tensor,
    # [S, Hv, K, V], any strides
    states: torch.Tensor,
    # [R + 1], [M], [R] int64
    starts: torch.Tensor,
    parents: torch.Tensor,
    slots: torch.Tensor,
    *,
    max_rows: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns output and the rows u, float32 [M, Hv, V]. Nothing is checked on the device.

    A decay of NaN makes output and commit of the row and of all rows below NaN. All other inputs
    must be finite, so that other rows are not affected.

    Args:
        starts, parents, slots: as in `StateTrees`.
        max_rows: at least the rows of the largest tree.
    """
    rows, heads, value_size = value.shape
    key_heads, key_size = key.shape[1:]
    assert heads % key_heads == 0 and query.shape == key.shape, (query.shape, value.shape)
    for tensor in (query, key, value, decays, strengths):
        assert tensor.is_contiguous(), tensor.shape
    output = torch.empty(value.shape, dtype=torch.float32, device=value.device)
    updates = torch.empty_like(output)
    if rows == 0:
        return output, updates
    within = torch.zeros((heads, rows, max_rows), dtype=torch.float32, device=value.device)
    entering = torch.empty((rows, heads), dtype=torch.float32, device=value.device)
    _tree_products_kernel[(len(slots), heads, triton.cdiv(max_rows, 64))](
        decays, starts, parents, within, entering, rows, heads, max_rows, ROWS=64, num_warps=2
    )
    _tree_solve_kernel[(len(slots), heads, triton.cdiv(value_size, _COLUMNS))](
        query, key, value, strengths, within, entering, states, starts, slots, output, updates,
        scale, rows, max_rows, key_heads, heads, *states.stride(),
        KEY_SIZE=key_size, VALUE_SIZE=value_size, BLOCK=_BLOCK, COLUMNS=_COLUMNS, DEPTH=_DEPTH,
        num_warps=4,
    )  # fmt: skip
    return output, updates


def commit_states_triton(
    # [S, Hv, K, V], any strides, written in place
    states: torch.Tensor,
    # [M, Hk, K], [M, Hv, V], [M, Hv] float32
    keys: torch.Tensor,
    updates: torch.Tensor,
    decays: torch.Tensor,
    # [M], [R], [R] int64
    parents: torch.Tensor,
    slots: torch.Tensor,
    last_rows: torch.Tensor,
    targets: torch.Tensor | None = None,
) -> None:
    """`delta_tree.commit_states`. Nothing is checked on the device.

    Args:
        targets: int64 [R] slots that the states are written to, -1 for a tree that writes none;
            `slots` if not given. No other tree may read one.
    """
    heads, key_size, value_size = states.shape[1:]
    for tensor in (keys, updates, decays):
        assert tensor.is_contiguous(), tensor.shape
    blocks = triton.cdiv(value_size, _COLUMNS)
    if len(slots):
        _commit_states_kernel[(len(slots), heads, triton.cdiv(key_size, _COMMIT_KEYS) * blocks)](
            states, keys, updates, decays, parents, slots, last_rows,
            slots if targets is None else targets, keys.shape[1], heads,
            *states.stride(), KEY_SIZE=key_size, VALUE_SIZE=value_size, KEYS=_COMMIT_KEYS,
            COLUMNS=_COLUMNS, BLOCKS=blocks,
        )  # fmt: skip


def commit_conv_triton(
    # [S, W - 1, C], any strides, written in place
    conv_states: torch.Tensor,
    # [M, C]
    inputs: torch.Tensor,
    # [M], [R], [R] int64
    parents: torch.Tensor,
    slots: torch.Tensor,
    last_rows: torch.Tensor,
    targets: torch.Tensor | None = None,
) -> None:
    """The convolution's inputs behind each tree's last row; `targets` as in
    `commit_states_triton`."""
    assert inputs.is_contiguous(), inputs.shape
    channels = inputs.shape[1]
    if len(slots):
        _commit_conv_kernel[(len(slots), triton.cdiv(channels, _CHANNELS))](
            conv_states, inputs, parents, slots, last_rows, slots if targets is None else targets,
            channels, *conv_states.stride(), KEPT=conv_states.shape[1], BLOCK=_CHANNELS,
        )  # fmt: skip
