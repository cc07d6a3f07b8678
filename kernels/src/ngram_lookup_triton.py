# SPDX-License-Identifier: Apache-2.0
"""What followed a request's last few tokens earlier in it, found on the device: the branches of
`ngram_index`, place for place.

Nothing is kept from step to step. Each step reads a request's tokens once, 4 bytes per token, in
pieces that run side by side, and of what matches the last token the tokens before it. So the work
is bounded by the history's length, whatever the text; an index that grows with the tokens would
read less and need 4 times the memory of the tokens themselves.

Letters: S request slots, B requests, C branches at most, L tokens of a branch at most.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .ngram_index import MAX_OCCURRENCES

PIECE = 2048
"""Tokens that one program looks through."""

_PLACES = tl.constexpr(MAX_OCCURRENCES)


@triton.jit(
    do_not_specialize=["stride", "num_pieces"],
    do_not_specialize_on_alignment=["slots", "lengths"],
)
def _scan_kernel(
    # [S, stride] int32
    tokens,
    stride,
    # [B] int64
    slots,
    # [B] int32
    lengths,
    # [B, num_pieces, LEVELS, _PLACES] int32
    ends,
    num_pieces,
    LEVELS: tl.constexpr,
    PIECE_SIZE: tl.constexpr,
):
    """Ends of the latest occurrences of each suffix within one piece of the tokens, 0 for none."""
    request = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    length = tl.load(lengths + request)
    # Whoever reads the ends passes over pieces that nobody looked through.
    if piece * PIECE_SIZE < length:
        row = tokens + tl.load(slots + request) * stride
        out = ends + (request * num_pieces + piece) * (LEVELS * _PLACES)
        end = piece * PIECE_SIZE + tl.arange(0, PIECE_SIZE)
        # The suffix itself ends at `length`, and is no earlier occurrence.
        matches = end < length
        for size in tl.static_range(1, LEVELS + 1):
            last = tl.load(row + length - size, mask=length >= size, other=-1)
            inside = matches & (end >= size)
            found = tl.load(row + end - size, mask=inside, other=-2)
            matches = inside & (found == last)
            places = tl.where(matches, end, 0)
            for place in tl.static_range(_PLACES):
                latest = tl.max(places, 0)
                tl.store(out + (size - 1) * _PLACES + place, latest)
                places = tl.where(places == latest, 0, places)


@triton.jit(
    do_not_specialize=["stride", "num_pieces", "count", "longest"],
    do_not_specialize_on_alignment=["slots", "lengths", "depths"],
)
def _branches_kernel(
    tokens,
    stride,
    slots,
    lengths,
    # [B] int32
    depths,
    ends,
    num_pieces,
    # [B, C] int32
    sizes,
    # [B, C, L] int32
    branches,
    count,
    longest,
    LEVELS: tl.constexpr,
    PIECE_SIZE: tl.constexpr,
    ENDS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    LENGTH: tl.constexpr,
):
    """The first `count` different continuations: longer suffixes first, then later places."""
    request = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + request)
    row = tokens + tl.load(slots + request) * stride
    candidate = tl.arange(0, CANDIDATES)
    start = tl.zeros([CANDIDATES], tl.int32)
    index = tl.arange(0, ENDS)
    piece = index // _PLACES
    is_scanned = (piece < num_pieces) & (piece * PIECE_SIZE < length)
    own = ends + request * num_pieces * (LEVELS * _PLACES)
    for level in tl.static_range(LEVELS):
        at = (piece * LEVELS + (LEVELS - 1 - level)) * _PLACES + index % _PLACES
        places = tl.load(own + at, mask=is_scanned, other=0)
        for place in tl.static_range(_PLACES):
            latest = tl.max(places, 0)
            start = tl.where(candidate == level * _PLACES + place, latest, start)
            places = tl.where(places == latest, 0, places)

    step = tl.arange(0, LENGTH)
    wanted = tl.minimum(tl.load(depths + request), longest)
    exists = (start > 0) & (wanted > 0)
    # Past the end of the text a continuation goes on with itself.
    period = tl.maximum(length - start, 1)
    inside = exists[:, None] & (step < wanted)[None, :]
    at = start[:, None] + step[None, :] % period[:, None]
    found = tl.load(row + at, mask=inside, other=-1)
    repeats = tl.zeros([CANDIDATES], tl.int32)
    for earlier in range(LEVELS * _PLACES):
        is_earlier = candidate == earlier
        other = tl.sum(tl.where(is_earlier[:, None], found, 0), 0)
        equal = tl.min((found == other[None, :]).to(tl.int32), 1)
        repeats = tl.where(candidate > earlier, repeats | equal, repeats)
    kept = exists & (repeats == 0)
    rank = tl.cumsum(kept.to(tl.int32), 0) - 1
    kept = kept & (rank < count)
    tl.store(sizes + request * count + rank, LEVELS - candidate // _PLACES, mask=kept)
    unused = (candidate >= tl.sum(kept.to(tl.int32), 0)) & (candidate < count)
    tl.store(sizes + request * count + candidate, 0, mask=unused)
    out = branches + (request * count + rank[:, None]) * longest + step[None, :]
    tl.store(out, found, mask=kept[:, None] & (step < longest)[None, :])


class NgramLookup:
    """Lookups for the requests of one engine.

    Args:
        longest: longest suffix that is looked up.
        count: C.
        length: L.
        max_tokens: most tokens of a request.
    """

    def __init__(self, longest: int, count: int, length: int, max_tokens: int) -> None:
        self.longest, self.count, self.length = longest, count, length
        # Sizes of blocks are the engine's and not the step's: each is a compilation.
        pieces = triton.cdiv(max_tokens + 1, PIECE)
        self._blocks = {
            "ENDS": triton.next_power_of_2(pieces * MAX_OCCURRENCES),
            "CANDIDATES": triton.next_power_of_2(max(count, longest * MAX_OCCURRENCES)),
            "LENGTH": triton.next_power_of_2(length),
        }
        # Reductions stay within a warp where its registers hold the candidates.
        tokens = self._blocks["CANDIDATES"] * self._blocks["LENGTH"]
        self._warps = min(8, max(1, tokens // 1024))

    def __call__(
        self,
        # [S, most tokens] int32
        tokens: torch.Tensor,
        # [B] int64
        slots: torch.Tensor,
        # [B] int32 tokens of each request, 0 where nothing is looked up
        lengths: torch.Tensor,
        # [B] int32
        depths: torch.Tensor,
        most: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What may follow each request's tokens, in two launches; no host synchronisation.

        Args:
            most: an upper bound of the lengths.

        Returns:
            Matched suffix lengths int32 [B, C], 0 where there are fewer branches, and their tokens
            int32 [B, C, L], -1 past a request's depth.
        """
        num_reqs, stride = len(slots), tokens.stride(0)
        device = tokens.device
        pieces = triton.cdiv(most, PIECE)
        shape = (num_reqs, pieces, self.longest, MAX_OCCURRENCES)
        ends = torch.empty(shape, dtype=torch.int32, device=device)
        sizes = torch.empty((num_reqs, self.count), dtype=torch.int32, device=device)
        branches = torch.empty(
            (num_reqs, self.count, self.length), dtype=torch.int32, device=device
        )
        given = {"LEVELS": self.longest, "PIECE_SIZE": PIECE}
        _scan_kernel[(num_reqs, pieces)](
            tokens, stride, slots, lengths, ends, pieces, **given, num_warps=4
        )
        _branches_kernel[(num_reqs,)](
            tokens, stride, slots, lengths, depths, ends, pieces, sizes, branches, self.count,
            self.length, **given, **self._blocks, num_warps=self._warps,
        )  # fmt: skip
        return sizes, branches
