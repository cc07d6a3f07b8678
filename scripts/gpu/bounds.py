# SPDX-License-Identifier: Apache-2.0
"""What attention and a step of an 8B model should take on a device, from the bytes they must read
and the products they must make.

The model is Qwen3-8B: Hq 32, Hkv 8, Dh 128, bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass

HEADS, KV_HEADS, HEAD_DIM, LAYERS = 32, 8, 128, 36
HIDDEN, INTERMEDIATE, VOCAB = 4096, 12288, 151936
# Of bfloat16.
ITEM = 2
# Query heads of a KV head, packed into rows of products, which come in 64.
GROUP, ROW_TILE = HEADS // KV_HEADS, 64


@dataclass(frozen=True)
class Device:
    """What a device was seen to reach, or is assumed to."""

    name: str
    copy: float
    """Bytes read plus bytes written a second by a large copy."""
    product: float
    """Operations a second of a large product in bfloat16."""


H200 = Device("H200", 4.3e12, 790e12)
# Nine tenths of its memory's nominal 3.35 TB/s, as H200's copy is of 4.8; the same multiprocessors.
H100 = Device("H100", 3.0e12, 790e12)

# -- attention of one layer ---------------------------------------------------------------------

# Launches, the first loads and the merge.
FIXED_US = 7.0
# Shares of a copy's and of a product's rate that attention reaches.
OF_COPY, OF_PRODUCT = 0.85, 0.6
CONTEXTS = (1024, 4096, 8192, 16384, 32768)
NODES = (15, 31, 63, 64, 127, 255)


def packed_rows(nodes: int) -> int:
    """Rows of products of a tree and its root in one KV head."""
    return GROUP * (nodes + 1)


def attention_us(context: int, nodes: int, device: Device, batch: int = 1) -> float:
    """Microseconds of one layer for `batch` trees: its columns, the context and its own, are read
    once and multiplied with rows in tiles of 64."""
    columns = batch * (context + nodes + 1)
    read = columns * 2 * KV_HEADS * HEAD_DIM * ITEM
    rows = -(-packed_rows(nodes) // ROW_TILE) * ROW_TILE
    # Two products, a multiplication and an addition each.
    operations = columns * rows * HEAD_DIM * 4 * KV_HEADS
    seconds = max(read / (OF_COPY * device.copy), operations / (OF_PRODUCT * device.product))
    return FIXED_US + 1e6 * seconds


# -- the two schemes of the Hopper kernel -------------------------------------------------------

# Cycles of a warpgroup for one of the two products of a tile of Dh 128, and for the rest.
PRODUCT, REST = 256, 320
# Of blocks of one to three warpgroups in turns: alone; two, whose softmaxes hide behind each
# other's products but for one; three, whose products fill the tensor cores.
TURNS = {1: 2 * PRODUCT + REST, 2: 3 * PRODUCT + REST, 3: 6 * PRODUCT}
# Specialised, of blocks of one and two: a product is under way during each softmax.
SPECIALISED = {1: PRODUCT + REST, 2: 4 * PRODUCT}


def _blocks(nodes: int, warpgroups: int) -> list[int]:
    """Rows of a tree's blocks of up to `warpgroups` times 64 rows."""
    rows, size = packed_rows(nodes), warpgroups * ROW_TILE
    return [size] * (rows // size) + [rows % size] * bool(rows % size)


@dataclass(frozen=True)
class SchemeCycles:
    """Cycles of a multiprocessor for a tile and all blocks of a tree."""

    turns_blocks: list[int]
    turns: int
    specialised_blocks: list[int]
    specialised: int

    @property
    def ratio(self) -> float:
        return self.specialised / self.turns


def scheme_cycles(nodes: int) -> SchemeCycles:
    """Counted from the variants in turns alone."""
    turns, specialised = _blocks(nodes, 3), _blocks(nodes, 2)
    return SchemeCycles(
        turns, sum(TURNS[-(-rows // ROW_TILE)] for rows in turns),
        specialised, sum(SPECIALISED[-(-rows // ROW_TILE)] for rows in specialised),
    )  # fmt: skip


# -- a whole step -------------------------------------------------------------------------------

# Share of a copy's rate at which weights are read.
WEIGHTS_OF_COPY = 0.9
# Target layers whose states a head reads, layers of the head, drafted tokens of a pass.
EAGLE3_STATES, EAGLE3_VOCAB, CHAIN = 3, 32_000, 3
BLOCK_STATES, BLOCK_LAYERS, BLOCK_ROWS = 5, 5, 16


def layer_weights(inputs: int = HIDDEN) -> int:
    """Numbers of a layer whose attention reads `inputs` numbers a token."""
    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    return inputs * (queries + 2 * keys) + queries * HIDDEN + 3 * HIDDEN * INTERMEDIATE


# Without the embedding, of which a step reads a few rows.
TARGET_WEIGHTS = LAYERS * layer_weights() + HIDDEN * VOCAB
# A pass over one row for each token of the chain, with its own head of the vocabulary.
CHAIN_WEIGHTS = EAGLE3_STATES * HIDDEN * HIDDEN + CHAIN * (
    layer_weights(2 * HIDDEN) + HIDDEN * EAGLE3_VOCAB
)
# One pass over a block, with the target's head.
BLOCK_WEIGHTS = BLOCK_STATES * HIDDEN * HIDDEN + BLOCK_LAYERS * layer_weights() + HIDDEN * VOCAB
# Of a step, by what drafts.
DRAFT_WEIGHTS = {"plain": 0, "chain": CHAIN_WEIGHTS, "tree": BLOCK_WEIGHTS}


def step_ms(kind: str, nodes: int, context: int, device: Device, batch: int = 1) -> float:
    """Milliseconds of a step that verifies `nodes` nodes and drafts the next: weights are read
    once, or multiplied with every row where that takes longer. Nothing for the host: launches are
    to be made while the device works.

    Args:
        kind: "plain" (0 nodes), "chain" (vLLM's own of EAGLE-3) or "tree" (a block head).
    """
    rows = batch * (nodes + 1)
    read = ITEM * TARGET_WEIGHTS / (WEIGHTS_OF_COPY * device.copy)
    multiplied = 2 * rows * TARGET_WEIGHTS / (OF_PRODUCT * device.product)
    drafted = ITEM * DRAFT_WEIGHTS[kind] / (WEIGHTS_OF_COPY * device.copy)
    attention = LAYERS * attention_us(context, nodes, device, batch)
    return 1e3 * (max(read, multiplied) + drafted) + 1e-3 * attention
