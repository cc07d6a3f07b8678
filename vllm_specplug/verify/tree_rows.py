# SPDX-License-Identifier: Apache-2.0
"""The tree rows of one step, as the attention backends read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm_specplug.kernels import CpuKvLayout, TreeAttnMetadata

# Attribute of vLLM's attention metadata that carries `TreeRows`.
TREE_ROWS_ATTRIBUTE = "specplug_tree_rows"


@dataclass(frozen=True)
class TreeRows:
    """Which query rows are tree rows, and what each may attend to."""

    metadata: TreeAttnMetadata
    layout: CpuKvLayout
    """Layout of the target's cache."""
    covers_batch: bool
    """Whether every row of the step is a tree row, so that the stock kernel can be skipped."""


def attach_tree_rows(attn_metadata: Any, rows: TreeRows) -> None:
    """Puts `rows` on one layer's attention metadata."""
    setattr(attn_metadata, TREE_ROWS_ATTRIBUTE, rows)


def tree_rows_of(attn_metadata: Any) -> TreeRows | None:
    """The tree rows on `attn_metadata`; None for steps without trees and for warm-up."""
    return getattr(attn_metadata, TREE_ROWS_ATTRIBUTE, None)
