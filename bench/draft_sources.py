# SPDX-License-Identifier: Apache-2.0
"""Sources of a draft tree beside each other: head, n-grams, token recycling, a local head.

Tokens per step on the target's own greedy answers, as `specplug train evaluate` estimates them, but
with n-grams and recycled tokens mixed into the trees as serving mixes n-grams. Recycling (Luo et
al., Turning Trash into Treasure, 2024) keeps, for every token, the likeliest tokens that the target
gave after it last, also at rejected nodes; here with their probabilities.

    python bench/draft_sources.py --target MODEL --features FEATURES

Recycling is flattered: its table is warmed with the other half of the prompts, and its weight is
the best of a grid on the very prompts that are reported.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import HEADS, Benchmark
from prompt_resampling import PromptCounts

from vllm_specplug.bench.cells import CellStore, digest
from vllm_specplug.bench.provenance import code_fingerprint
from vllm_specplug.bench.result_page import ResultPage, Section
from vllm_specplug.drafting.ngram import MAX_SUFFIX, NgramBranches
from vllm_specplug.kernels.ngram_index import NgramIndexReference
from vllm_specplug.methods.block.train.evaluate_run import Evaluation
from vllm_specplug.methods.dels.train.evaluate import FusedTrees, Fusion
from vllm_specplug.train.walk import DraftedSequence, rounds_at
from vllm_specplug.tree import DraftTree, build_tree, merge_trees

BUDGETS = (8, 16, 32)
WIDTH, NGRAMS = 8, 3
ROWS_BUDGET = 8
"""Nodes of the trees whose rejected rows are recycled."""
KEPT = 8
"""Tokens that are kept after each."""
WEIGHTS = ((0.03, 0.03), (0.05, 0.1), (0.05, 0.2), (0.1, 0.1), (0.1, 0.3), (0.2, 0.4))
"""What recycled probabilities weigh below the root, and deeper."""
RECYCLING: dict[str, dict[str, bool]] = {
    "head + recycling": {"ngrams": False},
    "head + n-grams + recycling": {"ngrams": True},
    "head + n-grams + recycling of the request": {"ngrams": True, "is_shared": False},
}
_ANCHORS = 24
"""Anchors of a forward."""
_LOWEST = math.log(1 / 256)

Recycled = dict[int, dict[int, float]]
Trees = Sequence[Sequence[DraftTree]]


@dataclass(frozen=True)
class Verified:
    """What the target says at each row of a verified tree: the row's token and what may follow."""

    tokens: list[int]
    following: list[dict[int, float]]


