# SPDX-License-Identifier: Apache-2.0
"""A request's contextual penalty as a worker takes it: anything that is not usable is none."""

from __future__ import annotations

from typing import Any

from vllm.logger import init_logger

from vllm_specplug.request_params import parse_penalty

logger = init_logger("vllm.specplug.penalty")


def request_penalty(extra_args: dict[str, Any] | None) -> tuple[int, float] | None:
    """Window in tokens and theta; None for a request without a penalty."""
    try:
        return parse_penalty(extra_args)
    except ValueError:
        # Front ends refuse it; one that does not must not end the worker.
        logger.warning_once("Requests came in with contextual penalties that are none: ignored")
        return None
