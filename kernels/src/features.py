# SPDX-License-Identifier: Apache-2.0
"""What the attention of a layer does beside a scale and a mask."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class AttnFeatures:
    """A row's position is its context length plus its depth in its tree, whatever its slot."""

    window: int = 0
    """Positions that a row attends, its own included; 0 for all before it. May be shorter than a
    branch: a row then attends its nearest ancestors alone."""
    soft_cap: float = 0.0
    """Scaled scores s become soft_cap * tanh(s / soft_cap); 0 leaves them."""
    # float32 [Hq]: a score of each head without a key and a value, added to the softmax
    sinks: torch.Tensor | None = None
    # float32 [Hq]: slope times (position of the key - position of the row) is added to scores,
    # after the soft cap
    alibi_slopes: torch.Tensor | None = None
    value_scale: float = 1.0
    """What values in the cache are multiplied by; that of keys is part of the scale of scores."""

    def __post_init__(self) -> None:
        assert self.window >= 0 and self.soft_cap >= 0, (self.window, self.soft_cap)

    @property
    def is_plain(self) -> bool:
        """Whether there is nothing but scale and mask."""
        return (
            not self.window
            and not self.soft_cap
            and not self.changes_weights
            and self.value_scale == 1.0
        )

    @property
    def changes_weights(self) -> bool:
        """Whether a tensor of the layer enters the softmax."""
        return self.sinks is not None or self.alibi_slopes is not None


PLAIN = AttnFeatures()