@dataclass
class Mixer:
    """Trees of one policy over all requests, in order.

    Args:
        ngrams: whether the text is looked up.
        recycled: the table to begin with; None for no recycling.
        weights: of recycled probabilities, below the root and deeper.
        is_shared: whether all requests share the table.
        merge: how n-grams join a head's tree: at every node, where a token that both propose counts
            the "sum" of what they give it or the "higher" of both, or as branches from the "anchor"
            alone.
    """

    ngrams: bool
    recycled: Recycled | None = None
    weights: tuple[float, float] = (0.0, 0.0)
    is_shared: bool = True
    merge: str = "sum"
    branches: NgramBranches = field(init=False)
    index: NgramIndexReference = field(init=False)
    table: Recycled = field(init=False)

    def __post_init__(self) -> None:
        self.branches = NgramBranches(NGRAMS, 32)
        self.table = dict(self.recycled or {})

    def start(self) -> None:
        """Another request begins."""
        self.index = NgramIndexReference(MAX_SUFFIX)
        if not self.is_shared:
            self.table = {}

    def tree(
        self, request: str, drafted: DraftTree, committed: np.ndarray, budget: int
    ) -> DraftTree:
        """The best `budget` nodes of all sources, `drafted` being the head's."""
        if not self.ngrams and self.recycled is None:
            return drafted
        shares = np.zeros(MAX_SUFFIX + 1, np.float32)
        if self.ngrams:
            self.index.look_up(committed, 0, 0)
            branches = self.branches.branches(request, committed, budget)
            if self.merge == "anchor":
                return merge_trees([drafted, *branches], budget)
            shares = self.branches.statistics.shares(MAX_SUFFIX)
            if self.recycled is None and self.merge == "sum":
                columns = (drafted.token_ids, drafted.parent_indices, drafted.depths,
                           drafted.scores)  # fmt: skip
                grafted = self.index.graft(committed, columns, shares, NGRAMS, budget, budget)
                assert grafted is not None
                return DraftTree(*grafted)
        return self._mixed(drafted, int(committed[-1]), shares, budget)

    def learn(self, verified: Verified) -> None:
        """A step was verified."""
        if self.recycled is not None:
            self.table.update(zip(verified.tokens, verified.following, strict=True))

    def _mixed(self, drafted: DraftTree, anchor: int, shares: np.ndarray, budget: int) -> DraftTree:
        ids, parents, scores = (
            column.tolist()
            for column in (drafted.token_ids, drafted.parent_indices, drafted.scores)
        )
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(parents):
            children.setdefault(parent, []).append(node)
        heap: list[tuple[float, int, int, int, list[int], int | None]] = []

        def expand(at: int, path: list[int], total: float, node: int | None) -> None:
            # Every source is mixed into what those before it say of the children.
            odds: dict[int, float] = {}
            heads: dict[int, int] = {}
            for child in children.get(node, []) if node is not None else []:
                above = scores[node] if node >= 0 else 0.0
                odds[ids[child]] = math.exp(scores[child] - above)
                heads[ids[child]] = child
            if self.ngrams and len(path) < budget:
                size, times = self.index._after(path, 1 << 31)
                weight, seen = float(shares[size]) if size else 0.0, times.total()
                said = {token: count / seen for token, count in times.most_common(NGRAMS)}
                odds = _mixture(odds, said, weight, self.merge == "sum")
            said = self.table.get(path[-1] if path else anchor, {})
            odds = _mixture(odds, said, self.weights[min(len(path), 1)] if said else 0.0)
            for token, p in odds.items():
                score = total + math.log(min(max(p, 1e-30), 1.0))
                if token in heads or score >= _LOWEST:
                    entry = (-score, len(seen_nodes), token, at, [*path, token], heads.get(token))
                    heapq.heappush(heap, entry)
                    seen_nodes.append(token)

        seen_nodes: list[int] = []
        out: list[tuple[int, int, int, float]] = []
        expand(-1, [], 0.0, -1)
        while heap and len(out) < budget:
            negative, _, token, at, path, node = heapq.heappop(heap)
            out.append((token, at, len(path), -negative))
            if len(out) < budget:
                expand(len(out) - 1, path, -negative, node)
        kinds = (np.int64, np.int32, np.int32, np.float32)
        columns = zip(*out, strict=True) if out else ((), (), (), ())
        return DraftTree(*(np.array(c, k) for c, k in zip(columns, kinds, strict=True)))


def _mixture(
    some: Mapping[int, float], others: Mapping[int, float], weight: float, adds: bool = True
) -> dict[int, float]:
    mixed = {token: (1.0 - weight) * p for token, p in some.items()}
    for token, p in others.items() if weight else ():
        first, second = mixed.get(token, 0.0), weight * p
        mixed[token] = first + second if adds else max(first, second)
    return mixed


def walked(
    mixer: Mixer,
    sequences: Sequence[DraftedSequence],
    trees: Trees,
    rows: Sequence[Sequence[Verified]],
    budget: int,
    chosen: Sequence[int],
) -> dict[int, tuple[int, int]]:
    """Tokens and steps of the `chosen` requests, one after the other."""
    found = {}
    for r in chosen:
        sequence = sequences[r]
        mixer.start()
        tokens = sequence.tokens.numpy()
        at, steps, emitted = 0, 0, 0
        while at < sequence.num_anchors:
            end = sequence.prompt_len + at + 1
            tree = mixer.tree(f"{r}", trees[r][at], tokens[:end], budget)
            accepted, node = 0, -1
            for token in tokens[end:].tolist():
                child = tree.child_of(node, token)
                if child is None:
                    break
                accepted, node = accepted + 1, child
            # A step gives its accepted nodes and one more, except behind the answer's end.
            for place in range(at, min(at + accepted + 1, sequence.num_anchors)):
                mixer.learn(rows[r][place] if place == at else _root_of(rows[r][place]))
            steps += 1
            emitted += accepted + 1
            at += accepted + 1
        found[r] = (emitted, steps)
    return found


