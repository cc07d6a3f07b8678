# SPDX-License-Identifier: Apache-2.0
"""Grammars on draft trees: one mask per node.

Seam: structured_output.

vLLM's scheduler keeps drafts as a flat list and walks a grammar along it, as if one sibling of a
tree followed the other. Here the runner sends parents with the drafts of constrained requests. The
walk goes down and up the tree with the matcher's `accept_tokens` and `rollback`:

1. `Scheduler.update_draft_token_ids`, or `update_draft_token_ids_in_output` where steps are
   scheduled ahead, hands the parents to the structured output manager;
2. `StructuredOutputManager.validate_tokens` keeps them with the request;
3. `StructuredOutputManager.grammar_bitmask` fills one row for the root and one for each node that
   the grammar can reach.

Drafts stay on the device, so no node is dropped. A node that the grammar forbids is unreachable,
because the mask of its parent's row excludes its token.

Reasoning ends where vLLM would end it for the path to a node, read as a chain, so a grammar may
start in the middle of a tree. Without parents, or if anything does not match, vLLM's own code runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from vllm_specplug.tree import ROOT
from vllm_specplug.tree.draft_tree import PARENTS_ATTRIBUTE

# Attributes of the manager: the parents of drafts by request id, set while they are validated, and
# whether any constrained request has drafted a tree. The latter is never reset, because the
# scheduler keeps a request's drafts over steps that omit it.
_PARENTS = "specplug_parents"
_HAS_TREES = "specplug_has_trees"
# Attribute of a request's structured output state: its last tree.
_TREE = "specplug_tree"


@dataclass(frozen=True)
class ConstrainedTree:
    """The drafted tree of a request with a grammar."""

    token_ids: list[int]
    parents: list[int]


class RequestCursor:
    """A request's grammar at its last committed token, moved along the edges of a tree."""

    def __init__(self, manager: Any, request: Any) -> None:
        self.manager = manager
        self.request = request
        self.grammar = request.structured_output_request.grammar
        self.path: list[int] = []
        self.fed: list[bool] = []

    def advance(self, token_id: int) -> bool:
        """Appends a token if it is allowed, and returns whether it is."""
        self.path.append(token_id)
        start, _ = self.manager._get_constraint_bounds(self.request, self.path)
        feeds = len(self.path) > start
        if feeds:
            # Checked first, because `accept_tokens` logs every refusal as an engine error.
            if self.grammar.is_terminated() or not self.grammar.validate_tokens([token_id]):
                self.path.pop()
                return False
            self.grammar.accept_tokens(self.request.request_id, [token_id])
        self.fed.append(feeds)
        return True

    def retreat(self) -> None:
        """Removes the last token."""
        self.path.pop()
        if self.fed.pop():
            self.grammar.rollback(1)

    @property
    def is_reasoning(self) -> bool:
        """Whether the grammar begins after this position."""
        _, start = self.manager._get_constraint_bounds(self.request, self.path)
        return len(self.path) < start

    @property
    def is_constrained(self) -> bool:
        """Whether the token after this position must follow the grammar."""
        return not self.is_reasoning and not self.grammar.is_terminated()


def _tree_of(request: Any, scheduled: Sequence[int]) -> ConstrainedTree | None:
    """Returns the scheduled nodes of a constrained request's tree, or None without a tree."""
    state = request.structured_output_request
    tree = None if state is None else getattr(state, _TREE, None)
    # vLLM pads drafts with -1.
    count = next((i for i, token in enumerate(scheduled) if token == -1), len(scheduled))
    if tree is None or not count or tree.token_ids[:count] != list(scheduled[:count]):
        return None
    return ConstrainedTree(tree.token_ids[:count], tree.parents[:count])


def wrap_update_draft_token_ids(original: Any) -> Any:
    """Wraps `Scheduler.update_draft_token_ids` and `update_draft_token_ids_in_output`."""

    def wrapped(self: Any, draft_token_ids: Any, *args: Any) -> None:
        parents = getattr(draft_token_ids, PARENTS_ATTRIBUTE, None)
        manager = self.structured_output_manager
        setattr(manager, _PARENTS, parents)
        try:
            original(self, draft_token_ids, *args)
        finally:
            setattr(manager, _PARENTS, None)
            if parents:
                setattr(manager, _HAS_TREES, True)

    return wrapped


