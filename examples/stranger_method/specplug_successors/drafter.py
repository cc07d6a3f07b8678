# SPDX-License-Identifier: Apache-2.0
"""The drafter: counts pairs of neighbouring tokens and follows the most frequent ones."""

from collections import Counter

import numpy as np

from vllm_specplug.api import (
    CommittedTokens,
    Drafter,
    DraftRequests,
    DraftTree,
    TargetWeights,
    draft_level_by_level,
)


class SuccessorDrafter(Drafter):
    """Needs nothing of the target: `propose` sees the committed tokens, and that is enough."""

    def load(self, target: TargetWeights) -> None:
        pass

    def observe(self, committed: CommittedTokens) -> None:
        pass

    def propose(self, requests: DraftRequests) -> list[DraftTree]:
        width = requests.width
        pairs = [self._successors(tokens) for tokens in requests.token_ids]

        def expand(frontier):
            """The likeliest children of each node: ids and log-probabilities [nodes, width]."""
            ids = np.zeros((len(frontier.token_ids), width), np.int64)
            logs = np.full(ids.shape, -np.inf, np.float32)
            for row, (r, token) in enumerate(
                zip(frontier.requests, frontier.token_ids, strict=True)
            ):
                counts = pairs[r].get(int(token), Counter())
                for place, (successor, count) in enumerate(counts.most_common(width)):
                    ids[row, place] = successor
                    logs[row, place] = np.log(count / (counts.total() + 1))
            return ids, logs

        return draft_level_by_level(
            requests.anchors,
            requests.budgets,
            [min(depth, self.options.tree_depth) for depth in requests.depths],
            width,
            expand,
        )

    def _successors(self, tokens: np.ndarray) -> dict[int, Counter]:
        recent = tokens[-self.options.settings :].tolist()
        found: dict[int, Counter] = {}
        for token, successor in zip(recent, recent[1:]):  # noqa: B905 - one shorter on purpose
            found.setdefault(token, Counter())[successor] += 1
        return found
