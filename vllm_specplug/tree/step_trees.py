# SPDX-License-Identifier: Apache-2.0
"""Trees as tensors: stored by request slot, attached to a step's rows, walked and compacted.

This is tensor code with fixed shapes. No operation waits for the device, so the host can launch a
step before it knows the previous one. On a GPU, launching these dozens of small operations would
take longer than running them, so kernels of `kernels.step_trees_triton` replace them.

Ancestors are found by pointer doubling: after k rounds a row knows its 2 ** k nearest ancestors, so
the number of rounds is logarithmic in a tree's depth.

Letters: S request slots, R requests of the step, N maximum nodes per tree, M logits rows of the
step (for each request its root, then its scheduled nodes), T rows of the target forward, W 64-bit
words per mask row, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch

ROOT = -1
"""Parent of the nodes directly below the root; parent row of a root."""
NO_NODE = -2
"""Parent of nodes that no walk may reach: unused nodes, placeholders and malformed nodes."""

_WORD_BITS = 64


def has_kernels(device: torch.device) -> bool:
    """Whether Triton kernels process tensors of a device."""
    return device.type == "cuda"


def _rounds(num_rows: int) -> int:
    """Returns the rounds of doubling that find all ancestors among `num_rows` rows."""
    return max(1, (num_rows - 1).bit_length())


class TreeStore:
    """The trees that wait for verification, by request slot; their tokens are in `draft_tokens`.

    The root of a slot's tree has a fixed position. Rows scheduled below another position (of a new
    request in the slot, or placeholders without a draft) have no tree.
    """

    def __init__(self, num_slots: int, num_nodes: int, vocab_size: int, device: torch.device):
        self.num_nodes = num_nodes
        self.vocab_size = vocab_size
        # [S, N] index of the parent node, ROOT, or NO_NODE
        self.parents = torch.full((num_slots, num_nodes), NO_NODE, dtype=torch.int32, device=device)
        # [S, N] distance to the root
        self.depths = torch.ones((num_slots, num_nodes), dtype=torch.int32, device=device)
        # [S, N] cumulative draft log-probabilities
        self.scores = torch.zeros((num_slots, num_nodes), dtype=torch.float32, device=device)
        # [S] position of the root; -1 for no tree
        self.root_positions = torch.full((num_slots,), -1, dtype=torch.int32, device=device)

    def put(
        self,
        # [R] int64
        slots: torch.Tensor,
        # [R]
        root_positions: torch.Tensor,
        # [R, N] int64; entries past the counts are undefined
        token_ids: torch.Tensor,
        # [R, N]
        parents: torch.Tensor,
        # [R] nodes of each tree
        counts: torch.Tensor,
        # [R, N] float32
        scores: torch.Tensor,
        # [R]
        room: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Stores one tree per slot.

        Malformed nodes become unreachable: those whose parent does not precede them, and whose
        token is outside the vocabulary or repeats an earlier sibling's. Depths are computed from
        the parents.

        Args:
            room: maximum nodes to keep of each tree; None for all.

        Returns:
            Token ids int64 [R, N], all of them legal inputs of the target.
        """
        if has_kernels(slots.device):
            from vllm_specplug.kernels.step_trees_triton import put_trees_triton

            kept = (self.parents, self.depths, self.scores, self.root_positions)
            return put_trees_triton(
                slots, root_positions, token_ids, parents, counts, scores, kept, self.vocab_size,
                room,
            )  # fmt: skip
        if room is not None:
            counts = torch.minimum(counts, room)
        index = torch.arange(self.num_nodes, device=slots.device)
        tokens = token_ids.clamp(0, self.vocab_size - 1)
        broken = (index >= counts[:, None]) | (token_ids != tokens)
        broken |= (parents < ROOT) | (parents >= index)
        repeats = (parents[:, :, None] == parents[:, None, :]) & (
            tokens[:, :, None] == tokens[:, None, :]
        )
        broken |= (repeats & (index[None, :] < index[:, None])).any(2)
        # The root is entry 0 and its own parent. Malformed nodes are moved below the root.
        above = torch.where(broken, 0, parents.long() + 1)
        above = torch.nn.functional.pad(above, (1, 0))
        depths = torch.nn.functional.pad(torch.ones_like(above[:, 1:]), (1, 0))
        for _ in range(_rounds(self.num_nodes + 1)):
            depths = depths + depths.gather(1, above)
            above = above.gather(1, above)
        self.parents[slots] = torch.where(broken, NO_NODE, parents).to(torch.int32)
        self.depths[slots] = depths[:, 1:].to(torch.int32)
        self.scores[slots] = scores
        self.root_positions[slots] = root_positions.to(torch.int32)
        return tokens

    @property
    def num_columns(self) -> int:
        """Number of columns of `rows`: root position, parents and depths."""
        return 1 + 2 * self.num_nodes

    def rows(self, slots: torch.Tensor) -> torch.Tensor:
        """Returns the trees of slots [R] as int32 [R, num_columns], without scores."""
        slots = slots.long()
        roots = self.root_positions[slots, None]
        return torch.cat([roots, self.parents[slots], self.depths[slots]], dim=1)

    def put_rows(self, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Stores in slots [R] what `rows` of another stage's store returned."""
        slots = slots.long()
        self.root_positions[slots] = rows[:, 0]
        self.parents[slots], self.depths[slots] = rows[:, 1:].chunk(2, dim=1)

    def clear(self, slots: torch.Tensor) -> None:
        """Removes the trees of slots [R] int64."""
        self.root_positions.index_fill_(0, slots, -1)


@dataclass(frozen=True)
class StepRows:
    """The logits rows of one step."""

    # [R] int64 slot of each request
    slots: torch.Tensor
    # [R + 1] int32 first logits row of each request, and M
    starts: torch.Tensor
    # [R] int32 number of tokens before each root, which is also the root's position
    contexts: torch.Tensor
    # [M] int64 slot of each row's request
    row_slots: torch.Tensor
    # [M] int32, see `offsets`
    local_pos: torch.Tensor
    # [M] int64 row in the target forward
    query_rows: torch.Tensor
    max_rows: int
    """Maximum logits rows of any request, N + 1."""
    covers_batch: bool
    """Whether the forward has no other rows than these."""
    max_context: int
    """Upper bound of the contexts, known on the host."""
    max_request_rows: int
    """Maximum logits rows of a request in this step, known on the host."""

    @cached_property
    def offsets(self) -> torch.Tensor:
        """int64 [M] offset of each row within its request: 0 for the root, node + 1 for nodes."""
        return self.local_pos.long()

    @cached_property
    def row_requests(self) -> torch.Tensor:
        """int64 [M] index in the batch of each row's request."""
        requests = torch.arange(len(self.contexts), device=self.starts.device)
        counts = self.starts[1:] - self.starts[:-1]
        return torch.repeat_interleave(requests, counts, output_size=len(self.query_rows))


@dataclass(frozen=True)
class StepTrees:
    """A step's logits rows as trees."""

    rows: StepRows
    # [M] int32 logits row of each row's parent; ROOT for a root, NO_NODE for rows outside a tree
    parent_rows: torch.Tensor
    # [M] int32 distance to the root
    depths: torch.Tensor
    # [M] int64 parent row for masks: a root's own row, the request's root for NO_NODE
    above: torch.Tensor
    # [S, n] int64 tokens that end each slot's request; None if the walk need not stop there
    ends: torch.Tensor | None = None

    def without(self, dropped: torch.Tensor) -> StepTrees:
        """Returns the trees with the rows marked in bool [M] unreachable."""
        is_dropped = dropped & (self.parent_rows != ROOT)
        return replace(self, parent_rows=torch.where(is_dropped, NO_NODE, self.parent_rows))


def attach_trees(store: TreeStore, rows: StepRows) -> StepTrees:
    """Returns the stored trees of a step's requests, cut to the scheduled prefixes."""
    if has_kernels(rows.slots.device):
        from vllm_specplug.kernels.step_trees_triton import attach_trees_triton

        return StepTrees(
            rows,
            *attach_trees_triton(
                store.parents, store.depths, store.root_positions, rows.slots, rows.starts,
                rows.contexts, len(rows.query_rows),
            ),
        )  # fmt: skip
    node = (rows.offsets - 1).clamp_min(0)
    is_node = rows.offsets > 0
    context = rows.contexts[rows.row_requests]
    is_known = is_node & (store.root_positions[rows.row_slots] == context)
    parent = store.parents[rows.row_slots, node]
    root_rows = rows.starts[rows.row_requests]
    is_reachable = is_known & (parent >= ROOT)
    parent_rows = torch.where(
        is_reachable, root_rows + 1 + parent, torch.where(is_node, NO_NODE, ROOT)
    )
    depths = torch.where(is_known, store.depths[rows.row_slots, node], rows.offsets.to(torch.int32))
    above = torch.where(is_reachable, parent_rows, root_rows).long()
    return StepTrees(rows, parent_rows.to(torch.int32), depths, above)


def set_positions(trees: StepTrees, positions: torch.Tensor) -> None:
    """Sets the rotary positions of the logits rows in `positions` [T] to the root's plus the depth.

    Other rows keep theirs.
    """
    rows = trees.rows
    if has_kernels(positions.device):
        from vllm_specplug.kernels.step_trees_triton import set_positions_triton

        set_positions_triton(
            rows.starts, rows.contexts, trees.depths, rows.query_rows, positions, rows.max_rows
        )
        return
    values = rows.contexts[rows.row_requests] + trees.depths
    positions[rows.query_rows] = values.to(positions.dtype)


def set_axes(
    trees: StepTrees,
    # [axes, T]
    positions: torch.Tensor,
) -> None:
    """Does the same as `set_positions` for each of several rotary axes."""
    rows = trees.rows
    roots = rows.query_rows[rows.starts[:-1].long()][rows.row_requests]
    values = positions[:, roots] + trees.depths
    positions[:, rows.query_rows] = values.to(positions.dtype)


def ancestor_words(trees: StepTrees) -> torch.Tensor:
    """Returns int64 [M, W]: bit j % 64 of word j // 64 is set if a row attends row j of its tree.

    A row attends the root, its ancestors and itself.
    """
    offsets = trees.rows.offsets
    width = -(-trees.rows.max_rows // _WORD_BITS)
    words = torch.zeros((len(offsets), width), dtype=torch.int64, device=offsets.device)
    bit = torch.ones_like(offsets) << (offsets % _WORD_BITS)
    words.scatter_(1, (offsets // _WORD_BITS)[:, None], bit[:, None])
    above = trees.above
    for _ in range(_rounds(trees.rows.max_rows)):
        words = words | words[above]
        above = above[above]
    return words


@dataclass(frozen=True)
class Walk:
    """The accepted paths of a step."""

    # [R, N + 1] int64 emitted tokens, of which the first lengths + 1 are valid
    emitted: torch.Tensor
    # [R, N + 1] int64 logits row at each depth of the path, root first; the root's row past the end
    path_rows: torch.Tensor
    # [R] int32 number of accepted nodes
    lengths: torch.Tensor
    # [R, N] int32 accepted nodes, -1 past the end; None in the host's copy of a walk
    nodes: torch.Tensor | None = None


def walk_trees(
    trees: StepTrees,
    # [M] int64 the target's sample at every row
    samples: torch.Tensor,
    # [M] token of every row
    token_ids: torch.Tensor,
) -> Walk:
    """Walks down every tree while the target's sample is a child.

    A row is accepted if it and all its ancestors hold the sample of their parent row. Siblings
    never repeat a token, so the accepted rows of a request form one path, parents first.
    """
    rows = trees.rows
    if has_kernels(samples.device):
        from vllm_specplug.kernels.step_trees_triton import walk_trees_triton

        return Walk(
            *walk_trees_triton(
                samples, token_ids, trees.parent_rows, rows.starts, rows.max_rows, rows.slots,
                trees.ends,
            )
        )  # fmt: skip
    parent = trees.parent_rows.long()
    is_accepted = (parent == ROOT) | ((parent >= 0) & (samples[parent.clamp_min(0)] == token_ids))
    above = trees.above
    for _ in range(_rounds(rows.max_rows)):
        is_accepted = is_accepted & is_accepted[above]
        above = above[above]
    num_reqs = len(rows.slots)
    # Rows that are not accepted go to an extra column, which is then dropped.
    depth = torch.where(is_accepted, trees.depths.long(), rows.max_rows)
    path_rows = rows.starts[:-1, None].long().repeat(1, rows.max_rows + 1)
    path_rows[rows.row_requests, depth] = torch.arange(len(depth), device=depth.device)
    path_rows = path_rows[:, :-1].contiguous()
    accepted = torch.zeros(num_reqs, dtype=torch.int32, device=depth.device)
    accepted.index_add_(0, rows.row_requests, is_accepted.to(torch.int32))
    nodes = (path_rows[:, 1:] - path_rows[:, :1] - 1).to(torch.int32)
    return Walk(samples[path_rows], path_rows, accepted - 1, nodes)


def emitting_rows(trees: StepTrees, walk: Walk) -> torch.Tensor:
    """Returns int64 [M]: at offset i of a request, the row that sampled its emitted token i; the
    root's row past the path."""
    return walk.path_rows[trees.rows.row_requests, trees.rows.offsets]


def along_paths(
    walk: Walk,
    # [M]
    values: torch.Tensor,
) -> torch.Tensor:
    """Returns [R]: per request, the sum of values over the rows of its emitted tokens."""
    depth = torch.arange(walk.path_rows.shape[1], device=values.device)
    is_path = depth <= walk.lengths[:, None]
    return torch.where(is_path, values[walk.path_rows], 0).sum(1, dtype=values.dtype)


def path_moves(
    trees: StepTrees,
    walk: Walk,
    # [T] int64 cache slot of every row of the forward
    slot_mapping: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the cache moves that make accepted paths contiguous: sources and destinations, int64
    slots [R, N].

    In ascending order, no move overwrites a source that is read later. Entries past a path move the
    root's slot onto itself.
    """
    rows = trees.rows
    slots = slot_mapping[rows.query_rows]
    root = rows.starts[:-1, None].long()
    depth = torch.arange(1, rows.max_rows, device=root.device)
    is_path = depth <= walk.lengths[:, None]
    sources = slots[torch.where(is_path, walk.path_rows[:, 1:], root)]
    targets = slots[torch.where(is_path, root + depth, root)]
    return sources, targets


@dataclass(frozen=True)
class CommitMap:
    """The committed tokens of a forward: its T rows in the order of positions."""

    # [T] int64 row that computed the token of each position
    computed_rows: torch.Tensor
    # [T] int64 slot of the token after compaction; -1 for no token
    slots: torch.Tensor
    # [T] int64
    positions: torch.Tensor
    # [R] int64 row of each request's last committed token
    last_rows: torch.Tensor


def committed_rows(
    trees: StepTrees,
    walk: Walk,
    # [T] int64
    slot_mapping: torch.Tensor,
    # [T] int64 positions of the forward
    positions: torch.Tensor,
) -> CommitMap:
    """Returns the committed tokens: rows before the roots, then each root and its path."""
    rows = trees.rows
    if has_kernels(positions.device):
        from vllm_specplug.kernels.step_trees_triton import committed_rows_triton

        return CommitMap(
            *committed_rows_triton(
                rows.starts, rows.query_rows, rows.contexts, walk.path_rows, walk.lengths,
                slot_mapping, positions,
            )
        )  # fmt: skip
    computed = torch.arange(len(positions), device=positions.device)
    at = rows.query_rows
    computed[at] = at[emitting_rows(trees, walk)]
    is_path = rows.offsets <= walk.lengths[rows.row_requests]
    slots = slot_mapping.clone()
    slots[at] = torch.where(is_path, slot_mapping[at], -1)
    linear = positions.clone()
    linear[at] = rows.contexts[rows.row_requests].to(linear.dtype) + rows.offsets
    last = walk.path_rows.gather(1, walk.lengths[:, None].long())[:, 0]
    return CommitMap(computed, slots, linear, at[last])


def warm_up(num_nodes: int, device: torch.device) -> None:
    """Compiles the kernels of steps with trees of up to `num_nodes` nodes."""
    one = torch.zeros(1, dtype=torch.int64, device=device)
    small, starts = one.int(), torch.arange(2, dtype=torch.int32, device=device)
    store = TreeStore(1, num_nodes, 1, device)
    ids = torch.zeros((1, num_nodes), dtype=torch.int64, device=device)
    store.put(one, small, ids, ids.int(), small, ids.float())
    rows = StepRows(one, starts, small, one, small, one, num_nodes + 1, True, 0, 1)
    trees = attach_trees(store, rows)
    set_positions(trees, torch.zeros_like(one))
    committed_rows(trees, walk_trees(trees, one, small), one, one)