def _root_of(verified: Verified) -> Verified:
    return Verified(verified.tokens[:1], verified.following[:1])


def head_trees(made: Evaluation, budget: int) -> Trees:
    """The head's own trees, of every anchor of every sequence."""
    found = []
    for sequence in made.drafted:
        slots = sequence.slots.narrowed(WIDTH)
        ids, log_probs = made.draft.target_ids[slots.rows].numpy(), slots.log_probs.numpy()
        found.append([
            build_tree("best_first", i, p, budget, tree_width=WIDTH, tree_depth=made.depth)
            for i, p in zip(ids, log_probs, strict=True)
        ])  # fmt: skip
    return found


@torch.no_grad()
def fused_trees(made: Evaluation, local: Path, budget: int, weights: tuple[float, float]) -> Trees:
    """Trees of the head and a local head."""
    tables = made.local_tables(local, local / "unigram.safetensors", True)
    fusion = Fusion.of(tables, made.depth, *weights)
    found = []
    for sequence in made.drafted:
        rounds = rounds_at(sequence, torch.arange(sequence.num_anchors))
        fused = FusedTrees(tables, fusion, rounds, budget, WIDTH)
        found.append(_trees_of(fused))
    return found


def _trees_of(fused: FusedTrees) -> list[DraftTree]:
    """The tree of every request, nodes by falling score."""
    rows = torch.nonzero(fused.kept).flatten()
    rows = rows[torch.argsort(fused.score[rows], descending=True, stable=True)]
    rows = rows[torch.argsort(fused.request[rows], stable=True)]
    trees = []
    for own in rows.split(torch.bincount(fused.request[rows]).tolist()):
        place = {row: i for i, row in enumerate(own.tolist())} | {-1: -1}
        parents = np.array([place[parent] for parent in fused.parent[own].tolist()], np.int32)
        depths, scores = fused.depth[own].int().numpy(), fused.score[own].numpy()
        trees.append(DraftTree(fused.token[own].numpy(), parents, depths, scores))
    return trees


@torch.inference_mode()
def verified_rows(
    model: Any, sequences: Sequence[DraftedSequence], trees: Trees
) -> Iterator[list[Verified]]:
    """What the target says at all rows of the tree at every anchor of each sequence, some anchors a
    forward: each row sees the text before its anchor and its own path."""
    for sequence, drafted in zip(sequences, trees, strict=True):
        text = sequence.tokens[None]
        cache = model(input_ids=text, use_cache=True, logits_to_keep=1).past_key_values
        found = []
        for first in range(0, len(drafted), _ANCHORS):
            some = drafted[first : first + _ANCHORS]
            tokens, positions, sees = _rows_of(sequence, first, some)
            mask = torch.zeros(sees.shape, dtype=torch.bfloat16)
            mask.masked_fill_(~sees, torch.finfo(torch.bfloat16).min)
            hidden = model.model(
                input_ids=tokens[None],
                position_ids=positions[None],
                past_key_values=cache,
                attention_mask=mask[None, None],
            ).last_hidden_state[0]
            cache.crop(-len(tokens))
            top = model.lm_head(hidden).float().softmax(-1).topk(KEPT)
            said = [
                dict(zip(ids, shares, strict=True))
                for ids, shares in zip(top.indices.tolist(), top.values.tolist(), strict=True)
            ]
            starts = np.cumsum([0, *(1 + tree.num_nodes for tree in some)])
            found += [
                Verified(tokens[a:b].tolist(), said[a:b])
                for a, b in zip(starts, starts[1:], strict=False)
            ]
        yield found


