# SPDX-License-Identifier: Apache-2.0
"""Tests that run in a process of their own: one for all that are selected of a module.

Engines in a test's process cannot be undone, and a module's tests share them, so a module asks
for a child with `pytestmark = pytest.mark.own_process`. The marker takes:

    env: variables of the child.
    fresh: a new interpreter instead of a fork that has imported vLLM, for variables that count
        while vLLM is imported.
    timeout_s: what all tests of the module may take together.

The child runs pytest over these tests and writes their reports, which are repeated here. A test
without a report fails with the end of the child's log.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.fork_server import prepare_engines, run_forked, run_fresh
from vllm_specplug.vllm_v2.plain_engine import use_v2

MARKER = "own_process"
TIMEOUT_S = 900.0
# Set in children, which run their tests themselves.
_CHILD = "SPECPLUG_OWN_PROCESS"
# The id that a child knows a test by; pytest-xdist adds a group to it here.
_NODE_ID = pytest.StashKey[str]()
_REPORTS = pytest.StashKey[dict[Any, tuple[dict[str, list[Any]], str]]]()


def _options(item: pytest.Item) -> dict[str, Any] | None:
    """Arguments of a test's marker; None where this process runs it."""
    marker = item.get_closest_marker(MARKER)
    return None if marker is None or _CHILD in os.environ else marker.kwargs


def pytest_itemcollected(item: pytest.Item) -> None:
    item.stash[_NODE_ID] = item.nodeid
    options = _options(item)
    if options is not None:
        # One worker has all tests of the module, and waits for all of them with the first.
        item.add_marker(pytest.mark.xdist_group(item.module.__name__))
        item.add_marker(pytest.mark.timeout(options.get("timeout_s", TIMEOUT_S) + 60))


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    options = _options(item)
    if options is None:
        return None
    children = item.session.stash.setdefault(_REPORTS, {})
    key = (item.module, json.dumps(options, sort_keys=True))
    if key not in children:
        same = [x for x in item.session.items if x.module is item.module and _options(x) == options]
        children[key] = _run_child(item.config, [x.stash[_NODE_ID] for x in same], **options)
    reports, end = children[key]
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    made = reports.get(item.stash[_NODE_ID], [])
    if not any(report.when == "teardown" or report.outcome == "failed" for report in made):
        made = [*made, pytest.TestReport(item.nodeid, item.location, {}, "failed", end, "call")]
    for report in made:
        report.nodeid = item.nodeid
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    # Fixtures that an earlier test of this process left for a neighbour of this one.
    item.session._setupstate.teardown_exact(nextitem)
    return True


def _run_child(
    config: pytest.Config,
    tests: list[str],
    *,
    env: dict[str, str] | None = None,
    fresh: bool = False,
    timeout_s: float = TIMEOUT_S,
) -> tuple[dict[str, list[Any]], str]:
    """Reports of each test, and what to say of tests that have none."""
    with tempfile.TemporaryDirectory() as folder:
        path, log = Path(folder) / "reports", Path(folder) / "log"
        path.touch()
        arguments = [str(path), f"--rootdir={config.rootpath}"]
        arguments += ["-c", str(config.inipath)] if config.inipath else []
        arguments += ["--each-isa"] if config.getoption("each_isa", False) else []
        arguments += [f"{config.rootpath}/{test}" for test in tests]
        try:
            run = run_fresh if fresh else run_forked
            status = run("tests.e2e.own_process", arguments, log, env=env, timeout_s=timeout_s)
            end = f"the process ended with {status}:\n{log.read_text()[-6000:]}"
        except Exception as error:
            end = str(error)
        reports: dict[str, list[Any]] = {}
        for line in path.read_text().splitlines():
            report = config.hook.pytest_report_from_serializable(
                config=config, data=json.loads(line)
            )
            if isinstance(report.longrepr, list):  # the place and reason of a skip
                report.longrepr = tuple(report.longrepr)
            reports.setdefault(report.nodeid, []).append(report)
    return reports, end


class _Reporter:
    """The plugin of a child."""

    def __init__(self, path: str) -> None:
        self.path, self.config = Path(path), None

    def pytest_configure(self, config: pytest.Config) -> None:
        self.config = config

    def pytest_collection_finish(self) -> None:
        # Not earlier: some modules choose Triton's interpreter, which vLLM asks for when it is
        # imported.
        use_v2()
        prepare_engines()
        # Building an engine collects garbage several times: not among what was imported.
        gc.freeze()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """At once: a crash later on must not lose what is known."""
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        with self.path.open("a") as stream:
            stream.write(json.dumps(data) + "\n")


def main(reports: str, *arguments: str) -> None:
    """The child."""
    os.environ[_CHILD] = "1"
    # Its log has all output in order, which a crash would lose otherwise.
    options = ["-v", "-s", "-p", "no:cacheprovider", "-o", "timeout=0"]
    sys.exit(pytest.main([*options, *arguments], plugins=[_Reporter(reports)]))


if __name__ == "__main__":
    main(*sys.argv[1:])
