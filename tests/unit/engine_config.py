# SPDX-License-Identifier: Apache-2.0
"""vLLM's config of an engine, made without starting it."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def engine_config(target: Path, spec: dict[str, Any] | None, **engine: Any) -> Any:
    """The config of an eager engine on `target`; raises what vLLM and the plugin refuse it with."""
    from vllm.engine.arg_utils import EngineArgs

    defaults = {"dtype": "float32", "max_model_len": 256, "enforce_eager": True}
    return EngineArgs(
        model=str(target),
        skip_tokenizer_init=True,
        speculative_config=spec,
        **{**defaults, **engine},
    ).create_engine_config()