def _rows_of(
    sequence: DraftedSequence, first: int, trees: Sequence[DraftTree]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens [N] and positions [N] of roots and nodes at the anchors from `first` on, and what each
    sees of the text and of the rows, bool [N, S + N]."""
    length, rows = len(sequence.tokens), sum(1 + tree.num_nodes for tree in trees)
    tokens, positions = torch.empty(2, rows, dtype=torch.int64)
    sees = torch.zeros(rows, length + rows, dtype=torch.bool)
    root = 0
    for anchor, tree in enumerate(trees, first):
        at = sequence.prompt_len + anchor
        tokens[root], positions[root] = sequence.tokens[at], at
        sees[root, :at] = True
        sees[root, length + root] = True
        end = root + 1 + tree.num_nodes
        tokens[root + 1 : end] = torch.from_numpy(tree.token_ids)
        positions[root + 1 : end] = at + torch.from_numpy(tree.depths)
        for row, parent in enumerate(tree.parent_indices.tolist(), root + 1):
            sees[row] = sees[root + 1 + parent]
            sees[row, length + row] = True
        root = end
    return tokens, positions, sees


def known_rows(args: Any, made: Evaluation) -> list[list[Verified]]:
    """`verified_rows` of the head's trees, kept in a file where one is named."""
    from vllm_specplug.train.target import load_target

    if args.rows is not None and args.rows.is_file():
        kept = torch.load(args.rows, weights_only=True)
        return [[Verified(tokens, said) for tokens, said in anchors] for anchors in kept]
    model = load_target(args.target, torch.bfloat16)
    rows = list(verified_rows(model, made.drafted, head_trees(made, ROWS_BUDGET)))
    if args.rows is not None:
        torch.save([[(v.tokens, v.following) for v in anchors] for anchors in rows], args.rows)
    return rows


def warmed(rows: Sequence[Sequence[Verified]], chosen: Sequence[int]) -> Recycled:
    """The table after some requests."""
    table: Recycled = {}
    for r in chosen:
        for verified in rows[r]:
            table.update(zip(verified.tokens, verified.following, strict=True))
    return table


@dataclass
class Study:
    """All policies on one set of drafts."""

    made: Evaluation
    rows: list[list[Verified]]

    def counts(self, trees: Trees, budget: int, **policy: Any) -> PromptCounts:
        """By prompt; a table that is shared is warmed with the other half of the prompts."""
        everyone = range(len(self.made.drafted))
        found: dict[int, tuple[int, int]] = {}
        for half in (0, 1):
            own = [r for r in everyone if r % 2 == half]
            mixer = Mixer(**policy)
            if mixer.recycled is not None and mixer.is_shared:
                mixer.table = warmed(self.rows, [r for r in everyone if r % 2 != half])
            found |= walked(mixer, self.made.drafted, trees, self.rows, budget, own)
        return PromptCounts.of([found[r] for r in everyone])

    def recycling(
        self, trees: Trees, budget: int, **policy: Any
    ) -> tuple[tuple[float, float], PromptCounts]:
        """The best weights of the grid, and their counts."""
        tried = [
            (weights, self.counts(trees, budget, recycled={}, weights=weights, **policy))
            for weights in WEIGHTS
        ]
        return max(tried, key=lambda pair: pair[1].rate().value)


def measure(args: Any, store: CellStore) -> dict[str, Any]:
    made = Evaluation(args.target, args.head, args.features)
    rows = known_rows(args, made)
    # The tree rows of the true path say what the answer's own rows said, but for rounding.
    same = [
        max(rows[r][a].following[0], key=rows[r][a].following[0].__getitem__)  # type: ignore[arg-type]
        == int(s.tokens[s.prompt_len + a + 1])
        for r, s in enumerate(made.drafted)
        for a in range(s.num_anchors)
    ]
    print(f"rows as the answers: {np.mean(same):.3f}", flush=True)
    assert np.mean(same) > 0.97, np.mean(same)
    study = Study(made, rows)
    name = digest([code_fingerprint(args.head), [s.tokens.tolist() for s in made.drafted]])
    found: dict[str, Any] = {"prompts": len(made.drafted), "budgets": {}}
    for budget in BUDGETS:
        policies: dict[str, PromptCounts] = {}
        weights: dict[str, Any] = {}
        for policy, work in policies_of(study, args.local, budget).items():
            cell = store.get(name, [budget, policy])
            if cell is None:
                chosen, counts = work()
                cell = {"weights": chosen, "tokens": counts.tokens.tolist(),
                        "steps": counts.steps.tolist()}  # fmt: skip
                store.add(name, [budget, policy], cell)
            policies[policy] = PromptCounts(np.array(cell["tokens"]), np.array(cell["steps"]))
            if cell["weights"]:
                weights[policy] = list(cell["weights"])
            print(budget, policy, policies[policy].rate(), flush=True)
        found["budgets"][budget] = {
            policy: {
                "tokens_per_step": counts.rate().to_json(),
                "over_head": counts.over(policies["head"]).to_json(),
                "over_head_and_ngrams": counts.over(policies["head + n-grams"]).to_json(),
                **({"weights": weights[policy]} if policy in weights else {}),
            }
            for policy, counts in policies.items()
        }
    return found


Work = Callable[[], tuple[Any, PromptCounts]]


def policies_of(study: Study, local: Any, budget: int) -> dict[str, Work]:
    """What measures each policy, with the weights that it found best, if any."""

    @cache
    def head() -> Trees:
        return head_trees(study.made, budget)

    def counts(trees: Callable[[], Trees], **policy: Any) -> Work:
        return lambda: (None, study.counts(trees(), budget, **policy))

    found = {
        "head": counts(head, ngrams=False),
        "head + n-grams": counts(head, ngrams=True),
        "head + n-grams, the higher of both": counts(head, ngrams=True, merge="higher"),
        "head + n-grams, from the anchor alone": counts(head, ngrams=True, merge="anchor"),
    }
    for name, policy in RECYCLING.items():
        found[name] = partial(_recycled, study, head, budget, policy)
    for name, folder, weights in local:
        fused = cache(partial(fused_trees, study.made, Path(folder), budget, weights))
        found[f"head + {name}"] = counts(fused, ngrams=False)
        found[f"head + {name} + n-grams"] = counts(fused, ngrams=True)
    return found


def _recycled(
    study: Study, head: Callable[[], Trees], budget: int, policy: Mapping[str, Any]
) -> tuple[Any, PromptCounts]:
    return study.recycling(head(), budget, **policy)


def make_page(found: dict[str, Any], record: Mapping[str, Any]) -> ResultPage:
    names = list(next(iter(found["budgets"].values())))

    def row(name: str, key: str) -> list[str]:
        cells = [values[name][key] for values in found["budgets"].values()]
        return [name, *(f"{v:.2f} ({low:.2f}, {high:.2f})" for v, low, high in cells)]

    header = ["sources", *(f"{budget} nodes" for budget in found["budgets"])]
    return ResultPage(
        name="draft_sources",
        title="Sources of a draft tree beside each other",
        about=f"Tokens per step, estimated on greedy answers to {found['prompts']} prompts, in "
        "brackets the 95 % interval over prompts. Recycling keeps the "
        f"{KEPT} likeliest tokens after every token that was verified, also after rejected ones; "
        "its table is warmed with the other half of the prompts, or begins empty with every "
        "request, and its weight is the best of a grid on these prompts: it is flattered.",
        sections=[
            Section(header, [row(name, "tokens_per_step") for name in names]),
            Section(
                header,
                [row(name, "over_head_and_ngrams") for name in names],
                "Over head + n-grams, on the same prompts",
            ),
        ],
        data=found,
        made_by=[record],
    )


def _local(text: str) -> tuple[str, str, tuple[float, float]]:
    name, path, alpha, beta = text.split("=")
    return name, path, (float(alpha), float(beta))


def main() -> None:
    benchmark = Benchmark("draft_sources", __doc__, runs_vllm=False)
    add = benchmark.parser.add_argument
    add("--target", type=Path, required=True)
    add("--features", type=Path, required=True, help="features of greedy answers")
    add("--head", type=Path, default=HEADS / "smollm2-135m-jetspec")
    add("--rows", type=Path, help="file for what the target says at rejected nodes, to continue")
    add("--local", type=_local, action="append", default=[],
        help="NAME=FOLDER=ALPHA=BETA of a local head")  # fmt: skip
    args = benchmark.parse()
    args.local = args.local or [
        ("GRU", str(HEADS / "smollm2-135m-dels-gru"), (0.5, 0.3)),
        ("Markov head", str(HEADS / "smollm2-135m-dels-markov"), (0.5, 0.3)),
    ]
    found = measure(args, CellStore(args.out / f"{benchmark.name}_cells.jsonl"))
    benchmark.publish(args, make_page(found, benchmark.provenance(args)))


if __name__ == "__main__":
    main()
