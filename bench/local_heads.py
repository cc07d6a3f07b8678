# SPDX-License-Identifier: Apache-2.0
"""Acceptance of a block head's trees, corrected by local heads with a grid of fusion weights.

The target answers prompts greedily and the block head scores every position of the answers once.
Then only `alpha`, `beta` and `anchor_input` of the local heads vary. A walk goes from committed
position to committed position of an answer, as serving does. Weights are chosen on every second
prompt and shown for the others.

    python bench/local_heads.py --data PROMPTS [--head HEAD] [--prompts 200]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from harness import HEADS, Benchmark, make_engine

from vllm_specplug.bench.result_page import ResultPage, Section
from vllm_specplug.drafting.ngram import NgramBranches
from vllm_specplug.drafting.requests import DraftRequests
from vllm_specplug.tree import ROOT, DraftTree

ALPHAS = (0.0, 0.3, 0.5, 0.7)
BETAS = (0.0, 0.2, 0.3, 0.5)
LOCAL_HEADS = {"GRU": "smollm2-135m-dels-gru", "Markov head": "smollm2-135m-dels-markov"}
BUDGETS = (8, 16, 32)
SIZES = ("chain", *map(str, BUDGETS))
CHOSEN_BY = "16"
WIDTH, CANDIDATES, NGRAMS = 8, 128, 3
RESAMPLES = 4000


@dataclass(frozen=True)
class Text:
    """A prompt with its greedy answer, int32 [S], and what the block head says after the anchors
    `start`, `start` + 1, ..: draft ids [A, D, M], best first, and their log-probabilities."""

    tokens: np.ndarray
    start: int
    ids: Any
    log_probs: Any

    @property
    def num_anchors(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Walk:
    """Accepted drafts of every round, by prompt."""

    rounds: list[list[int]]

    @property
    def length(self) -> float:
        """Mean acceptance length."""
        return float(self._length(slice(None)))

    def over(self, other: Walk) -> str:
        """Returns the ratio of the lengths with its 95 % interval over prompts."""
        chosen = np.random.default_rng(0).integers(
            0, len(self.rounds), (RESAMPLES, len(self.rounds))
        )
        ratios = self._length(chosen) / other._length(chosen)
        low, high = np.percentile(ratios, (2.5, 97.5))
        return f"{self.length / other.length:.3f} ({low:.3f}, {high:.3f})"

    def reaching(self) -> list[float]:
        """Returns the share of rounds that accept at least 1, 2, .. drafts."""
        accepted = np.concatenate([np.array(prompt) for prompt in self.rounds])
        return [float((accepted >= depth).mean()) for depth in range(1, accepted.max() + 1)]

    def _length(self, chosen: Any) -> Any:
        accepted = np.array([sum(prompt) for prompt in self.rounds])[chosen]
        return 1 + accepted.sum(-1) / np.array([len(p) for p in self.rounds])[chosen].sum(-1)


def path_length(tree: DraftTree, actual: Sequence[int]) -> int:
    """Returns how many of the actual tokens a tree has on one path."""
    pairs = zip(tree.parent_indices.tolist(), tree.token_ids.tolist(), strict=True)
    nodes = {pair: node for node, pair in enumerate(pairs)}
    node = ROOT
    for length, token in enumerate(actual):
        found = nodes.get((node, token))
        if found is None:
            return length
        node = found
    return len(actual)


class Trees:
    """Trees of a local head over all texts."""

    def __init__(self, builder: Any, texts: Sequence[Text]) -> None:
        self.builder, self.texts = builder, texts

    def set_weights(self, alpha: float, beta: float, anchor_input: bool) -> None:
        import torch

        depth = self.texts[0].ids.shape[1]
        first = 0.0 if not anchor_input else 1.0
        factors = np.array([first] + [1.0] * (depth - 1))
        self.builder.options = replace(
            self.builder.options,
            alpha=tuple((alpha * factors).tolist()),
            beta=tuple((beta * factors).tolist()),
            anchor_input=anchor_input,
        )
        self.builder.alpha = torch.tensor(self.builder.options.alpha)
        self.builder.beta = torch.tensor(self.builder.options.beta)

    def walk(self, budget: int, width: int = WIDTH, *, ngrams: bool = False) -> Walk:
        """Returns a walk over all texts at once; with `ngrams`, one text after the other."""
        groups = [[text] for text in self.texts] if ngrams else [list(self.texts)]
        branches = NgramBranches(NGRAMS, budget) if ngrams else None
        rounds: list[list[int]] = []
        for group in groups:
            at, made = [0] * len(group), [[] for _ in group]  # type: ignore[var-annotated]
            while running := [i for i, text in enumerate(group) if at[i] < text.num_anchors]:
                trees = self._build([(group[i], at[i]) for i in running], budget, width)
                for i, tree in zip(running, trees, strict=True):
                    text, end = group[i], group[i].start + at[i] + 1
                    if branches is not None:
                        requests = DraftRequests(
                            req_ids=[str(len(rounds))], token_ids=[text.tokens[:end]],
                            budgets=[budget], depths=[budget], width=width,
                        )  # fmt: skip
                        (tree,) = branches.add_to([tree], requests)
                    accepted = path_length(tree, text.tokens[end : end + budget].tolist())
                    made[i].append(accepted)
                    at[i] += accepted + 1
            rounds += made
        return Walk(rounds)

    def walks(self) -> dict[str, Walk]:
        """Returns a walk for each of SIZES."""
        depth = self.texts[0].ids.shape[1]
        return {"chain": self.walk(depth, 1), **{str(n): self.walk(n) for n in BUDGETS}}

    def _build(
        self, places: Sequence[tuple[Text, int]], budget: int, width: int
    ) -> list[DraftTree]:
        """Returns the tree after each anchor, given as a text and the number of the anchor."""
        import torch

        ids, log_probs = (
            torch.stack([getattr(text, name)[at] for text, at in places])
            for name in ("ids", "log_probs")
        )
        anchors = [int(text.tokens[text.start + at]) for text, at in places]
        count, depth = ids.shape[:2]
        trees: list[DraftTree] = self.builder.build(
            ids, log_probs, anchors, [budget] * count, [depth] * count, width
        )
        return trees


def greedy_answers(target: str, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    from vllm import SamplingParams

    llm = make_engine(None, eager=True, model=target, max_num_seqs=64)
    params = SamplingParams(temperature=0.0, max_tokens=tokens, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def read_texts(
    target: str, head_path: Path, prompts: list[list[int]], answers: list[list[int]]
) -> tuple[list[Text], Any, Any]:
    """Returns the texts, the target's tables and the draft vocabulary."""
    import torch

    from vllm_specplug.drafting.checkpoint_files import target_ids_or_all
    from vllm_specplug.methods.block.checkpoint import load_block_head
    from vllm_specplug.methods.block.train.blocks import pack_blocks, run_blocks
    from vllm_specplug.train.features import FeatureSequence, forward_features
    from vllm_specplug.train.target import TargetWeights

    weights = TargetWeights(target)
    model: Any = weights.load(torch.bfloat16)
    head, extras = load_block_head(head_path, weights.config)
    head = head.bfloat16()
    config = head.config
    embed = model.get_input_embeddings().weight.detach()
    lm_head = model.get_output_embeddings().weight.detach()
    draft_ids = target_ids_or_all(extras.target_ids, config.vocab_size)
    rows, texts = lm_head[draft_ids], []
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = torch.tensor(prompt + answer)
        if len(answer) < 2:
            continue
        (aux,), (hidden,) = forward_features(model, [tokens], config.target_layer_ids)
        sequence = FeatureSequence(tokens, len(prompt), aux, hidden)
        anchors = torch.arange(len(prompt), len(tokens) - 1)
        batch = pack_blocks([sequence], [anchors], config.block_size, 1, config.first_slot)
        states = run_blocks(head, batch, embed)
        scores = (states @ rows.t()).float().log_softmax(-1)
        log_probs, ids = scores.topk(CANDIDATES, dim=-1)
        shape = (len(anchors), -1, CANDIDATES)
        texts.append(
            Text(tokens.int().numpy(), len(prompt), ids.view(shape), log_probs.view(shape))
        )
    return texts, (weights.config, embed, lm_head), draft_ids


