# SPDX-License-Identifier: Apache-2.0
"""What the runner remembers between the phases of one step."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm_specplug.tree import DraftTree


@dataclass
class StepRequest:
    """One request's rows in the target forward of this step."""

    first_row: int
    """First row of the flat query: prompt chunk, recomputed tokens or the root itself."""
    root_row: int
    """Row of the last token that is not a draft; its logits decide the next token."""
    end_row: int
    num_computed: int
    """Committed tokens in the cache before this step; position of `first_row`."""
    tree: DraftTree | None
    """The tree under verification; None when the plugin did not draft the rows after the root."""
    accepted_path: list[int] = field(default_factory=list)

    @property
    def context_len(self) -> int:
        """Tokens before the root, which is also the root's position."""
        return self.num_computed + self.root_row - self.first_row


@dataclass
class TreeStep:
    """All requests of one step, in batch order."""

    requests: list[StepRequest]
