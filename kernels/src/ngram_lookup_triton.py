# SPDX-License-Identifier: Apache-2.0
"""N-gram lookup on the device: continuations of earlier occurrences of a request's last tokens.

The branches are exactly those of `ngram_index`. No state is kept between steps. Each step reads a
request's tokens once, 4 bytes per token, in parallel pieces, and around each match of the last
token the tokens before it. So the length of the history bounds the work. An index that grows with
the tokens would read less, but need 4 times the memory of the tokens.

Letters: S request slots, B requests, C branches at most, L tokens of a branch at most.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .ngram_index import MAX_OCCURRENCES
from .step_kernel import step_kernel

PIECE = 2048
"""Tokens that a program scans."""

_OCCURRENCES = tl.constexpr(MAX_OCCURRENCES)


@step_kernel
def _scan_kernel(
    # [S, stride] int32
    tokens,
    stride,
    # [B] int64
    slots,
    # [B] int32
    lengths,
    # [B, num_pieces, LEVELS, _OCCURRENCES] int32
    ends,
    num_pieces,
    LEVELS: tl.constexpr,
    PIECE_SIZE: tl.constexpr,
):
    """Finds the ends of the latest occurrences of each suffix within one piece; 0: none."""
    request = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    length = tl.load(lengths + request)
    # `_branches_kernel` skips the pieces that are not scanned here.
    if piece * PIECE_SIZE < length:
        row = tokens + tl.load(slots + request) * stride
        out = ends + (request * num_pieces + piece) * (LEVELS * _OCCURRENCES)
        end = piece * PIECE_SIZE + tl.arange(0, PIECE_SIZE)
        # The suffix itself ends at `length`, so that is not an earlier occurrence.
        matches = end < length
        for size in tl.static_range(1, LEVELS + 1):
            last = tl.load(row + length - size, mask=length >= size, other=-1)
            inside = matches & (end >= size)
            found = tl.load(row + end - size, mask=inside, other=-2)
            matches = inside & (found == last)
            match_ends = tl.where(matches, end, 0)
            for rank in tl.static_range(_OCCURRENCES):
                latest = tl.max(match_ends, 0)
                tl.store(out + (size - 1) * _OCCURRENCES + rank, latest)
                match_ends = tl.where(match_ends == latest, 0, match_ends)


@step_kernel
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
    """Collects `count` distinct continuations: longer suffixes first, then later positions."""
    request = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + request)
    row = tokens + tl.load(slots + request) * stride
    candidate = tl.arange(0, CANDIDATES)
    start = tl.zeros([CANDIDATES], tl.int32)
    index = tl.arange(0, ENDS)
    piece = index // _OCCURRENCES
    is_scanned = (piece < num_pieces) & (piece * PIECE_SIZE < length)
    own = ends + request * num_pieces * (LEVELS * _OCCURRENCES)
    for level in tl.static_range(LEVELS):
        at = (piece * LEVELS + (LEVELS - 1 - level)) * _OCCURRENCES + index % _OCCURRENCES
        match_ends = tl.load(own + at, mask=is_scanned, other=0)
        for rank in tl.static_range(_OCCURRENCES):
            latest = tl.max(match_ends, 0)
            start = tl.where(candidate == level * _OCCURRENCES + rank, latest, start)
            match_ends = tl.where(match_ends == latest, 0, match_ends)

    step = tl.arange(0, LENGTH)
    wanted = tl.minimum(tl.load(depths + request), longest)
    exists = (start > 0) & (wanted > 0)
    # A continuation that reaches the end of the text repeats itself.
    period = tl.maximum(length - start, 1)
    inside = exists[:, None] & (step < wanted)[None, :]
    at = start[:, None] + step[None, :] % period[:, None]
    found = tl.load(row + at, mask=inside, other=-1)
    repeats = tl.zeros([CANDIDATES], tl.int32)
    for earlier in range(LEVELS * _OCCURRENCES):
        is_earlier = candidate == earlier
        other = tl.sum(tl.where(is_earlier[:, None], found, 0), 0)
        equal = tl.min((found == other[None, :]).to(tl.int32), 1)
        repeats = tl.where(candidate > earlier, repeats | equal, repeats)
    kept = exists & (repeats == 0)
    rank = tl.cumsum(kept.to(tl.int32), 0) - 1
    kept = kept & (rank < count)
    tl.store(sizes + request * count + rank, LEVELS - candidate // _OCCURRENCES, mask=kept)
    unused = (candidate >= tl.sum(kept.to(tl.int32), 0)) & (candidate < count)
    tl.store(sizes + request * count + candidate, 0, mask=unused)
    out = branches + (request * count + rank[:, None]) * longest + step[None, :]
    tl.store(out, found, mask=kept[:, None] & (step < longest)[None, :])


class NgramLookup:
    """N-gram lookup for the requests of one engine.

    Args:
        longest: longest suffix that is looked up.
        count: C.
        length: L.
        max_tokens: most tokens of a request.
    """

    def __init__(self, longest: int, count: int, length: int, max_tokens: int) -> None:
        self.longest, self.count, self.length = longest, count, length
        # Block sizes are fixed per engine, because each size is a compilation.
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
        # [B] int32 number of tokens of each request, 0: no lookup
        lengths: torch.Tensor,
        # [B] int32
        depths: torch.Tensor,
        most: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns candidate continuations of each request. No host synchronisation.

        Args:
            most: an upper bound of the lengths.

        Returns:
            Matched suffix lengths int32 [B, C], 0 for unused entries, and the branches' tokens
            int32 [B, C, L], -1 beyond a request's depth.
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
