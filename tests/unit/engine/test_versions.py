# SPDX-License-Identifier: Apache-2.0
"""On a vLLM we do not know, our methods refuse and everything else works."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.fork_server import run_code

# Breaks vLLM, loads the plugin, and prints how starting a tree engine and a plain one ends.
DRILL = """
import json, sys

fault, after, model = sys.argv[1:]
names = {}
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
print("ENDS", json.dumps(ends))
"""

# name: what goes wrong, and what the message must name
FAULTS = {
    "version": ('import vllm; vllm.__version__ = "0.40.1"', "0.40.1"),
    "import": (
        "import vllm.config.utils as utils; import vllm.engine.arg_utils; del utils.config",
        "cannot import name 'config' from 'vllm.config.utils'",
    ),
    "method": (
        "from vllm.v1.structured_output import StructuredOutputManager as manager; "
        "del manager.validate_tokens",
        "StructuredOutputManager.validate_tokens",
    ),
}

# Goes wrong in the middle of what is changed: an object that cannot be wrapped.
HALFWAY = (
    "import vllm_specplug.engine.structured_output as ours; "
    "ours.wrap_grammar_bitmask = lambda original: 1 / 0; "
    "import vllm.engine.arg_utils as arg_utils; stock = arg_utils.SpeculativeConfig; "
    "from vllm.v1.core.sched.scheduler import Scheduler; before = dict(vars(Scheduler))"
)
UNTOUCHED = (
    "assert arg_utils.SpeculativeConfig is stock; "
    "assert all(vars(Scheduler)[k] is v for k, v in before.items()); "
)
FAULTS["halfway"] = (
    HALFWAY,
    "StructuredOutputManager.grammar_bitmask could not be changed: division by zero",
)


@pytest.mark.xdist_group("version_drills")
@pytest.mark.parametrize("fault", FAULTS)
def test_our_methods_refuse_with_the_exact_reason_and_plain_vllm_starts(
    fault: str, target: Path
) -> None:
    script, named = FAULTS[fault]
    after = UNTOUCHED if fault == "halfway" else ""
    # The entry point would install the plugin before the fault is made.
    stdout = run_code(DRILL, script, after, str(target), env={"VLLM_PLUGINS": "none"})
    ours, plain = json.loads(stdout.rpartition("ENDS ")[2].splitlines()[0])
    assert "'jetspec' is not available" in ours and "pip install" in ours and "0.32.x" in ours
    assert named in ours
    assert ("vLLM is as it was" in ours) == (fault == "halfway")
    assert plain == "STARTED"
