# SPDX-License-Identifier: Apache-2.0
"""Drafters of tiny block heads without a context, and requests for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.e2e.tiny import HIDDEN
from tests.unit.drafters import load_drafter, requests_of
from tests.unit.methods.block.dense_cache import DenseCache
from vllm_specplug.drafting.drafter import Drafter
from vllm_specplug.drafting.requests import DraftRequests

VOCAB = 20


def tiny_drafter(cls: type[Drafter], head: Path, settings: Any = None, **options: Any) -> Any:
    torch.manual_seed(0)
    embed, lm_head = torch.randn(2, VOCAB, HIDDEN)
    drafter = load_drafter(cls, head, settings, lm_head, embed, **options)
    drafter.bind_cache(DenseCache())
    return drafter


def draft_requests() -> DraftRequests:
    return requests_of([[1, 2, 3], [4], [5, 6, 5, 6]], [12, 5, 9], 4, [4, 1, 3])
