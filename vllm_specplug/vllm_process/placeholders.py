# SPDX-License-Identifier: Apache-2.0
"""Resumed and prefix-hit requests come without placeholder drafts.

Seam: placeholders.

What: `Scheduler.__init__` is wrapped; for our methods `dynamic_sd_lookup`, unset otherwise, is
set to a table that says `num_speculative_tokens` for every batch size.

Why: where it is unset, the scheduler pads a request that starts with a single row to
1 + num_speculative_tokens rows of drafts -1, so that all requests of a step have as many rows and
full CUDA graphs fit. Trees differ in size anyway, none of those drafts can be accepted, and every
row costs a forward's share. The table changes nothing else: it gives the number that the scheduler
would use without it.

Remove when: a proposer can say that it does not want the padding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_specplug.vllm_process.spec_config import tree_config


def without_placeholders(original: Callable[..., None]) -> Callable[..., None]:
    """The scheduler's constructor, and the table after it."""

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if tree_config(self.vllm_config) is not None and self.dynamic_sd_lookup is None:
            batch_sizes = self.scheduler_config.max_num_seqs + 1
            self.dynamic_sd_lookup = [self.num_spec_tokens] * batch_sizes

    return init
