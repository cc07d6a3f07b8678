# SPDX-License-Identifier: Apache-2.0
"""Refusals of a start: the message comes first and last, without vLLM's stack frames.

On a vLLM that this release does not support, the plugin's methods refuse with the reason.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from vllm_specplug.engine.versions import SeamReport, check_vllm, refusal_text
from vllm_specplug.registry import legal_method_names

reason: SeamReport | None = None
"""Why the methods are unavailable, as found when the plugin was installed."""


_logger = logging.getLogger("vllm.specplug")
_NOT_THE_USERS = tuple(
    f"{Path(folder).resolve()}/"
    for folder in (sys.prefix, sys.base_prefix, Path(__file__).parents[1])
)


class Refusal(ValueError):
    """Refuses what this engine cannot do; the message says what to do instead."""


def refused(message: str) -> Refusal:
    """Returns the error to raise for a refused start, and logs its message.

    vLLM and notebooks print their frames before an error, hence the log. A traceback that Python
    prints has only the user's own frames.
    """
    _logger.error("%s", message)
    if not isinstance(sys.excepthook, _Hook):
        sys.excepthook = _Hook(sys.excepthook)
    return Refusal(message)


class _Hook:
    """`sys.excepthook` that leaves everything but refusals to the one before it."""

    def __init__(self, before: Callable[..., Any]) -> None:
        self.before = before

    def __call__(
        self, kind: type[BaseException], error: BaseException, tb: TracebackType | None
    ) -> None:
        if not isinstance(error, Refusal):
            self.before(kind, error, tb)
            return
        frames = [frame for frame in traceback.extract_tb(tb) if _is_the_users(frame.filename)]
        for line in traceback.format_list(frames):
            sys.stderr.write(line)
        sys.stderr.write(f"ValueError: {error}\n")


def _is_the_users(file: str) -> bool:
    path = Path(file).resolve()
    return path.is_file() and not str(path).startswith(_NOT_THE_USERS)


def wrap_create_engine_config(original: Callable[..., Any]) -> Callable[..., Any]:
    """`EngineArgs.create_engine_config` that stops our methods by name. Seam: refusal."""

    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        spec = self.speculative_config or {}
        method = getattr(self, "spec_method", None) or spec.get("method")
        if method in legal_method_names():
            raise refused(refusal_text(method, reason or check_vllm()))
        return original(self, *args, **kwargs)

    return create_engine_config
