# SPDX-License-Identifier: Apache-2.0
"""What our methods do on a vLLM this release does not know: they say so, kindly."""

from __future__ import annotations

import functools
from typing import Any

from vllm_specplug.compat.versions import SeamReport, refusal_text
from vllm_specplug.methods import METHOD_NAMES


def install(report: SeamReport) -> None:
    """Ledger: refusal. Wraps `EngineArgs.create_engine_config` to stop our methods by name."""
    from vllm.engine.arg_utils import EngineArgs

    original = EngineArgs.create_engine_config
    if getattr(original, "_specplug_refuses", False):
        return

    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        spec = self.speculative_config or {}
        method = getattr(self, "spec_method", None) or spec.get("method")
        if method in METHOD_NAMES:
            raise ValueError(refusal_text(method, report))
        return original(self, *args, **kwargs)

    create_engine_config._specplug_refuses = True  # type: ignore[attr-defined]
    EngineArgs.create_engine_config = create_engine_config  # type: ignore[method-assign]
