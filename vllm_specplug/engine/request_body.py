# SPDX-License-Identifier: Apache-2.0
"""Refuses the plugin's request parameters where vLLM would read them as something else, or not.

Seam: request_body. `vllm_xargs` is declared without booleans, so that pydantic reads true as 1
before anyone sees the value; and a parameter beside `vllm_xargs` is an unknown field, which is
dropped in silence.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

from vllm_specplug.options import shown
from vllm_specplug.request_params import REQUEST_ARGS


def wrap_validate_json_request(
    original: Callable[[Any], Awaitable[None]],
) -> Callable[[Any], Awaitable[None]]:
    """`validate_json_request`, which runs before a body becomes an object, and `check_body`."""

    async def validate_json_request(raw_request: Any) -> None:
        await original(raw_request)
        # Parsed already by FastAPI, which keeps it.
        check_body(await raw_request.json())

    return validate_json_request


def check_body(body: Any) -> None:
    """Refuses parameters of the plugin at the top level of a request, and those whose value is
    neither a number nor a string.

    Raises:
        VLLMValidationError: naming the parameter; the server answers 400.
    """
    from vllm.exceptions import VLLMValidationError

    if not isinstance(body, dict):
        return
    xargs = body.get("vllm_xargs")
    for name in REQUEST_ARGS:
        if name in body:
            raise VLLMValidationError(
                f"{name} is not read at the top level of a request. Give it as "
                f'"vllm_xargs": {{"{name}": ...}}.',
                parameter=name,
            )
        if not isinstance(xargs, dict) or name not in xargs:
            continue
        value = xargs[name]
        if isinstance(value, bool | dict) or value is None:
            given = json.dumps(value) if not isinstance(value, dict) else shown(value)
            raise VLLMValidationError(
                f"{name}={given} is not usable: neither a number nor a string. Give one, or leave "
                "it out.",
                parameter=name,
            )
