# SPDX-License-Identifier: Apache-2.0
"""Errors that refuse to start an engine, shown without vLLM's stack frames.

The message is logged before the traceback and ends it. On a vLLM that this release does not
support, every use of the plugin's methods raises such an error.
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
"""Why the methods are unavailable; set when the plugin is installed."""


_logger = logging.getLogger("vllm.specplug")
_FOREIGN_FOLDERS = tuple(
    f"{Path(folder).resolve()}/"
    for folder in (sys.prefix, sys.base_prefix, Path(__file__).parents[1])
)


class Refusal(ValueError):
    """The engine cannot do what its config requests; the message says what to do instead."""


def refused(message: str) -> Refusal:
    """Logs the message of a refused start and returns the error to raise.

    The log is there because vLLM and notebooks print their own frames before the error. A traceback
    that Python prints shows only the user's frames.
    """
    _logger.error("%s", message)
    if not isinstance(sys.excepthook, _Hook):
        sys.excepthook = _Hook(sys.excepthook)
    return Refusal(message)


class _Hook:
    """`sys.excepthook` for refusals; it passes all other errors to the previous hook."""

    def __init__(self, previous: Callable[..., Any]) -> None:
        self.previous = previous

    def __call__(
        self, kind: type[BaseException], error: BaseException, tb: TracebackType | None
    ) -> None:
        if not isinstance(error, Refusal):
            self.previous(kind, error, tb)
            return
        frames = [frame for frame in traceback.extract_tb(tb) if _is_user_file(frame.filename)]
        for line in traceback.format_list(frames):
            sys.stderr.write(line)
        sys.stderr.write(f"ValueError: {error}\n")


def _is_user_file(file: str) -> bool:
    path = Path(file).resolve()
    return path.is_file() and not str(path).startswith(_FOREIGN_FOLDERS)


def wrap_create_engine_config(original: Callable[..., Any]) -> Callable[..., Any]:
    """`EngineArgs.create_engine_config` that refuses our methods. Seam: refusal."""

    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        spec = self.speculative_config or {}
        method = getattr(self, "spec_method", None) or spec.get("method")
        if method in legal_method_names():
            raise refused(refusal_text(method, reason or check_vllm()))
        return original(self, *args, **kwargs)

    return create_engine_config
