# SPDX-License-Identifier: Apache-2.0
"""Two rules that reuse the tokens of a text, simulated: TokenSwift's and this project's.

Each text is read token by token. After every token the rules propose chains of three tokens; the
longest right prefix of any chain counts. TokenSwift's rule proposes the most frequent
continuations of that token, this project's those of the longest suffix of up to 4 tokens.

    python bench/token_reuse.py --texts FILE [FILE ...]
"""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
from harness import Benchmark

from vllm_specplug.bench.result_page import ResultPage, Section

LENGTH = 3
COUNTS = (1, 2, 4, 8, 20)
# Text at the beginning has little to reuse.
SKIPPED = 500


def right(chain: list[int], actual: list[int]) -> int:
    """Returns the number of right tokens before the first wrong one."""
    wrong = (i for i, (a, b) in enumerate(zip(chain, actual, strict=False)) if a != b)
    return next(wrong, len(chain))


def accepted(tokens: np.ndarray) -> dict[str, dict[int, float]]:
    """Returns the mean number of right tokens by rule and number of chains."""
    from vllm_specplug.drafting.ngram import MAX_SUFFIX
    from vllm_specplug.kernels import make_ngram_index

    index = make_ngram_index(MAX_SUFFIX)
    frequent: dict[int, Counter[tuple[int, ...]]] = defaultdict(Counter)
    found: dict[str, dict[int, list[int]]] = {
        rule: {count: [] for count in COUNTS} for rule in ("frequency", "suffix")
    }
    known = tokens.tolist()
    for i in range(len(known) - LENGTH):
        if i >= LENGTH:
            start = i - LENGTH
            frequent[known[start]][tuple(known[start + 1 : i + 1])] += 1
        actual = known[i + 1 : i + 1 + LENGTH]
        chains = {
            "frequency": [list(c) for c, _ in frequent[known[i]].most_common(max(COUNTS))],
            "suffix": [c for _, c in index.lookup(tokens[: i + 1], max(COUNTS), LENGTH)],
        }
        if i < SKIPPED:
            continue
        for rule, proposed in chains.items():
            lengths = [right(chain, actual) for chain in proposed]
            for count in COUNTS:
                found[rule][count].append(max(lengths[:count], default=0))
    return {r: {c: float(np.mean(v)) for c, v in by.items()} for r, by in found.items()}


def main() -> None:
    benchmark = Benchmark("token_reuse", __doc__, runs_vllm=False)
    benchmark.parser.add_argument(
        "--texts", type=Path, nargs="+", required=True,
        help="text files, or token ids saved by numpy",
    )  # fmt: skip
    args = benchmark.parse()
    from transformers import AutoTokenizer

    from vllm_specplug.targets import prepare_target

    tokenizer = AutoTokenizer.from_pretrained(prepare_target("smollm2"))
    rows, data = [], []
    for path in args.texts:
        if path.suffix == ".npy":
            tokens = np.load(path).astype(np.int32)
        else:
            tokens = np.array(tokenizer(path.read_text()).input_ids, np.int32)
        means = accepted(tokens)
        data.append({"text": path.name, "tokens": len(tokens), **means})
        for rule, by in means.items():
            rows.append(
                [path.name, f"{len(tokens):,}", rule, *(f"{by[count]:.2f}" for count in COUNTS)]
            )
    header = ("text", "tokens", "rule", *(f"{count} chains" for count in COUNTS))
    benchmark.publish(
        args,
        ResultPage(
            name="token_reuse",
            title="Reusing tokens by frequency and by suffix",
            about="Mean number of right tokens of three, simulated over a text after its first "
            f"{SKIPPED} tokens. `frequency` is TokenSwift's rule: the most frequent three tokens "
            "after the newest token. `suffix` is the rule of the methods here: continuations of "
            "the longest suffix of up to 4 tokens, the latest first; it looks at the latest four "
            "places of each suffix.",
            sections=[Section(header, rows)],
            data=data,
            made_by=[benchmark.provenance(args)],
        ),
    )


if __name__ == "__main__":
    main()
