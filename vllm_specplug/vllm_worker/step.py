# SPDX-License-Identifier: Apache-2.0
"""A request of a verified step on the host: its tree and its accepted path."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm_specplug.tree import DraftTree
from vllm_specplug.vllm_attention.tree_rows import RequestRows


@dataclass(frozen=True)
class StepRequest(RequestRows):
    """One request's rows with its verified tree, which may be empty."""

    tree: DraftTree
    accepted_path: list[int] = field(default_factory=list)
