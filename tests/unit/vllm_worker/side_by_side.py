# SPDX-License-Identifier: Apache-2.0
"""Processes that talk to each other, forked from one that has imported vLLM."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import traceback


def main(module: str, arguments: str) -> None:
    """Runs `main` of `module` in a process for each of the JSON lists `arguments`; fails where one
    of them does, and leaves none behind."""
    run = importlib.import_module(module).main
    children = set()
    for each in json.loads(arguments):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                run(*each)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(status)
        children.add(pid)
    failed = False
    while children and not failed:
        pid, status = os.wait()
        children.discard(pid)
        failed = status != 0
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    sys.exit(int(failed))
