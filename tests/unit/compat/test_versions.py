# SPDX-License-Identifier: Apache-2.0
"""On a vLLM we do not know, our methods refuse and everything else works."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from functools import cache

import pytest

from vllm_specplug.compat.ledger import LEDGER
from vllm_specplug.compat.versions import (
    REQUIRED_ATTRIBUTES,
    WORKER_ATTRIBUTES,
    SeamReport,
    missing_attributes,
    refusal_text,
)

DRILL = textwrap.dedent(
    """
    import sys
    import vllm
    {fault}
    from vllm_specplug.plugin import register
    register()
    from vllm.engine.arg_utils import EngineArgs
    for spec in ({{"method": "jetspec", "model": "/nowhere"}}, None):
        try:
            EngineArgs(model=sys.argv[1], speculative_config=spec).create_engine_config()
            print("STARTED")
        except Exception as error:
            print("REFUSED", str(error).replace("\\n", " "))
    """
)


@cache
def _drill(fault: str, model: str) -> list[str]:
    """What becomes of an engine with jetspec and of a plain one, in a process of their own."""
    script = DRILL.format(fault=fault)
    result = subprocess.run(
        [sys.executable, "-c", script, model],
        capture_output=True,
        text=True,
        timeout=180,
        # The entry point would install the plugin before the fault is made.
        env={**__import__("os").environ, "VLLM_PLUGINS": "none", "HF_HUB_OFFLINE": "1"},
    )
    lines = [line for line in result.stdout.splitlines() if line.startswith(("STARTED", "REFUSED"))]
    assert len(lines) == 2, result.stdout[-2000:] + result.stderr[-4000:]
    return lines


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    from tests.e2e.tiny import make_target

    return str(make_target(tmp_path_factory.mktemp("target"), 12))


# name: what goes wrong, and what the message must name
FAULTS = {
    "version": ('vllm.__version__ = "0.40.1"', "0.40.1"),
    "older": ('vllm.__version__ = "0.31.2"', "0.31.2"),
    "function": (
        "import vllm.v1.attention.backends.registry as registry; del registry.register_backend",
        "registry.register_backend",
    ),
    "method": (
        "from vllm.v1.structured_output import StructuredOutputManager as manager; "
        "del manager.validate_tokens",
        "StructuredOutputManager.validate_tokens",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_our_methods_refuse_with_the_exact_reason(fault: str, model: str) -> None:
    script, named = FAULTS[fault]
    line = _drill(script, model)[0]
    assert line.startswith("REFUSED")
    assert "'jetspec' is not available" in line and "pip install" in line and "0.32.x" in line
    assert named in line


@pytest.mark.parametrize("fault", FAULTS)
def test_plain_vllm_still_starts(fault: str, model: str) -> None:
    assert _drill(FAULTS[fault][0], model)[1] == "STARTED"


def test_all_seams_are_there() -> None:
    assert missing_attributes(REQUIRED_ATTRIBUTES + WORKER_ATTRIBUTES) == []
    assert missing_attributes((("vllm", "no_such_thing"), ("no.such.module", "x"))) == [
        "vllm.no_such_thing",
        "no.such.module.x",
    ]


def test_refusal_names_version_and_remedy() -> None:
    text = refusal_text("jetspec", SeamReport("0.31.0", "needs vLLM 0.32.x, but 0.31.0"))
    assert "0.31.0" in text and "pip install" in text


def test_ledger_keys_are_unique_and_named_in_the_code() -> None:
    import importlib
    import inspect

    keys = [entry.key for entry in LEDGER]
    assert len(keys) == len(set(keys))
    for entry in LEDGER:
        module = importlib.import_module(f"vllm_specplug.{entry.where}")
        source = inspect.getsource(module)
        assert "Ledger:" in source, entry
        assert entry.key in source or entry.key.split("_")[0] + "_*" in source, entry