def make_builder(folder: Path, tables: Any, draft_ids: Any, depth: int) -> Any:
    import torch

    from vllm_specplug.methods.dels.checkpoint import load_local_head
    from vllm_specplug.methods.dels.unigram import UNIGRAM_NAME, load_unigram, log_prior
    from vllm_specplug.methods.local.settings import LocalTreeSettings
    from vllm_specplug.methods.local.tree import LocalTreeBuilder

    config, embed, lm_head = tables
    head, ids = load_local_head(folder, config)
    options = LocalTreeSettings.of_own_head(depth, CANDIDATES)
    return LocalTreeBuilder(
        head, ids, draft_ids, log_prior(load_unigram(folder / UNIGRAM_NAME), config["vocab_size"]),
        replace(options, gate_table_bytes=64 << 20),
        embed_tokens=embed, lm_head=lm_head, dtype=torch.bfloat16,
    )  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """The chosen weights of a local head (anchor_input, alpha, beta), the acceptance of all weights
    on the prompts that chose them, and walks over the other prompts: by alpha and beta with the
    chosen anchor_input, and with n-grams."""

    chosen: tuple[bool, float, float]
    lengths: Mapping[tuple[bool, float, float], float]
    grid: Mapping[tuple[float, float], Mapping[str, Walk]]
    with_ngrams: Mapping[int, Walk]

    @property
    def walks(self) -> Mapping[str, Walk]:
        return self.grid[self.chosen[1:]]

    def best_length(self, anchor_input: bool) -> float:
        """Returns the largest acceptance on the prompts that chose the weights."""
        return max(length for key, length in self.lengths.items() if key[0] == anchor_input)


