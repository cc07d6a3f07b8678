# SPDX-License-Identifier: Apache-2.0
"""What becomes of engines when vLLM is not what the plugin knows; run by `run_forked`."""

from __future__ import annotations

import json
from pathlib import Path


def main(fault: str, after: str, model: str, result: str) -> None:
    """Breaks vLLM by `fault`, loads the plugin, runs `after`, and notes how starting a tree engine
    and a plain one ends: "STARTED" or the reason."""
    names: dict[str, object] = {}
    exec(fault, names)
    from vllm_specplug.plugin import register

    register()
    exec(after, names)
    from vllm.engine.arg_utils import EngineArgs

    ends = []
    for spec in ({"method": "jetspec", "model": "/nowhere"}, None):
        try:
            EngineArgs(model=model, speculative_config=spec).create_engine_config()
            ends.append("STARTED")
        except Exception as error:
            ends.append(str(error))
    Path(result).write_text(json.dumps(ends))
