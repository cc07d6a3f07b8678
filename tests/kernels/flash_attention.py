# SPDX-License-Identifier: Apache-2.0
"""FlashAttention as a function of torch that keeps its contract: layouts, log-sum-exp [Hq, T], and
what it leaves in rows without keys, which differs between its versions."""

from __future__ import annotations

from typing import Any

import torch

# Output and log-sum-exp of rows without keys.
EMPTY = {"FA2": (0.0, float("inf")), "FA3": (float("nan"), float("-inf"))}


class Attention:
    """`flash_attn_varlen_func` over pages, counted."""

    def __init__(self, empty: str = "FA2") -> None:
        self.empty = EMPTY[empty]
        self.calls = 0
        self.splits: set[int] = set()

    def __call__(
        self, *, q: Any, k: Any, v: Any, max_seqlen_q: int, cu_seqlens_q: Any, seqused_k: Any,
        max_seqlen_k: int, softmax_scale: float, causal: bool, block_table: Any,
        return_softmax_lse: bool, softcap: float = 0.0, num_splits: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        assert return_softmax_lse and not causal
        assert cu_seqlens_q.dtype == seqused_k.dtype == block_table.dtype == torch.int32
        assert len(seqused_k) == len(block_table) == len(cu_seqlens_q) - 1
        assert seqused_k.is_contiguous() and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        self.calls += 1
        self.splits.add(num_splits)
        out = torch.full(q.shape, self.empty[0], dtype=q.dtype)
        lse = torch.full((q.shape[1], q.shape[0]), self.empty[1])
        group, page = q.shape[1] // k.shape[2], k.shape[1]
        for r, used in enumerate(seqused_k.tolist()):
            start, end = cu_seqlens_q[r : r + 2].tolist()
            assert end - start <= max_seqlen_q
            if not used or start == end:
                continue
            assert used <= max_seqlen_k
            pages = block_table[r, : -(-used // page)].long()
            keys, values = (c[pages].flatten(0, 1)[:used] for c in (k, v))
            keys, values = (x.repeat_interleave(group, 1).float() for x in (keys, values))
            scores = torch.einsum("qhd,khd->hqk", q[start:end].float(), keys) * softmax_scale
            if softcap:
                scores = softcap * (scores / softcap).tanh()
            lse[:, start:end] = scores.logsumexp(-1)
            out[start:end] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(q.dtype)
        return out, lse
