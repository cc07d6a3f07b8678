# SPDX-License-Identifier: Apache-2.0
"""Pairs on targets with multi-head latent attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

from tests.e2e.families import WINDOW_PROMPTS
from tests.e2e.latent import BACKEND, latent_target
from tests.e2e.pair import Counts, Pair, changed, pair
from tests.e2e.requests import mixed_params
from vllm_specplug.vllm_attention import latent
from vllm_specplug.vllm_v2 import latent_backend

ENGINE: dict[str, Any] = {"skip_tokenizer_init": True, **BACKEND}
# More than there is room for: prompts come in beside trees.
PROMPTS = [*WINDOW_PROMPTS, *([9, *p] for p in WINDOW_PROMPTS)]


def engines(method: str = "oracle", **options: Any) -> Pair:
    return pair(method, **{"model": latent_target(), **ENGINE, **options})


def compared(made: Pair, **options: Any) -> Counts:
    return made.compare(PROMPTS, mixed_params(16), **options)[1]


def lines_for_trees() -> Any:
    def spans(stock: Any, requests: Any) -> Any:
        return stock([(i, replace(r, mask=None)) for i, r in requests])

    return changed(latent, "spans_of", spans)


def nothing_moves() -> Any:
    return patch.object(latent_backend, "move_latents", lambda *args: None)
