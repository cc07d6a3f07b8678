# SPDX-License-Identifier: Apache-2.0
"""Features of the attention of a layer in addition to scale and mask."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class FeatureKind:
    """The features of a layer, by which kernels are chosen and compiled."""

    window: int = 0
    soft_cap: float = 0.0
    sinks: bool = False
    alibi: bool = False
    quantised_cache: bool = False
    quantised_query: bool = False
    token_scales: bool = False
    """Whether a quantised cache has scales per token and KV head."""
    int8_cache: bool = False
    """Whether such a cache holds int8; other quantised caches hold e4m3."""

    @property
    def names(self) -> list[str]:
        """Returns the names of the features in messages."""
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
    """Factor of the keys in the cache."""
    value_scale: float = 1.0
    # On CUDA: float32 factors of an 8-bit cache, and of a query that is quantised with it, one
    # value or one per KV head. A cache has both or none. Its factors may also be views [num_blocks,
    # block_size, Hkv] of equal shape and stride, one per slot. They are tensors, so that no call
    # waits for a value.
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None
    query_scales: torch.Tensor | None = None
    int8_cache: bool = False
    """Whether a cache with scales per slot holds int8 instead of e4m3."""

    def __post_init__(self) -> None:
        assert self.window >= 0 and self.soft_cap >= 0, (self.window, self.soft_cap)
        assert (self.key_scales is None) == (self.value_scales is None)
        if self.key_scales is not None and self.value_scales is not None and self.token_scales:
            keys, values = self.key_scales, self.value_scales
            assert (keys.shape, keys.stride()) == (values.shape, values.stride())

    @property
    def is_plain(self) -> bool:
        """Whether a layer has only scale and mask."""
        return self.kind == FeatureKind() and self.key_scale == self.value_scale == 1.0

    @property
    def token_scales(self) -> bool:
        """Whether the cache has scales per slot."""
        return self.key_scales is not None and self.key_scales.ndim == 3

    @property
    def needs_positions(self) -> bool:
        """Whether the distance of a key from a row matters."""
        return bool(self.window) or self.alibi_slopes is not None

    @property
    def kind(self) -> FeatureKind:
        """Returns the kind of the features, without values of tensors."""
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