def measure(choosing: Trees, shown: Trees) -> Measured:
    lengths = {}
    for anchor_input in (True, False):
        for alpha in ALPHAS:
            for beta in BETAS:
                choosing.set_weights(alpha, beta, anchor_input)
                length = choosing.walk(int(CHOSEN_BY)).length
                lengths[anchor_input, alpha, beta] = length
                print(f"{anchor_input}, {alpha}, {beta}: {length:.3f}", flush=True)
    chosen = max(lengths, key=lambda key: lengths[key])
    grid = {}
    for alpha in ALPHAS:
        for beta in BETAS:
            shown.set_weights(alpha, beta, chosen[0])
            grid[alpha, beta] = walks = shown.walks()
            found = " ".join(f"{walks[size].length:.3f}" for size in SIZES)
            print(f"{chosen}, shown {alpha}, {beta}: {found}", flush=True)
    shown.set_weights(chosen[1], chosen[2], chosen[0])
    with_ngrams = {budget: shown.walk(budget, ngrams=True) for budget in (8, 16)}
    return Measured(chosen, lengths, grid, with_ngrams)


def sections(measured: Mapping[str, Measured], alone: Mapping[int, Walk]) -> list[Section]:
    only = next(iter(measured.values())).grid[0.0, 0.0]
    columns = [column for name in measured for column in (f"with the {name}", "ratio")]

    def compared(base: Walk, walks: Sequence[Walk]) -> list[str]:
        pairs = [(f"{walk.length:.2f}", walk.over(base)) for walk in walks]
        return [f"{base.length:.2f}", *(cell for pair in pairs for cell in pair)]

    chosen = [
        [name, f"{found.chosen[1]}", f"{found.chosen[2]}", str(found.chosen[0]).lower(),
         f"{found.lengths[True, 0.0, 0.0]:.3f}",
         *(f"{found.best_length(anchor_input):.3f}" for anchor_input in (True, False))]
        for name, found in measured.items()
    ]  # fmt: skip
    shares = [
        (size, name, walks[size].reaching())
        for size in ("chain", CHOSEN_BY)
        for name, walks in {
            "head only": only,
            **{f"with the {name}": found.walks for name, found in measured.items()},
        }.items()
    ]
    depths = max(len(reached) for _, _, reached in shares)
    return [
        Section(
            ("nodes", "head only", *columns),
            [
                [size, *compared(only[size], [found.walks[size] for found in measured.values()])]
                for size in SIZES
            ],
        ),
        Section(
            ("local head", "alpha", "beta", "anchor_input", "head only", "best, anchor read",
             "best, anchor not read"),
            chosen,
            "Chosen weights",
            [f"Acceptance of trees of {CHOSEN_BY} nodes on the prompts that chose the weights."],
        ),
        Section(
            ("nodes", "", *(f"depth {depth}" for depth in range(1, depths + 1))),
            [
                [size, name, *(f"{s:.3f}" for s in reached), *["0"] * (depths - len(reached))]
                for size, name, reached in shares
            ],
            "By depth",
            ["Share of rounds that accept drafts to this depth or deeper; chosen weights."],
        ),
        Section(
            ("nodes", "head + n-grams", *columns),
            [
                [str(budget),
                 *compared(base, [found.with_ngrams[budget] for found in measured.values()])]
                for budget, base in alone.items()
            ],
            "Beside n-grams",
            ["With the n-grams of the text that serving mixes into the trees by default."],
        ),
        *(
            Section(
                ("alpha", *(f"beta {beta}" for beta in BETAS)),
                [
                    [str(alpha), *(
                        " / ".join(f"{found.grid[alpha, beta][size].length:.2f}" for size in SIZES)
                        for beta in BETAS)]
                    for alpha in ALPHAS
                ],
                f"Grid of the {name}",
                [f"Chain / 8 / 16 / 32 nodes, `anchor_input` {str(found.chosen[0]).lower()}."],
            )
            for name, found in measured.items()
        ),
    ]  # fmt: skip


