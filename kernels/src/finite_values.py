# SPDX-License-Identifier: Apache-2.0
"""Isolation of keys and values that are not finite: they may only affect rows that attend them.

A column that a row does not attend has weight 0, and 0 x NaN is NaN. Attention kernels, also
vLLM's, multiply such columns: siblings in a tree, later rows of a chain, and slots of rejected
drafts in a block. Keys are harmless, because kernels replace masked scores by -inf. So a value that
is not finite is stored as 0 and its head's key as NaN: a row that attends it is NaN as before, and
no other row is affected.

Checking values in the products would need a check per tile in every kernel, and vLLM's kernels
would still read slots of rejected drafts.

Letters: T rows, Hk and Hv heads of keys and values (equal, or one of both), Dk and Dv their sizes.
"""

from __future__ import annotations

import torch


def isolate_nonfinite(
    # [T, Hk, Dk]
    key: torch.Tensor,
    # [T, Hv, Dv]
    value: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `key` and `value` if all values are finite, otherwise copies to store."""
    # Reads the values once. A sum that overflows only leads to the exact check.
    if bool(value.sum(dtype=torch.float32).isfinite()):
        return key, value
    finite = value.isfinite()
    if bool(finite.all()):
        return key, value
    key = key.masked_fill(~finite.all(-1, keepdim=True), float("nan"))
    return key, value.masked_fill(~finite, 0.0)


def make_finite(*drafted: torch.Tensor) -> None:
    """Replaces numbers that are not finite by 0 in keys and values of a draft head, before they are
    stored. No host synchronisation, graph safe.

    If a target has several KV cache groups, a page of drafts can become one of the target, whose
    heads may have another size. Its keys may then be read as values, so they must not be NaN
    either. Drafts from zeros are always correct.
    """
    for tensor in drafted:
        tensor.nan_to_num_(0.0, 0.0, 0.0)
