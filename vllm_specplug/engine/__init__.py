# SPDX-License-Identifier: Apache-2.0
"""What is changed in vLLM before a worker exists; `seams` lists and applies it."""

from __future__ import annotations

import logging

_logger = logging.getLogger("vllm.specplug")


def install() -> None:
    """Makes our methods known to vLLM, or makes them refuse. Idempotent and re-entrant.

    With a supported vLLM the method names become legal values of `--speculative-config`;
    with any other, choosing one of them stops at config time with the reason. When something
    cannot be changed, earlier changes are undone and the methods refuse as well.
    """
    from vllm_specplug.seams import PROCESS_SEAMS, REFUSAL

    if PROCESS_SEAMS.is_applied or REFUSAL.is_applied:
        return
    from vllm_specplug.engine import refusal
    from vllm_specplug.engine.versions import SeamReport, check_vllm

    report = check_vllm()
    if report.supported:
        try:
            PROCESS_SEAMS.apply()
        except Exception as error:
            _logger.exception("vllm-specplug could not be put in place")
            report = SeamReport(report.vllm_version, str(error).rstrip("."))
    if not report.supported:
        _logger.warning("%s; its speculative methods are switched off.", report.problem)
        refusal.reason = report
        REFUSAL.apply()
