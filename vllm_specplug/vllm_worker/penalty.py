# SPDX-License-Identifier: Apache-2.0
"""A request's contextual penalty as a worker reads it: it ignores unusable values."""

from __future__ import annotations

from typing import Any

from vllm.logger import init_logger

from vllm_specplug.request_params import parse_penalty

logger = init_logger("vllm.specplug.penalty")


def request_penalty(extra_args: dict[str, Any] | None) -> tuple[int, float] | None:
    """Returns window in tokens and theta; None for a request without a usable penalty."""
    try:
        return parse_penalty(extra_args)
    except ValueError:
        # The front end refuses it. A front end that does not must not end the worker.
        logger.warning_once("Ignored an invalid contextual penalty of a request")
        return None
