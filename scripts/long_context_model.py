# SPDX-License-Identifier: Apache-2.0
"""A model of the cost of drafting over long contexts, from bytes and products.

    python scripts/long_context_model.py [--write] [--copy 2.43e12] [--product 700e12]

It assumes Qwen3-8B in bfloat16 on a device with the given rates (those of an H100 in
bench/results/gpu_h100.md, where the model predicts plain steps within 3 %). A step takes
`bounds.step_ms`, and the time in which its draft reads weights and context. --write writes
docs/long_contexts.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "scripts" / "gpu")]

from bounds import (  # noqa: E402
    BLOCK_LAYERS,
    BLOCK_ROWS,
    BLOCK_WEIGHTS,
    EAGLE3_VOCAB,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    ITEM,
    KV_HEADS,
    LAYERS,
    TARGET_WEIGHTS,
    VOCAB,
    WEIGHTS_OF_COPY,
    Device,
    attention_us,
    layer_weights,
    step_ms,
)

from vllm_specplug.bench.tables import markdown_table  # noqa: E402

PAGE = ROOT / "docs" / "long_contexts.md"
# Rates in bench/results/gpu_h100.md.
H100 = Device("H100", 2.43e12, 700e12)
CONTEXTS = (1024, 4096, 16_384, 32_768, 131_072)
BATCHES = (1, 8)
NODES = 31
# Levels of a tree that is drafted level by level, rows of one, and TokenSwift's heads.
LEVELS, LEVEL_ROWS, TOKENSWIFT_HEADS = 5, 8, 3
# Tokens of LongSpec's window and of TokenSwift's partial cache.
WINDOW, PARTIAL = 512, 1024
TOKEN_BYTES = 2 * KV_HEADS * HEAD_DIM * ITEM


@dataclass(frozen=True)
class Draft:
    """The draft of a step.

    Args:
        weights: number of weights that it reads.
        attention_us: time of attention, by context and number of requests.
        cache: bytes of a request's draft cache, by context.
    """

    weights: int
    attention_us: Callable[[int, int, Device], float]
    cache: Callable[[int], int]

    def ms(self, context: int, batch: int, device: Device) -> float:
        read = ITEM * self.weights / (WEIGHTS_OF_COPY * device.copy)
        return 1e3 * read + 1e-3 * self.attention_us(context, batch, device)


def _over_context(layers: int, rows: int) -> Callable[[int, int, Device], float]:
    """Returns the time of layers that attend the context with `rows` rows per request."""
    return lambda context, batch, device: layers * attention_us(context, rows - 1, device, batch)


# LongSpec's layer attends its window, and the target's last layer with its own queries.
_LONGSPEC_LAYER = layer_weights() + 2 * HIDDEN * HEADS * HEAD_DIM
DRAFTS = {
    "jetspec": Draft(
        BLOCK_WEIGHTS, _over_context(BLOCK_LAYERS, BLOCK_ROWS),
        lambda context: BLOCK_LAYERS * TOKEN_BYTES * context,
    ),
    "eagle3_tree": Draft(
        LEVELS * (layer_weights(2 * HIDDEN) + HIDDEN * EAGLE3_VOCAB),
        _over_context(LEVELS, LEVEL_ROWS),
        lambda context: TOKEN_BYTES * context,
    ),
    "longspec": Draft(
        LEVELS * (_LONGSPEC_LAYER + HIDDEN * VOCAB),
        lambda context, batch, device: LEVELS * (
            attention_us(context, LEVEL_ROWS - 1, device, batch)
            + attention_us(min(context, WINDOW), LEVEL_ROWS - 1, device, batch)
        ),
        lambda context: TOKEN_BYTES * min(context, WINDOW),
    ),
    # One forward pass of the target over one token per request; the heads read its result. The LM
    # head scores all depths in one product.
    "tokenswift, self": Draft(
        TARGET_WEIGHTS + TOKENSWIFT_HEADS * HIDDEN * HIDDEN,
        lambda context, batch, device: LAYERS * attention_us(
            min(context, PARTIAL), 0, device, batch
        ),
        lambda context: LAYERS * TOKEN_BYTES * min(context, PARTIAL),
    ),
    "tokenswift, heads": Draft(
        TOKENSWIFT_HEADS * HIDDEN * HIDDEN + HIDDEN * VOCAB, lambda *_: 0.0, lambda context: 0,
    ),
    "n-grams": Draft(0, lambda *_: 0.0, lambda context: 0),
}  # fmt: skip


def in_plain_steps(name: str, context: int, batch: int, device: Device) -> float:
    """Returns the time of a step that verifies and drafts, in plain steps. Drafting pays if a step
    yields more tokens than this."""
    verified = step_ms("plain", NODES, context, device, batch)
    plain = step_ms("plain", 0, context, device, batch)
    return (verified + DRAFTS[name].ms(context, batch, device)) / plain


def page(device: Device) -> str:
    def rows(batch: int) -> list[Sequence[str]]:
        steps = [
            [name, *(f"{in_plain_steps(name, c, batch, device):.2f}" for c in CONTEXTS)]
            for name in DRAFTS
        ]
        plain = [f"{step_ms('plain', 0, c, device, batch):.1f}" for c in CONTEXTS]
        return [["a plain step, ms", *plain], *steps]

    titles = [f"{context:,} tokens" for context in CONTEXTS]
    sections = [
        "# Drafts over long contexts: a model",
        "This page compares the cost of drafting over long contexts. Nothing here was measured: "
        "the model counts the\nbytes that a step reads and the products that it computes.",
        "- Target: a Qwen3-8B in bfloat16 on a device that copies "
        f"{device.copy / 1e12:.2f} TB/s and computes {device.product / 1e12:.0f} TFLOP/s.\n"
        "  The defaults are the rates of [an H100](../bench/results/gpu_h100.md). There the model "
        "predicts plain steps\n  within 3 %.\n"
        f"- Step: it verifies {NODES} nodes and drafts the next tree.\n"
        "- Number: the time of such a step divided by that of a plain step. Drafting pays if a "
        "step yields more tokens than\n  this.\n"
        f"- Drafts by levels (`eagle3_tree`, `longspec`): {LEVELS} levels of {LEVEL_ROWS} rows.\n"
        f"- The window of `longspec` is {WINDOW} tokens, the partial cache of `tokenswift` "
        f"{PARTIAL} tokens.",
    ]
    for batch in BATCHES:
        many = "one request" if batch == 1 else f"{batch} requests"
        sections += [f"## With {many}", markdown_table(["draft", *titles], rows(batch))]
    memory = [
        [name, *(f"{draft.cache(c) / 2**20:.0f}" for c in CONTEXTS)]
        for name, draft in DRAFTS.items()
    ]
    sections += [
        "## Memory of a draft, MiB per request",
        markdown_table(["draft", *titles], memory),
        "Made by `python scripts/long_context_model.py --write`.\n",
    ]
    return "\n\n".join(sections)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--copy", type=float, default=H100.copy, help="bytes a second, both ways")
    parser.add_argument("--product", type=float, default=H100.product, help="operations a second")
    parser.add_argument("--write", action="store_true", help="to the docs, else to the terminal")
    args = parser.parse_args()
    text = page(Device("H100", args.copy, args.product))
    if args.write:
        PAGE.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
