# SPDX-License-Identifier: Apache-2.0
"""The readable version of `CompiledNgramIndex`."""

from __future__ import annotations

import heapq
import math
from collections import Counter

import numpy as np

from vllm_specplug.kernels.ngram_index import (
    MAX_OCCURRENCES,
    MIN_SUFFIX,
    NgramIndexReference,
    TreeArrays,
    _is_typed,
)

# Minimum score of an n-gram node: less probable nodes are not worth a row with any budget.
_LOWEST_SCORE = math.log(1 / 256)


class NgramOracle(NgramIndexReference):
    can_graft = True

    def graft(
        self,
        tokens: np.ndarray,
        tree: TreeArrays,
        shares: np.ndarray,
        width: int,
        depth: int,
        budget: int,
        vocab_size: int = 1 << 31,
    ) -> TreeArrays | None:
        if not _is_typed(tree):
            return None
        assert len(tokens) == self.num_tokens
        self._tokens, history = tokens, tokens.tolist()
        ids, parents, _, scores = (array.tolist() for array in tree)
        children: dict[int, list[int]] = {}
        for node, (parent, score) in enumerate(zip(parents, scores, strict=True)):
            if not -1 <= parent < node or not score <= (scores[parent] if parent >= 0 else 0.0):
                return None
            children.setdefault(parent, []).append(node)
        # (-score, order of entry, token, parent, path, node of `tree` or None)
        heap: list[tuple[float, int, int, int, list[int], int | None]] = []
        entered = 0

        def offer(p: float, total: float, token: int, at: int, path: list[int], node: int | None):
            nonlocal entered
            if not p > 0:
                return
            score = total + math.log(min(p, 1.0))
            if not math.isfinite(score) or (node is None and score < _LOWEST_SCORE):
                return
            heapq.heappush(heap, (-score, entered, token, at, [*path, token], node))
            entered += 1

        def expand(at: int, path: list[int], total: float, node: int | None) -> None:
            size, times = (
                self._after([*history, *path], vocab_size)
                if len(path) < depth
                else (0, Counter[int]())
            )
            weight, seen = float(shares[size]) if size else 0.0, times.total()
            proposed = {token: weight * count / seen for token, count in times.most_common(width)}
            for child in children.get(node, []) if node is not None else []:
                above = scores[node] if node >= 0 else 0.0
                p = (1.0 - weight) * math.exp(scores[child] - above)
                offer(p + proposed.pop(ids[child], 0.0), total, ids[child], at, path, child)
            for token, p in proposed.items():
                offer(p, total, token, at, path, None)

        out: list[tuple[int, int, int, float]] = []
        if budget > 0:
            expand(-1, [], 0.0, -1)
        while heap and len(out) < budget:
            negative, _, token, at, path, node = heapq.heappop(heap)
            out.append((token, at, len(path), -negative))
            if len(out) < budget:
                expand(len(out) - 1, path, -negative, node)
        columns = zip(*out, strict=True) if out else ((), (), (), ())
        kinds = (np.int64, np.int32, np.int32, np.float32)
        token_ids, at_nodes, depths, totals = (
            np.array(column, dtype=kind) for column, kind in zip(columns, kinds, strict=True)
        )
        return token_ids, at_nodes, depths, totals

    def _after(self, text: list[int], vocab_size: int) -> tuple[int, Counter[int]]:
        """Returns the length of the matched suffix of `text`, the tokens and then a path of a tree,
        and the counts of next tokens."""
        for size in range(min(self.longest, len(text)), MIN_SUFFIX - 1, -1):
            positions = self._ends_of(text[len(text) - size :])
            # Only `path` follows the end of the text.
            followed = [
                position
                for position in reversed(positions)
                if position < len(text) and text[position] < vocab_size
            ]
            if followed:
                return size, Counter(text[position] for position in followed[:MAX_OCCURRENCES])
        return 0, Counter()
