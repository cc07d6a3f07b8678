# SPDX-License-Identifier: Apache-2.0
"""DeLS and DDTree drafters over tiny checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.e2e.tiny import HIDDEN
from tests.unit.methods.block.block_requests import VOCAB, NoContext
from vllm_specplug.drafting.drafter import Drafter, DrafterOptions, TargetWeights
from vllm_specplug.methods.block.fused_head import plain_linear
from vllm_specplug.methods.dels.settings import DelsSettings


def load_drafter(
    cls: type[Drafter], folder: Path, weights: tuple[float, ...], **options: Any
) -> Any:
    local = DelsSettings(
        **{
            "path": str(folder / "local" / "model.safetensors"),
            "unigram_path": str(folder / "local" / "unigram.safetensors"),
            "alpha": weights, "beta": weights, "anchor_input": False,
            "num_candidates": VOCAB, "gate_table_bytes": 1 << 20, **options,
        }
    )  # fmt: skip
    drafter = cls(
        DrafterOptions(
            head_path=str(folder / "head"), num_nodes=12, tree_depth=4, max_depth=12,
            tree_width=4, 
            ngram_topk=0, max_model_len=64, settings=local,
        )
    )  # fmt: skip
    torch.manual_seed(0)
    drafter.load(
        TargetWeights(
            embed_tokens=torch.randn(VOCAB, HIDDEN),
            lm_head=torch.randn(VOCAB, HIDDEN),
            dtype=torch.float32,
            device=torch.device("cpu"),
            make_linear=plain_linear,
            text_config={"hidden_size": HIDDEN, "vocab_size": VOCAB, "num_hidden_layers": 2},
        )
    )
    drafter.bind_cache(NoContext())
    return drafter
