# SPDX-License-Identifier: Apache-2.0
"""The walk that decides what a step emits.

At each visited node the target's own next token is sampled once, from the target's
distribution p(. | committed tokens, path to the node). If a child of the node holds that
token, the walk descends to it and the sample becomes an accepted draft; if not, the sample
is the last token of the step. Every emitted token is therefore an exact target sample given
its prefix, whatever the tree holds, as long as the tree does not depend on these samples.
The draft's probabilities q never enter: there is no ratio test to get wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm_specplug.tree import DraftTree

# sample(rows, live): the target's next token at logits row rows[i] for every request i; only
# requests with live[i] may advance random state or be recorded.
SampleFn = Callable[[list[int], list[bool]], Sequence[int]]
# ends_request(i, token): whether request i is over once it emits the token.
EndFn = Callable[[int, int], bool]


@dataclass
class WalkResult:
    """What the walk emitted, per request."""

    token_ids: list[list[int]]
    """Accepted drafts and the bonus or recovered token; never empty."""
    accepted_paths: list[list[int]]
    """Accepted node indices from the root downwards; one less than `token_ids`."""


def walk_trees(
    trees: Sequence[DraftTree | None],
    root_rows: Sequence[int],
    sample: SampleFn,
    ends_request: EndFn = lambda i, token: False,
) -> WalkResult:
    """Walks every request's tree in lock step, one depth at a time.

    A token that ends its request is the last one of the step, child or not: plain decoding
    computes neither its K and V nor a sample after it, and a session that goes on relies on that.

    Args:
        trees: one tree per request, or None where nothing was drafted.
        root_rows: the logits row of each root; node i of a tree is at row root + 1 + i.
        sample: draws the target's token at one row per request.
        ends_request: asked for tokens that a child holds.
    """
    num_reqs = len(trees)
    token_ids: list[list[int]] = [[] for _ in range(num_reqs)]
    paths: list[list[int]] = [[] for _ in range(num_reqs)]
    rows = list(root_rows)
    nodes = [-1] * num_reqs
    live = [True] * num_reqs
    while any(live):
        sampled = sample(rows, live)
        for i, token in enumerate(sampled):
            if not live[i]:
                continue
            token_ids[i].append(int(token))
            tree = trees[i]
            child = None if tree is None else tree.child_of(nodes[i], int(token))
            if child is None or ends_request(i, int(token)):
                live[i] = False
            else:
                paths[i].append(child)
                nodes[i] = child
                rows[i] = root_rows[i] + 1 + child
    return WalkResult(token_ids, paths)
