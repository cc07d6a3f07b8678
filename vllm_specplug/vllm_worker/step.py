# SPDX-License-Identifier: Apache-2.0
"""A request of a verified step on the host: its tree and its accepted path."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm_specplug.tree import DraftTree


@dataclass
class StepRequest:
    """One request's rows in the target forward of this step."""

    first_row: int
    """The request's first query row: of a prompt chunk, of recomputed tokens, or the root."""
    root_row: int
    """Row of the last token that is not a draft. Its logits give the next token."""
    end_row: int
    num_computed: int
    """Committed tokens in the cache before this step; position of `first_row`."""
    tree: DraftTree
    """The verified tree, which may be empty."""
    accepted_path: list[int] = field(default_factory=list)

    @property
    def context_len(self) -> int:
        """Tokens before the root, which is also the root's position."""
        return self.num_computed + self.root_row - self.first_row
