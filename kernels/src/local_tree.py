# SPDX-License-Identifier: Apache-2.0
"""Trees over the product of a block head and a local head on the CPU: packing and entry points.

Letters: R requests, D depths, M candidates, V' draft vocabulary, S state, r rank, I input width.
The readable version is `methods/local/tree.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .cuda_contract import MOST_CANDIDATES
from .extension import has_cpu_extension
from .tree_tensors import Trees, empty_trees

_COMPILED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_GROUP, _PANEL, _WORDS = 32, 16, 16


def _padded(tensor: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Returns [N, K] padded with zeros to multiples of `rows` and `columns`."""
    return F.pad(tensor, (0, -tensor.shape[1] % columns, 0, -tensor.shape[0] % rows))


def pack_rows(weight: torch.Tensor, bf16_dot: bool) -> torch.Tensor:
    """Returns [N, K] as int32 [N/32, 2, words, 16] for the products of the CPU variants.

    A word is a float, or a pair of bf16 if the variant multiplies those (`bf16_dot`). N is padded
    to a multiple of 32 and the words to one of 16, with zeros.
    """
    pair = 2 if bf16_dot else 1
    weight = weight.to(torch.bfloat16 if bf16_dot else torch.float32)
    weight = _padded(weight, _GROUP, _WORDS * pair)
    words = weight.contiguous().view(torch.int32)
    return words.unflatten(0, (-1, 2, _PANEL)).transpose(2, 3).contiguous()


@dataclass(frozen=True)
class LocalTreeWeights:
    """A local head in the layout of the kernel; its tables have one dtype of 16 or 32 bits."""

    # [V', r]
    output_table: torch.Tensor
    kind: str
    """A `LocalHeadKind`."""
    rank: int
    """Padded to 32."""
    state_size: int = 0
    """Padded to 32; 0 for a head without state."""
    silu: bool = False
    # [V', 3 S] input gates, or [V', r] rows of a head without a state
    inputs: torch.Tensor | None = None
    # [n, I] inputs of the state, and the row of each draft id [V']; if `inputs` is None
    features: torch.Tensor | None = None
    feature_rows: torch.Tensor | None = None
    # packed; the last makes rank vectors of states, or gates of a gated head's rows
    w_input: torch.Tensor | None = None
    w_state: torch.Tensor | None = None
    w_rank: torch.Tensor | None = None


def _pad_gates(weight: torch.Tensor) -> torch.Tensor:
    """Returns [3 * S, K] with each of the three gates padded to a multiple of 32 rows."""
    return torch.cat([_padded(gate, _GROUP, 1) for gate in weight.chunk(3)])