def wrap_validate_tokens(original: Any) -> Any:
    """Wraps `StructuredOutputManager.validate_tokens`."""

    def wrapped(self: Any, request: Any, spec_tokens: list[int]) -> list[int]:
        if not request.use_structured_output:
            return original(self, request, spec_tokens)
        state = request.structured_output_request
        # Also without parents, because a chain may have the tokens of an earlier tree.
        setattr(state, _TREE, None)
        parents = (getattr(self, _PARENTS, None) or {}).get(request.request_id)
        if parents is None:
            return original(self, request, spec_tokens)
        # The scheduler may take fewer drafts than the runner sent.
        parents = parents[: len(spec_tokens)]
        if len(parents) != len(spec_tokens) or min(spec_tokens, default=0) < 0:
            return original(self, request, spec_tokens)
        setattr(state, _TREE, ConstrainedTree(list(spec_tokens), parents))
        return spec_tokens

    return wrapped


def wrap_grammar_bitmask(original: Any) -> Any:
    """Wraps `StructuredOutputManager.grammar_bitmask`."""

    def wrapped(
        self: Any,
        requests: dict[str, Any],
        structured_output_request_ids: list[str],
        scheduled_spec_decode_tokens: dict[str, list[int]],
    ) -> Any:
        trees = {}
        if getattr(self, _HAS_TREES, False):
            for req_id in structured_output_request_ids:
                scheduled = scheduled_spec_decode_tokens.get(req_id, ())
                if (tree := _tree_of(requests[req_id], scheduled)) is not None:
                    trees[req_id] = tree
        if trees:
            # vLLM fills the rows of these drafts as padding, which touches no grammar.
            scheduled_spec_decode_tokens = {
                req_id: [-1] * len(tokens) if req_id in trees else tokens
                for req_id, tokens in scheduled_spec_decode_tokens.items()
            }
        bitmask = original(
            self, requests, structured_output_request_ids, scheduled_spec_decode_tokens
        )
        if trees:
            num_rows = [
                1 + len(scheduled_spec_decode_tokens.get(req_id, ()))
                for req_id in structured_output_request_ids
            ]
            first_rows = mask_rows(num_rows, len(bitmask))
            for req_id, first_row in zip(structured_output_request_ids, first_rows, strict=True):
                if req_id in trees:
                    _fill_tree_rows(self, requests[req_id], trees[req_id], first_row)
        return bitmask

    return wrapped


def mask_rows(num_rows: Sequence[int], mask_size: int) -> list[int]:
    """Returns the first row of each request in a mask of `mask_size` rows.

    vLLM 0.32 packs the rows of all requests. Since 0.33 each request has the maximum number of
    rows; if all need the maximum, both layouts are the same.
    """
    if mask_size == sum(num_rows):
        return list(accumulate(num_rows, initial=0))[:-1]
    return list(range(0, mask_size, mask_size // len(num_rows)))


def _fill_tree_rows(manager: Any, request: Any, tree: ConstrainedTree, first_row: int) -> None:
    """Fills the rows of the manager's mask for the root and the nodes that the grammar can reach.

    The array that the manager returned is a view of this mask. Going back up an edge rolls the
    grammar back by one token, so each node is fed once, as the nodes of a chain are.
    """
    cursor = RequestCursor(manager, request)
    mask = manager._grammar_bitmask
    # Since vLLM 0.33: tokens that would end reasoning with text that the grammar cannot begin with.
    # They are set if the root is reasoning; otherwise no node is.
    masked_ends = getattr(request.structured_output_request, "masked_reasoning_end_ids", None) or ()

    def fill(row: int) -> None:
        if cursor.is_constrained:
            cursor.grammar.fill_bitmask(mask, row)
        else:
            mask[row].fill_(manager._full_mask)
            words = mask[row].numpy().view(np.uint32)
            for token_id in masked_ends if cursor.is_reasoning else ():
                words[token_id >> 5] &= ~np.uint32(1 << (token_id & 31))

    children: list[list[int]] = [[] for _ in range(len(tree.parents) + 1)]
    for child, parent in enumerate(tree.parents):
        # No walk reaches nodes with any other negative parent.
        if parent >= ROOT:
            children[parent + 1].append(child)
    fill(first_row)
    # Nodes to enter, and None to leave one. An explicit stack, because chains may be long.
    pending: list[int | None] = list(reversed(children[0]))
    while pending:
        node = pending.pop()
        if node is None:
            cursor.retreat()
        elif cursor.advance(tree.token_ids[node]):
            fill(first_row + 1 + node)
            pending.append(None)
            pending.extend(reversed(children[node + 1]))
