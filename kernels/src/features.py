# SPDX-License-Identifier: Apache-2.0
"""What the attention of a layer does beside a scale and a mask."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class FeatureKind:
    """Which features a layer has: what kernels are chosen and compiled by."""

    window: int = 0
    soft_cap: float = 0.0
    sinks: bool = False
    alibi: bool = False
    quantised_cache: bool = False
    quantised_query: bool = False
    token_scales: bool = False
    """Whether each token and KV head has scales of its own in a quantised cache."""
    int8_cache: bool = False
    """Whether these are of int8; else a quantised cache holds e4m3."""

    @property
    def names(self) -> list[str]:
        """Those that are there, as messages name them."""
        titles = {
            "sliding windows": self.window,
            "soft-capped logits": self.soft_cap,
            "attention sinks": self.sinks,
            "ALiBi": self.alibi,
            "a quantised cache": self.quantised_cache,
        }
        return [title for title, there in titles.items() if there]


@dataclass(frozen=True, eq=False)
class AttnFeatures:
    """A row's position is its context length plus its depth in its tree, whatever its slot."""

    window: int = 0
    """Positions that a row attends, its own included; 0 for all before it. May be shorter than a
    branch: a row then only attends its nearest ancestors."""
    soft_cap: float = 0.0
    """Scaled scores s become soft_cap * tanh(s / soft_cap); 0 leaves them."""
    # [Hq], any float dtype: a score of each head without a key and a value, added to the softmax
    sinks: torch.Tensor | None = None
    # float32 [Hq]: slope times (position of the key - position of the row) is added to scores,
    # after the soft cap
    alibi_slopes: torch.Tensor | None = None
    key_scale: float = 1.0
    """What keys in the cache are multiplied by."""
    value_scale: float = 1.0
    # On CUDA instead, float32, one value or one of each KV head: what an 8-bit cache's numbers, and
    # those of a query that is quantised with it, are multiplied by. Both of a cache, or neither.
    # Those of a cache may also be views [num_blocks, block_size, Hkv] of one shape and stride: one
    # of each slot. Tensors, as no call is to wait for a number.
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None
    query_scales: torch.Tensor | None = None
    int8_cache: bool = False
    """Whether a cache with scales of each slot holds int8; else e4m3."""

    def __post_init__(self) -> None:
        assert self.window >= 0 and self.soft_cap >= 0, (self.window, self.soft_cap)
        assert (self.key_scales is None) == (self.value_scales is None)
        if self.key_scales is not None and self.value_scales is not None and self.token_scales:
            keys, values = self.key_scales, self.value_scales
            assert (keys.shape, keys.stride()) == (values.shape, values.stride())

    @property
    def is_plain(self) -> bool:
        """Whether there is nothing but scale and mask."""
        return self.kind == FeatureKind() and self.key_scale == self.value_scale == 1.0

    @property
    def token_scales(self) -> bool:
        """Whether a cache's scales are those of each slot."""
        return self.key_scales is not None and self.key_scales.ndim == 3

    @property
    def needs_positions(self) -> bool:
        """Whether it matters how far a key is from a row."""
        return bool(self.window) or self.alibi_slopes is not None

    @property
    def kind(self) -> FeatureKind:
        """All of it but the tensors' values."""
        return FeatureKind(
            self.window,
            self.soft_cap,
            self.sinks is not None,
            self.alibi_slopes is not None,
            self.key_scales is not None,
            self.query_scales is not None,
            self.token_scales,
            self.int8_cache,
        )


PLAIN = AttnFeatures()