def recurrent_weights(
    # "gru" or "rnn"
    kind: str,
    # [V', r]
    output_table: torch.Tensor,
    # [3 S, I], [3 S, S], and [r, S], or None for an RNN (then r = S)
    w_ih: torch.Tensor,
    w_hh: torch.Tensor,
    rank_proj: torch.Tensor | None,
    *,
    silu: bool,
    # [n, I], and the row of each draft id [V'] int64
    features: torch.Tensor,
    feature_rows: torch.Tensor,
    gate_table_bytes: int,
) -> LocalTreeWeights:
    """Returns the weights of a head with a state. Input gates of a GRU are computed once for every
    draft id if they fit."""
    dtype = output_table.dtype
    bf16_dot = _bf16_dot(dtype)
    w_ih = _pad_gates(w_ih.to(dtype))
    state_size = w_ih.shape[0] // 3
    inputs = None
    size = len(feature_rows) * w_ih.shape[0] * output_table.element_size()
    if rank_proj is not None and size <= gate_table_bytes:
        inputs = (features[feature_rows].to(dtype) @ w_ih.T).contiguous()
    w_hh = _pad_gates(w_hh.to(dtype))
    rank, w_rank = state_size, None
    if rank_proj is not None:
        rank = -(-rank_proj.shape[0] // _GROUP) * _GROUP
        w_rank = pack_rows(_padded(rank_proj.to(dtype), 1, _GROUP), bf16_dot)
    return LocalTreeWeights(
        output_table=_padded(output_table, 1, 2).contiguous(),
        kind=kind,
        rank=rank,
        state_size=state_size,
        silu=silu,
        inputs=inputs,
        features=None if inputs is not None else _padded(features.to(dtype), 1, 2).contiguous(),
        feature_rows=None if inputs is not None else feature_rows.contiguous(),
        w_input=None if inputs is not None else pack_rows(w_ih, bf16_dot),
        w_state=pack_rows(_padded(w_hh, 1, _GROUP), bf16_dot),
        w_rank=w_rank,
    )


def markov_weights(
    # "markov" or "gated"
    kind: str,
    # [V', r] each
    output_table: torch.Tensor,
    inputs: torch.Tensor,
    # [r, r], which a gated head reads a row with
    token_proj: torch.Tensor | None,
) -> LocalTreeWeights:
    """Returns the weights of a head whose rank vectors are made of the rows of a table."""
    w_rank = None
    if token_proj is not None:
        w_rank = pack_rows(_padded(token_proj, 1, _GROUP), _bf16_dot(output_table.dtype))
    return LocalTreeWeights(
        output_table=_padded(output_table, 1, 2).contiguous(),
        kind=kind,
        rank=-(-output_table.shape[1] // _GROUP) * _GROUP,
        inputs=_padded(inputs.to(output_table.dtype), 1, 2).contiguous(),
        w_rank=w_rank,
    )


def can_build_local_trees(dtype: torch.dtype) -> bool:
    """Whether `build_local_trees` supports tables of `dtype` on the CPU."""
    return has_cpu_extension() and dtype in _COMPILED_DTYPES


def build_local_trees(
    weights: LocalTreeWeights,
    # [R, D, M] draft ids int64, best first, and log-probabilities float32
    ids: torch.Tensor,
    log_probs: torch.Tensor,
    # [R] int32
    budgets: torch.Tensor,
    depths: torch.Tensor,
    width: int,
    # [D] float32
    alpha: torch.Tensor,
    beta: torch.Tensor,
    # [V'] float32, or None if every beta is 0
    log_prior: torch.Tensor | None,
    # float32 [R, 3 S] input gates (rows [R, r] without a state) of tokens read before depth 1
    roots: torch.Tensor | None,
    # float32 [R, D, r or 3 S] terms of the slots, if the head reads them; padded like its weights
    slot_terms: torch.Tensor | None,
    # float32 logits of a confidence head: [R, D] by slot, the anchor's part included, and [V']
    slot_confidence: torch.Tensor | None = None,
    token_confidence: torch.Tensor | None = None,
    confidence_weight: float = 0.0,
) -> Trees:
    """Returns the best-first tree of each request over fused, branch-wise distributions.

    With confidences, `confidence_weight` times log sigmoid(slot_confidence[d] +
    token_confidence[y]) is subtracted from the scores of children at depth d of a node with token
    y.

    Returns:
        token_ids int64 [R, N] (draft ids), parents, depths int32 and scores float32 [R, N], and
        num_nodes int32 [R]; entries past num_nodes are undefined.

    Raises:
        RuntimeError: without the compiled kernels, or when shapes disagree.
    """
    most = max(0, int(budgets.max())) if budgets.numel() else 0
    w, trees = weights, empty_trees(ids.shape[0], most)
    torch.ops.specplug.local_trees.default(
        ids.contiguous(), log_probs.contiguous(), budgets, depths, width, alpha, beta, log_prior,
        w.output_table, w.kind, w.state_size, w.rank, w.silu, w.inputs, w.features,
        w.feature_rows, w.w_input, w.w_state, w.w_rank, roots, slot_terms, slot_confidence,
        token_confidence, confidence_weight, *trees,
    )  # fmt: skip
    return trees


def copies_no_logits(device: torch.device, count: int) -> bool:
    """Whether `top_candidates` makes no float32 copy of logits on `device`."""
    return device.type == "cuda" and count <= MOST_CANDIDATES


def top_candidates(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the `count` likeliest of each row of logits [..., V], best first; ties by lower id.

    Returns:
        Ids int64 and log-probabilities over the whole row float32, [..., min(count, V)].
    """
    count = min(count, logits.shape[-1])
    shape = (*logits.shape[:-1], count)
    if logits.device.type == "cpu" and can_build_local_trees(logits.dtype):
        flat = logits.flatten(0, -2).contiguous()
        ids = torch.empty((flat.shape[0], count), dtype=torch.int64)
        log_probs = torch.empty((flat.shape[0], count), dtype=torch.float32)
        torch.ops.specplug.top_candidates.default(flat, ids, log_probs)
        return ids.view(shape), log_probs.view(shape)
    if copies_no_logits(logits.device, count) and logits.dtype in _COMPILED_DTYPES:
        from .top_candidates_triton import top_candidates_triton

        ids, log_probs = top_candidates_triton(logits.flatten(0, -2), count)
        return ids.view(shape), log_probs.view(shape)
    logits = logits.float()
    top = logits.topk(count, dim=-1)
    return top.indices, top.values - logits.logsumexp(dim=-1, keepdim=True)


def _bf16_dot(dtype: torch.dtype) -> bool:
    """Whether the variant for `dtype` multiplies pairs of bf16."""
    if dtype != torch.bfloat16:
        return False
    return torch.ops.specplug.cpu_variant(True) in ("avx512_bf16", "amx")
