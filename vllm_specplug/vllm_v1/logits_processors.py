# SPDX-License-Identifier: Apache-2.0
"""All of vLLM's logits processors in a runner that drafts.

Under speculation vLLM builds `min_tokens` alone, because its rejection sampler sees many rows
per request at once. The walk samples one row per request, as plain decoding does, so every
processor works there: `min_p`, `logit_bias` and the user's own.

Seam: logits_processors.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any


def plain_builder(stock: Callable[..., Any]) -> Callable[..., Any]:
    """`build_logitsprocs` that builds the processors of plain decoding."""

    def build(vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        # A copy that does not speculate: vLLM asks for nothing else before it refuses.
        plain = copy.copy(vllm_config)
        plain.speculative_config = None
        return stock(plain, *args, **kwargs)

    return build
