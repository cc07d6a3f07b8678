# SPDX-License-Identifier: Apache-2.0
"""What our methods do on a vLLM this release does not know: refuse, with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_specplug.registry import legal_method_names
from vllm_specplug.vllm_process.versions import SeamReport, check_vllm, refusal_text

reason: SeamReport | None = None
"""Why the methods are unavailable, as found when the plugin was installed."""


def refusing(original: Callable[..., Any]) -> Callable[..., Any]:
    """`EngineArgs.create_engine_config` that stops our methods by name. Seam: refusal."""

    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        spec = self.speculative_config or {}
        method = getattr(self, "spec_method", None) or spec.get("method")
        if method in legal_method_names():
            raise ValueError(refusal_text(method, reason or check_vllm()))
        return original(self, *args, **kwargs)

    return create_engine_config
