# SPDX-License-Identifier: Apache-2.0
"""Processes that need not import vLLM again: a server that has imported it forks for each job.

Importing vLLM takes longer than building a small engine. The server has imported everything and
made nothing, so a job starts as a fresh process would, a moment later. A job is the function
`main` of a module with strings as arguments; see `run_forked`.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from functools import cache
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    # One thread: engines run side by side, and sums do not depend on a split between threads.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # One process: a test may reach into the worker, and start-up is quicker.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
# Set in processes that have imported vLLM and build no engine themselves: jobs are their forks.
FORKS_HERE = "SPECPLUG_FORKS_HERE"
# What an engine imports while it is built; nothing of the plugin, which plain engines must not see
# before vLLM loads it.
_MODULES = (
    "vllm",
    "vllm.distributed.elastic_ep.elastic_execute",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.entrypoints.llm",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.model_executor.models.llama",
    "vllm.plugins.lora_resolvers.filesystem_resolver",
    "vllm.plugins.lora_resolvers.hf_hub_resolver",
    "vllm.renderers.hf",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.core.sched.async_scheduler",
    "vllm.v1.worker.cpu.model_runner",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.gpu.model_states.default",
    "vllm.v1.worker.gpu.model_states.mamba_hybrid",
    "transformers.models.llama.modeling_llama",
    "xgrammar",
    "pytest",
    "tests.e2e.engine_process",
    "tests.e2e.pair",
)


class JobTimeoutError(Exception):
    """A job ran for longer than it was given."""


def run_forked(
    module: str,
    args: list[str],
    log: Path,
    *,
    env: dict[str, str] | None = None,
    timeout_s: float = 1500.0,
) -> int:
    """Runs `module.main(*args)` in a process of its own and returns its exit status.

    Args:
        log: where its output goes.
        env: variables of this job. What reads the environment while it is imported has been
            imported already; such a job needs `run_fresh`.

    Raises:
        JobTimeoutError: it was killed after `timeout_s`.
    """
    job = {"module": module, "args": args, "log": str(log), "env": env or {},
           "timeout_s": timeout_s}  # fmt: skip
    status = _fork_here(job) if FORKS_HERE in os.environ else _ask_server(job)
    if status == -signal.SIGALRM:
        raise _timeout(timeout_s, log)
    return status


def _fork_here(job: dict[str, Any]) -> int:
    pid = os.fork()
    if pid == 0:
        _run({**job, "env": {**ENVIRONMENT, **job["env"]}})
    return _wait(pid, time.monotonic() + job["timeout_s"])


def _ask_server(job: dict[str, Any]) -> int:
    server = _server()
    try:
        server.stdin.write(json.dumps(job) + "\n")
        server.stdin.flush()
        answer = server.stdout.readline()
    except BaseException:
        _stop(server)
        raise
    if not answer:
        _stop(server)
        raise RuntimeError("the fork server ended")
    return int(answer)


def run_fresh(
    module: str,
    args: list[str],
    log: Path,
    *,
    env: dict[str, str] | None = None,
    timeout_s: float = 1500.0,
) -> int:
    """`run_forked` with a new interpreter: for variables that count while vLLM is imported."""
    code = f"import sys; from {module} import main; main(*sys.argv[1:])"
    with log.open("w") as stream:
        try:
            return subprocess.run(
                [sys.executable, "-c", code, *args],
                stdout=stream,
                stderr=subprocess.STDOUT,
                env={**os.environ, **ENVIRONMENT, **(env or {})},
                cwd=REPO,
                timeout=timeout_s,
            ).returncode
        except subprocess.TimeoutExpired:
            raise _timeout(timeout_s, log) from None


def _timeout(timeout_s: float, log: Path) -> JobTimeoutError:
    return JobTimeoutError(f"killed after {timeout_s} s:\n{log.read_text()[-6000:]}")


def run_code(code: str, *args: str, env: dict[str, str] | None = None) -> str:
    """Output of a script with `args`, run as `run_forked` runs a job; fails where it fails."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        status = run_forked("tests.e2e.fork_server", [code, *args], log, env=env, timeout_s=900)
        output = log.read_text()
    assert status == 0, output[-6000:]
    return output


def main(code: str, *args: str) -> None:
    """The job of `run_code`."""
    sys.argv = ["-c", *args]
    exec(code, {"__name__": "__main__"})


@cache
def _server() -> Any:
    """This process's server, started at first use."""
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.e2e.fork_server"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **ENVIRONMENT},
        cwd=REPO,
        start_new_session=True,
    )
    atexit.register(_stop, server)
    return server


def _stop(server: Any) -> None:
    _server.cache_clear()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()


def prepare_engines() -> None:
    """Makes engines of this process and of its forks start sooner.

    vLLM inspects classes of models here. It starts an interpreter for each of them, which imports
    vLLM, so that CUDA stays uninitialised. And it registers its kernels for CPUs once: it searches
    all modules for every engine, and wraps what it wrapped for the last one.
    """
    from vllm.model_executor.models import registry
    from vllm.platforms.cpu import CpuPlatform

    registry._run_in_subprocess = lambda inspect: inspect()
    register = cache(CpuPlatform.register_triton_kernel_overrides)
    CpuPlatform.register_triton_kernel_overrides = staticmethod(register)


# -- in the server ---------------------------------------------------------------------------


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    # Nothing but answers goes to the tests.
    os.dup2(2, 1)
    for name in _MODULES:
        # A release of vLLM may lack a module; a fork imports its own one, only later.
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    prepare_engines()
    current_platform = importlib.import_module("vllm.platforms").current_platform
    with warnings.catch_warnings():
        # It reads every name of every module, deprecated ones too.
        warnings.simplefilter("ignore")
        current_platform.register_triton_kernel_overrides()
    assert threading.active_count() == 1, threading.enumerate()
    # Building an engine collects garbage several times: not among all that was imported.
    gc.freeze()
    for line in sys.stdin:
        job = json.loads(line)
        pid = os.fork()
        if pid == 0:
            answers.close()
            _run(job)
        answers.write(f"{_wait(pid, time.monotonic() + job['timeout_s'])}\n")
        answers.flush()


def _wait(pid: int, deadline: float) -> int:
    """Exit status of a job, negative for a signal; -SIGALRM where time ran out."""
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return -signal.SIGALRM
        time.sleep(0.02)


def _run(job: dict[str, Any]) -> None:
    """The rest of a forked process."""
    status = 1
    try:
        with open(os.devnull) as nothing, open(job["log"], "w") as log:
            os.dup2(nothing.fileno(), 0)
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        os.environ.update(job["env"])
        _hide_amx()
        importlib.import_module(job["module"]).main(*job["args"])
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Ends of interpreters with engines in them hang now and then; nothing is to be kept.
        os._exit(status)


def _hide_amx() -> None:
    """Hides AMX from vLLM where SPECPLUG_CPU_ISA limits the package's kernels to less: vLLM lays
    out its bfloat16 caches for AMX, and only a kernel with AMX reads those in place."""
    import torch

    # Not by the plugin, which plain engines must not see.
    if os.environ.get("SPECPLUG_CPU_ISA", "amx") not in ("", "amx", "reference"):
        torch.cpu._is_amx_tile_supported = lambda: False


if __name__ == "__main__":
    _serve()