def main() -> None:
    benchmark = Benchmark("dels_acceptance", __doc__, runs_vllm=False)
    add = benchmark.parser.add_argument
    add("--data", type=Path, required=True, help="file or folder of prompts")
    add("--head", default="smollm2-135m-jetspec", help="folder of the block head below heads/")
    add("--prompts", type=int, default=200)
    add("--tokens", type=int, default=128, help="longest answer")
    args = benchmark.parse()
    import torch
    from lookups import chat_token_ids

    from vllm_specplug.targets import prepare_target

    target = str(prepare_target("smollm2"))
    prompts = chat_token_ids(target, args.data, args.prompts, 500)
    answers = greedy_answers(target, prompts, args.tokens)
    print(f"{len(prompts)} prompts, {sum(map(len, answers))} tokens", flush=True)
    with torch.inference_mode():
        texts, tables, draft_ids = read_texts(target, HEADS / args.head, prompts, answers)
        print(f"{len(texts)} texts", flush=True)
        measured, alone = {}, {}
        for name, folder in LOCAL_HEADS.items():
            builder = make_builder(HEADS / folder, tables, draft_ids, texts[0].ids.shape[1])
            choosing, shown = Trees(builder, texts[::2]), Trees(builder, texts[1::2])
            measured[name] = measure(choosing, shown)
            if not alone:
                shown.set_weights(0.0, 0.0, True)
                alone = {budget: shown.walk(budget, ngrams=True) for budget in (8, 16)}
    data = {
        name: {
            "chosen": found.chosen,
            "chosen_by": [[*key, length] for key, length in found.lengths.items()],
            "grid": [
                {"alpha": alpha, "beta": beta,
                 **{size: {"length": walk.length, "reaching": walk.reaching()}
                    for size, walk in walks.items()}}
                for (alpha, beta), walks in found.grid.items()
            ],
        }
        for name, found in measured.items()
    }  # fmt: skip
    benchmark.publish(
        args,
        ResultPage(
            name="dels_acceptance",
            title="Local heads on a block head",
            about=f"Mean acceptance length of trees of the head `{args.head}`, alone and corrected "
            f"by the shipped local heads, on greedy answers of at most {args.tokens} tokens. The "
            "prompts are chat, code and maths in turn (Spec-Bench, HumanEval, GSM8K). Weights were "
            f"chosen on {len(texts[::2])} prompts, by trees of {CHOSEN_BY} nodes; the other tables "
            f"show {len(texts[1::2])} further prompts. Simulated from the answers without a "
            "server: one pass of the target and one of the block head for all weights, bfloat16. "
            "Ratios are over the same trees without a local head, in brackets the 95 % interval "
            "over prompts (bootstrap).",
            sections=sections(measured, alone),
            data=data,
            made_by=[benchmark.provenance(args)],
        ),
    )


if __name__ == "__main__":
    main()
