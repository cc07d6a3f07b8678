# SPDX-License-Identifier: Apache-2.0
"""Code that runs in every vLLM process, before a worker exists. `seams` lists what it changes."""

from __future__ import annotations

import logging

_logger = logging.getLogger("vllm.specplug")


def install() -> None:
    """Adds our methods to vLLM, or makes vLLM refuse them. Idempotent and re-entrant.

    On a supported vLLM the method names become legal values of `--speculative-config`. On any
    other, choosing one of them stops at config time with the reason. If a change fails, the earlier
    ones are undone and the methods are refused as well.
    """
    from vllm_specplug.seams.listing_process import PROCESS_SEAMS, REFUSAL

    if PROCESS_SEAMS.is_applied or REFUSAL.is_applied:
        return
    from vllm_specplug.engine import versions

    problem = versions.vllm_problem()
    if problem is None:
        try:
            PROCESS_SEAMS.apply()
        except Exception as error:
            _logger.exception("vllm-specplug could not be installed into this vLLM")
            problem = str(error).rstrip(".")
    if problem is not None:
        _logger.warning("%s; its speculative methods are switched off.", problem)
        versions.reason = problem
        REFUSAL.apply()
