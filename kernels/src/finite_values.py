# SPDX-License-Identifier: Apache-2.0
"""Keys and values as they may be stored: what is not finite only reaches rows that attend it.

A column that a row does not attend has weight 0, and 0 x NaN is NaN. Attention kernels, vLLM's
among them, multiply such columns: of siblings in a tree, of later rows of a chain, and of slots
that a rejected draft has left behind in a block. Keys do no such harm, as kernels put -inf in the
place of a score. So a value that is not finite is stored as 0 and its head's key as NaN: a row that
attends it is NaN as before, and no other row sees it.

The alternative, to check values where they are multiplied, needs a check per tile in every kernel,
and vLLM's kernels would still read what rejected drafts leave behind.

Letters: T rows, Hk and Hv heads of keys and values (equal, or one of both), Dk and Dv their sizes.
"""

from __future__ import annotations

import torch

from .extension import has_cpu_extension

_COMPILED = (torch.float32, torch.bfloat16, torch.float16)


def isolate_nonfinite(
    # [T, Hk, Dk]
    key: torch.Tensor,
    # [T, Hv, Dv]
    value: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`key` and `value` themselves where all values are finite, otherwise copies to be stored."""
    if _all_finite(value):
        return key, value
    finite = value.isfinite()
    key = key.masked_fill(~finite.all(-1, keepdim=True), float("nan"))
    return key, value.masked_fill(~finite, 0.0)


def make_finite(*drafted: torch.Tensor) -> None:
    """Writes 0 in the place of what is not finite of keys and values that a draft head computed,
    before they are stored. No host synchronisation, graph safe.

    Where a target has several KV cache groups a page of drafts becomes one of the target's, whose
    heads may have another size: there keys lie where values do, so that no NaN may stand in them
    either. Drafts from zeros are as good as any.
    """
    for tensor in drafted:
        tensor.nan_to_num_(0.0, 0.0, 0.0)


def _all_finite(value: torch.Tensor) -> bool:
    compiled = (
        has_cpu_extension()
        and value.device.type == "cpu"
        and value.dtype in _COMPILED
        and value.stride(2) == 1
        and value.stride(1) == value.shape[2]
    )
    if compiled:
        return torch.ops.specplug.all_finite.default(value)
    return bool(value.isfinite().all())
