# SPDX-License-Identifier: Apache-2.0
"""Refuses request parameters of the plugin that vLLM would misread or ignore.

Seam: request_body. `vllm_xargs` is declared without booleans, so pydantic reads true as 1. A
parameter outside `vllm_xargs` is an unknown field, which vLLM silently drops.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

from vllm_specplug.options import short_repr
from vllm_specplug.request_params import REQUEST_ARGS


def wrap_validate_json_request(
    original: Callable[[Any], Awaitable[None]],
) -> Callable[[Any], Awaitable[None]]:
    """`validate_json_request`, which sees the body as JSON, followed by `check_body`."""

    async def validate_json_request(raw_request: Any) -> None:
        await original(raw_request)
        # FastAPI has parsed the body and caches it.
        check_body(await raw_request.json())

    return validate_json_request


def check_body(body: Any) -> None:
    """Refuses parameters of the plugin at the top level of a request, and values that are neither
    a number nor a string.

    Raises:
        VLLMValidationError: naming the parameter; the server answers 400.
    """
    from vllm.exceptions import VLLMValidationError

    if not isinstance(body, dict):
        return
    xargs, extra = body.get("vllm_xargs"), body.get("extra_args")
    for name in REQUEST_ARGS:
        # `extra_args` is the offline name; vLLM drops it from a request.
        if name in body or (isinstance(extra, dict) and name in extra):
            raise VLLMValidationError(
                f"{name} is not read at the top level of a request or in extra_args. Give it as "
                f'"vllm_xargs": {{"{name}": ...}}.',
                parameter=name,
            )
        if not isinstance(xargs, dict) or name not in xargs:
            continue
        value = xargs[name]
        if isinstance(value, bool | dict) or value is None:
            given = json.dumps(value) if not isinstance(value, dict) else short_repr(value)
            raise VLLMValidationError(
                f"{name}={given} is not usable: neither a number nor a string. Give one, or leave "
                "it out.",
                parameter=name,
            )
