# SPDX-License-Identifier: Apache-2.0
"""All of vLLM's logits processors in a runner that drafts.

Under speculation vLLM builds `min_tokens` alone, because its rejection sampler sees many rows
a request at once. The walk samples one row a request, as plain decoding does, so every
processor works there: `min_p`, `logit_bias` and the user's own.

Ledger: logits_processors.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import vllm.v1.worker.gpu_model_runner as gpu_model_runner


@contextmanager
def plain_logits_processors() -> Iterator[None]:
    """While entered, runners are built with the processors of plain decoding."""
    stock = gpu_model_runner.build_logitsprocs

    def build(vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        # A copy that does not speculate: vLLM asks for nothing else before it refuses.
        plain = copy.copy(vllm_config)
        plain.speculative_config = None
        return stock(plain, *args, **kwargs)

    gpu_model_runner.build_logitsprocs = build
    try:
        yield
    finally:
        gpu_model_runner.build_logitsprocs = stock
