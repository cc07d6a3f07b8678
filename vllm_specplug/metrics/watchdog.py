# SPDX-License-Identifier: Apache-2.0
"""A warning, once, when drafting runs but gains nothing."""

from __future__ import annotations

import logging

LIKELY_CAUSES = (
    "the head was trained for another target, or for another thinking mode of this one",
    "target_layer_ids follow another convention (they are zero-based: id i is the output of "
    "decoder layer i; off by one lowers acceptance, more than that ruins it)",
    "the head's in-block attention is read wrongly (see `is_causal` in the checkpoint's config)",
    "prompts use another chat template than the training data, or none",
    "the draft vocabulary map (`d2t`) belongs to another tokenizer",
)


class AcceptanceWatchdog:
    """Warns once if the mean acceptance length of `window` consecutive drafts is below `threshold`.

    With a lifetime average, a server that drafted well for a day would not warn when its traffic
    changes. A head that works at all is far above the threshold.
    """

    def __init__(
        self,
        logger: logging.Logger,
        *,
        head: str = "the draft head",
        threshold: float = 1.1,
        window: int = 512,
    ) -> None:
        assert threshold > 1.0, threshold
        assert window >= 1, window
        self._logger = logger
        self._head = head
        self._threshold = threshold
        self._window = window
        self._drafts = 0
        self._accepted = 0
        self.has_warned = False

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        """Adds the drafts verified since the last call, and their accepted tokens."""
        if self.has_warned:
            return
        self._drafts += num_drafts
        self._accepted += num_accepted
        if self._drafts < self._window:
            return
        mean_acceptance_length = 1.0 + self._accepted / self._drafts
        if mean_acceptance_length < self._threshold:
            self.has_warned = True
            self._logger.warning(
                "specplug: mean acceptance length is %.2f over the last %d drafts of %s: drafting "
                "costs time and gains almost nothing. The output is not affected. Likely causes: "
                "%s.",
                mean_acceptance_length,
                self._drafts,
                self._head,
                "; ".join(f"({i}) {cause}" for i, cause in enumerate(LIKELY_CAUSES, start=1)),
            )
        self._drafts = 0
        self._accepted = 0
