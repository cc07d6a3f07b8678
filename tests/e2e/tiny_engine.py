# SPDX-License-Identifier: Apache-2.0
"""Arguments of an engine on the tiny target without a tokenizer, and requests for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCAB = 12


PROMPTS = [[3, 7, 5, 9], [4, 5, 6], [2, 2, 2, 3, 4, 5], [9], [8, 1, 7, 7, 10, 11, 3]]


# Small numbers of tokens repeat soon; penalties keep the outputs from becoming one token.
PARAMS = {
    "temperature": 0.0,
    "max_tokens": 48,
    "ignore_eos": True,
    "detokenize": False,
    "presence_penalty": 1.5,
    "frequency_penalty": 0.8,
}


# Greedy, and by chance.
CALLS = [
    {"prompts": PROMPTS, "params": PARAMS},
    {"prompts": PROMPTS, "params": {**PARAMS, "temperature": 0.8, "seed": 7}},
]


def tiny_engine(target: Path) -> dict[str, Any]:
    return {
        "model": str(target),
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 256,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 1024,
        "block_size": 32,
        # A gibibyte, as the environment allows, takes as long to fill as the engine to start.
        "num_gpu_blocks_override": 1024,
        "enable_prefix_caching": False,
    }
