# SPDX-License-Identifier: Apache-2.0
"""Training data of LongSpec: the target's last-layer keys and values, and its final states.

A shard is one of `train.features` whose `aux` holds [keys | values] of the target's last layer,
2 * Hkv * Dh values per token, keys rotated as in a serving cache. Its metadata holds the position
offset of every sequence.

Anchor-offset indices (arXiv 2502.17421, section 3.2): the first `keep` tokens of a sequence have
their own positions, all later ones are shifted by one random offset, so that short sequences train
the rotary angles of long ones. The target runs with the same positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence, unpad_sequence

from vllm_specplug.train.features import (
    FeatureSequence,
    FeatureStore,
    TokenSequence,
    shard_meta,
    write_features,
)
from vllm_specplug.train.online import OnlineFeatures

# Of the paper; its code draws 0 to 4.
KEPT_POSITIONS = 4


@dataclass(frozen=True)
class KVSequence:
    """One sequence: tokens [S], positions [S], key and value [S, Hkv, Dh] of the target's last
    layer, hidden [S, Ht] its final normed states; the first `prompt_len` tokens are given."""

    tokens: torch.Tensor
    positions: torch.Tensor
    prompt_len: int
    key: torch.Tensor
    value: torch.Tensor
    hidden: torch.Tensor
    source: str = ""

    def __len__(self) -> int:
        return len(self.tokens)


class KVFeatureStore(FeatureStore):
    """All finished shards of a folder, as a sequence of `KVSequence`."""

    def __init__(self, folder: str | Path):
        super().__init__(folder)
        meta = self.shards[0].meta
        if "num_kv_heads" not in meta:
            raise ValueError(
                f"feature folder {str(folder)!r} holds outputs of layers, legal: last-layer keys "
                "and values; make them with `specplug data longspec-features`"
            )
        self.shape = meta["num_kv_heads"], meta["head_dim"]

    def __getitem__(self, index: int) -> KVSequence:  # type: ignore[override]
        shard, i = self.items[index]
        features, offset = self.shards[shard][i], self.shards[shard].meta["offsets"][i]
        return _shifted(features, features.aux, features.hidden, offset, self.shape)


class OnlineKV(OnlineFeatures):
    """Answers as `KVSequence`, with shifted positions in training."""

    def forward(
        self, texts: Sequence[TokenSequence], device: torch.device | str, is_training: bool
    ) -> list[KVSequence]:
        assert self.model is not None
        most = int(self.model.config.max_position_embeddings)  # type: ignore[union-attr, arg-type]
        offsets = [
            draw_offset(len(text.tokens), most, np.random.default_rng(text.index))
            if is_training
            else (0, 0)
            for text in texts
        ]
        shape, tokens = kv_shape(self.model.config), [text.tokens for text in texts]
        pairs, hidden = forward_kv(self.model, tokens, offsets, device)
        return [_shifted(*made, shape) for made in zip(texts, pairs, hidden, offsets, strict=True)]


def _shifted(
    text: TokenSequence | FeatureSequence,
    pairs: torch.Tensor,
    hidden: torch.Tensor,
    offset: Sequence[int],
    shape: tuple[int, int],
) -> KVSequence:
    """Returns a sequence with its [keys | values] [S, 2 * Hkv * Dh] of `shape`."""
    key, value = pairs.unflatten(-1, (2, *shape)).unbind(1)
    positions = offset_positions(len(text.tokens), *offset)
    return KVSequence(text.tokens, positions, text.prompt_len, key, value, hidden, text.source)


def kv_shape(config: Any) -> tuple[int, int]:
    """Returns the number of KV heads of a target and their size."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return kv_heads, getattr(config, "head_dim", None) or config.hidden_size // heads


def kv_meta(model: Any) -> dict[str, Any]:
    """Returns what the metadata of shards say of a target."""
    kv_heads, head_dim = kv_shape(model.config)
    return {
        **shard_meta(model, [model.config.num_hidden_layers - 1]),
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "aux_size": 2 * kv_heads * head_dim,
    }


def offset_positions(length: int, keep: int, offset: int) -> torch.Tensor:
    """Returns positions int64 [length], all but the first `keep` shifted by `offset`."""
    positions = torch.arange(length)
    positions[keep:] += offset
    return positions


def draw_offset(length: int, max_position: int, rng: np.random.Generator) -> tuple[int, int]:
    """Returns (keep, offset) of a sequence: the kept positions, and a uniform shift that fits below
    `max_position` and 30,000, as published."""
    return KEPT_POSITIONS, int(rng.integers(0, max(1, min(max_position, 30_000) - length)))


def write_kv_shard(
    folder: Path,
    sequences: Sequence[TokenSequence],
    offsets: Sequence[tuple[int, int]],
    model: nn.Module,
    *,
    tokens_per_batch: int = 4096,
    on_batch: Callable[[int], None] = lambda tokens: None,
) -> None:
    """Runs the target over `sequences` with shifted positions and writes one shard."""

    def forward(rows: list[int]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        return forward_kv(model, [sequences[r].tokens for r in rows], [offsets[r] for r in rows])

    write_features(
        folder,
        sequences,
        forward,
        meta={**kv_meta(model), "offsets": [list(pair) for pair in offsets]},
        tokens_per_batch=tokens_per_batch,
        on_batch=on_batch,
    )


# Not inference_mode, whose tensors a trainer cannot keep for its backward pass.
@torch.no_grad()
def forward_kv(
    model: nn.Module,
    tokens: Sequence[torch.Tensor],
    offsets: Sequence[tuple[int, int]],
    to: torch.device | str = "cpu",
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Returns last-layer [keys | values] [S, 2 * Hkv * Dh] and final normed states [S, Ht] of
    right-padded sequences, bfloat16, on a device."""
    from transformers import DynamicCache

    device = next(model.parameters()).device
    ids = pad_sequence([sequence.long() for sequence in tokens], batch_first=True)
    positions = torch.stack([offset_positions(ids.shape[1], *offset) for offset in offsets])
    cache: Any = DynamicCache(config=getattr(model, "config", None))
    # With a mask, transformers does not take a jump of the positions for another sequence.
    output = getattr(model, "model", model)(
        input_ids=ids.to(device),
        position_ids=positions.to(device),
        attention_mask=torch.ones_like(ids).to(device),
        past_key_values=cache,
        use_cache=True,
    )
    last = cache.layers[-1]
    # [B, Hkv, S, Dh] twice -> [B, S, 2 * Hkv * Dh]
    pairs = torch.stack([last.keys, last.values], dim=1).permute(0, 3, 1, 2, 4).flatten(2)
    pairs, final = (t.to(to, torch.bfloat16) for t in (pairs, output.last_hidden_state))
    lengths = torch.tensor([len(t) for t in tokens])
    states, hidden = (unpad_sequence(part, lengths, batch_first=True) for part in (pairs, final))
    return states, hidden
