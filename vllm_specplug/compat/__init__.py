# SPDX-License-Identifier: Apache-2.0
"""Every touch on vLLM internals made before a worker exists; `ledger.py` lists them all."""

from __future__ import annotations

import logging

_installed = False


def install() -> None:
    """Makes our methods known to vLLM, or makes them refuse. Idempotent and re-entrant.

    With a supported vLLM the method names become legal values of `--speculative-config`;
    with any other, choosing one of them stops at config time with the reason.
    """
    global _installed
    if _installed:
        return
    from vllm_specplug.compat.versions import check_vllm

    report = check_vllm()
    if report.supported:
        from vllm_specplug.compat import (
            engine_args,
            metrics_bridge,
            penalty,
            placeholders,
            sampling_options,
            spec_config,
            structured_output,
        )

        spec_config.install()
        engine_args.install()
        metrics_bridge.install()
        placeholders.install()
        sampling_options.install()
        structured_output.install()
        penalty.install()
    else:
        from vllm_specplug.compat import refusal

        logging.getLogger("vllm.specplug").warning(
            "%s; its speculative methods are switched off.", report.problem
        )
        refusal.install(report)
    _installed = True
