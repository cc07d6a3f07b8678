# SPDX-License-Identifier: Apache-2.0
"""Commands of the README and of docs/ run as written, on a machine with a CPU and little memory.

Placeholders become what the repository ships, and amounts of data and training become small.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.serve.doc_commands import commands_of
from vllm_specplug.bench.process_group import ProcessGroup
from vllm_specplug.bench.server import free_port
from vllm_specplug.targets import prepare_target, shipped_head

ROOT = Path(__file__).resolve().parents[3]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
NOT_RUN = {
    r"DFLASH2_HEAD": "no head of this kind is shipped",
    r"^vllm serve [\w.-]+/": "a model of a hub; tests/unit/test_recipes.py checks these commands",
    r" \.\.\.": "abbreviated; the page names what was left out",
    r"^(make|\.venv/bin/)": "the project's own checks, which run without this test",
    r"^pip install": "test_pip_install.py runs the recipe",
    r"^vllm bench sweep": "an hour; test_bench.py runs a shorter one",
    r" --nnodes | --data-parallel-size-local ": "test_nodes.py runs such commands, on two nodes",
    r" --distributed-executor-backend ray": "test_ray.py runs Ray, where it is installed",
    r"--init-from HEAD ": "hours of training on the author's features",
    r"Qwen3-8B": "eight GPUs; the commands for a small model run",
    r"^specplug evaluate": "the data are the user's; test_evaluate.py measures",
}
HEADS = {
    "DFLASH_HEAD": "smollm2-135m-dflash",
    "DSPARK_HEAD": "smollm2-135m-dspark",
    "JETSPEC_HEAD": "smollm2-135m-jetspec",
    "LOCAL_HEAD": "smollm2-135m-dels-gru",
    "HEAD": "smollm2-135m-jetspec",
}
SMALLER = {
    r"=(\d+)\b(?=( |$))": "=3",
    r" --total-steps \d+": " --total-steps 2",
    r"^specplug data features": "specplug data features --heldout-answers 4",
    r"--answers data/answers": "--answers data/answers --heldout-answers 4",
}
STEPS = " --total-steps 2"
TRAINING = ("specplug data ", "specplug train ")


def run_in_full(test: Callable[..., None]) -> Callable[..., None]:
    """Marks a test that starts engines for minutes."""
    return pytest.mark.e2e(pytest.mark.slow(pytest.mark.full(test)))


def all_commands() -> list[str]:
    found = [command for page in PAGES for command in commands_of(page)]
    return list(dict.fromkeys(re.sub(r"\s{2,}#.*", "", command) for command in found))


def reason_not_to_run(command: str) -> str | None:
    return next((why for what, why in NOT_RUN.items() if re.search(what, command)), None)


COMMANDS = all_commands()
RUN = [command for command in COMMANDS if reason_not_to_run(command) is None]
SERVED = [command for command in RUN if command.startswith("vllm serve ")]
TRAINED = [command for command in RUN if command.startswith(TRAINING)]
ASKED = [command for command in RUN if command.startswith("curl ")]
SHORT = [command for command in RUN if command not in (*SERVED, *TRAINED, *ASKED)]


def test_commands_are_found_and_none_is_left_out_without_need() -> None:
    assert len(SERVED) >= 5 and len(TRAINED) >= 7 and len(ASKED) >= 1
    for what in NOT_RUN:
        assert any(re.search(what, command) for command in COMMANDS), f"nothing matches {what}"


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """A user's environment: nothing is set that a page does not name."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "PYTEST"))}
    # Two servers that start at once would each take three quarters of the same free memory.
    memory = {"VLLM_CPU_KVCACHE_SPACE": "1"}
    return {**kept, **memory, "PATH": path, "HF_HUB_OFFLINE": "1"}


def filled_in(command: str) -> str:
    """With the shipped heads and the prepared target in place of placeholders."""
    for name, head in HEADS.items():
        command = re.sub(rf"\b{name}\b", str(shipped_head(head)), command)
    return re.sub(r"\bMODEL\b", str(prepare_target("smollm2")), command)


def run(command: str, environment: dict[str, str], folder: Path) -> str:
    done = subprocess.run(
        ["bash", "-euc", command], env=environment, cwd=folder, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=800,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}"
    return done.stdout


@run_in_full
@pytest.mark.parametrize("command", SHORT)
def test_short_commands_run(command: str, environment: dict[str, str], tmp_path: Path) -> None:
    run(filled_in(command), environment, tmp_path)


@run_in_full
@pytest.mark.parametrize("command", SERVED)
def test_servers_start_and_answer(
    command: str, environment: dict[str, str], tmp_path: Path
) -> None:
    port = free_port()
    # Ended with its shell, which would outlive it.
    whole = f"exec {filled_in(command)} --host 127.0.0.1 --port {port}"
    group = ProcessGroup(["bash", "-euc", whole], tmp_path / "serve.log", environment)
    try:
        wait_for(f"http://127.0.0.1:{port}/health", group)
        for question in ASKED:
            question = question.replace("localhost:8000", f"127.0.0.1:{port}")
            model = '"model": "..."'
            assert model in question and '"prompt": "..."' in question
            question = question.replace(model, f'"model": "{prepare_target("smollm2")}"')
            answer = run(question.replace("curl", "curl -sf", 1), environment, tmp_path)
            assert '"completion_tokens":' in answer
    finally:
        group.stop()


def wait_for(url: str, group: ProcessGroup) -> None:
    for _ in range(3000):
        assert group.returncode() is None, group.log_tail(60)
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.25)
    pytest.fail(f"no answer from {url}\n{group.log_tail(60)}")


@run_in_full
@pytest.mark.timeout(3000)
def test_a_head_is_trained_by_the_commands_in_their_order(
    environment: dict[str, str], tmp_path: Path
) -> None:
    rows = [f'{{"prompt": "Name {n} things that are {what}."}}'
            for n in range(2, 12) for what in ("red", "round", "old")]  # fmt: skip
    (tmp_path / "my_prompts.jsonl").write_text("\n".join(rows) + "\n")
    chats = [{"prompt": f"Count to {n}.", "completion": "One, two, three."} for n in range(10)]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)) + "\n")
    for command in TRAINED:
        command = filled_in(command)
        for what, smaller in SMALLER.items():
            command = re.sub(what, smaller, command)
        trains = command.startswith("specplug train ")
        run(command + STEPS * bool(trains and STEPS not in command), environment, tmp_path)
    for made in ("runs/head/head", "runs/dflash/head", "runs/local/head"):
        assert any((tmp_path / made).glob("*.safetensors")), made
