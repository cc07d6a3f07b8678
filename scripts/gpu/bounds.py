# SPDX-License-Identifier: Apache-2.0
"""Roofline estimates of attention and of a step of Qwen3-8B in bfloat16: bytes read and FLOPs."""

from __future__ import annotations

from dataclasses import dataclass

HEADS, KV_HEADS, HEAD_DIM, LAYERS = 32, 8, 128, 36
HIDDEN, INTERMEDIATE, VOCAB = 4096, 12288, 151936
# Of bfloat16.
ITEM = 2
# Query heads of a KV head, which are packed into rows, and rows of a tile.
GROUP, ROW_TILE = HEADS // KV_HEADS, 64


@dataclass(frozen=True)
class Device:
    """Measured or assumed rates of a device."""

    name: str
    copy: float
    """Bytes read plus bytes written per second by a large copy."""
    product: float
    """Operations per second of a large product in bfloat16."""


H200 = Device("H200", 4.3e12, 790e12)
# Nine tenths of the nominal 3.35 TB/s, as for the H200, which has the same multiprocessors.
H100 = Device("H100", 3.0e12, 790e12)

# -- attention of one layer ---------------------------------------------------------------------

# Time of launches, first loads and merge.
FIXED_US = 7.0
# Shares of the rates of copies and products that attention reaches.
OF_COPY, OF_PRODUCT = 0.85, 0.6
CONTEXTS = (1024, 4096, 8192, 16384, 32768)
NODES = (15, 31, 63, 64, 127, 255)


def packed_rows(nodes: int) -> int:
    """Returns the rows of a tree with its root in one KV head."""
    return GROUP * (nodes + 1)


def attention_us(context: int, nodes: int, device: Device, batch: int = 1) -> float:
    """Returns microseconds of one layer for `batch` trees. Context and tree columns are read once,
    and multiplied with rows in tiles of 64."""
    columns = batch * (context + nodes + 1)
    read = columns * 2 * KV_HEADS * HEAD_DIM * ITEM
    rows = -(-packed_rows(nodes) // ROW_TILE) * ROW_TILE
    # Two products of multiplications and additions.
    operations = columns * rows * HEAD_DIM * 4 * KV_HEADS
    seconds = max(read / (OF_COPY * device.copy), operations / (OF_PRODUCT * device.product))
    return FIXED_US + 1e6 * seconds


# -- a whole step -------------------------------------------------------------------------------

# Share of a copy's rate at which weights are read.
WEIGHTS_OF_COPY = 0.9
# Target layers whose states a head reads, its draft vocabulary, and drafted tokens per pass.
EAGLE3_STATES, EAGLE3_VOCAB, CHAIN = 3, 32_000, 3
BLOCK_STATES, BLOCK_LAYERS, BLOCK_ROWS = 5, 5, 16


def layer_weights(inputs: int = HIDDEN) -> int:
    """Returns the number of weights of a layer whose attention has `inputs` inputs per token."""
    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    return inputs * (queries + 2 * keys) + queries * HIDDEN + 3 * HIDDEN * INTERMEDIATE


# Without the embedding, because a step reads only a few of its rows.
TARGET_WEIGHTS = LAYERS * layer_weights() + HIDDEN * VOCAB
# One pass per token of the chain, with the head's own vocabulary.
CHAIN_WEIGHTS = EAGLE3_STATES * HIDDEN * HIDDEN + CHAIN * (
    layer_weights(2 * HIDDEN) + HIDDEN * EAGLE3_VOCAB
)
# One pass over a block, with the target's LM head.
BLOCK_WEIGHTS = BLOCK_STATES * HIDDEN * HIDDEN + BLOCK_LAYERS * layer_weights() + HIDDEN * VOCAB
# Weights that the draft of a step reads.
DRAFT_WEIGHTS = {"plain": 0, "chain": CHAIN_WEIGHTS, "tree": BLOCK_WEIGHTS}


def step_ms(kind: str, nodes: int, context: int, device: Device, batch: int = 1) -> float:
    """Returns milliseconds of a step that verifies `nodes` nodes and drafts the next tree.

    Weights are read once, or multiplied with every row if that takes longer. The host takes no
    time, because it launches while the device works.

    Args:
        kind: "plain" (0 nodes), "chain" (vLLM's own EAGLE-3) or "tree" (a block head).
    """
    rows = batch * (nodes + 1)
    read = ITEM * TARGET_WEIGHTS / (WEIGHTS_OF_COPY * device.copy)
    multiplied = 2 * rows * TARGET_WEIGHTS / (OF_PRODUCT * device.product)
    drafted = ITEM * DRAFT_WEIGHTS[kind] / (WEIGHTS_OF_COPY * device.copy)
    attention = LAYERS * attention_us(context, nodes, device, batch)
    return 1e3 * (max(read, multiplied) + drafted) + 1e-3 * attention
