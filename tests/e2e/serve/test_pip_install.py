# SPDX-License-Identifier: Apache-2.0
"""The README's way with pip, as written, from an empty environment to a served answer."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_specplug.presets import speculative_config
from vllm_specplug.targets import prepare_target

# Packages are fetched and kernels compiled.
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(2400)]

ROOT = Path(__file__).resolve().parents[3]
SECTION = "## With your own model"
# One prompt through the installed package, as `vllm serve` would start it.
ANSWER = """
import sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(sys.argv[1], speculative_config={config}, max_model_len=256, enforce_eager=True)
    [output] = llm.generate(["The"], SamplingParams(temperature=0, max_tokens=8))
    print("tokens:", len(output.outputs[0].token_ids))
"""


def recipe() -> list[str]:
    """The commands of the README's section, without their comments."""
    section = (ROOT / "README.md").read_text().partition(SECTION)[2]
    block = section.partition("```\n")[2].partition("```")[0]
    return [re.sub(r"\s+#.*", "", line) for line in block.splitlines()]


def copy_of_sources(folder: Path) -> Path:
    """The files a clone has: what was built here would be taken for the build's own."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, check=True,
    ).stdout.decode().split("\0")  # fmt: skip
    kept = ("vllm_specplug/", "kernels/", "csrc/", "pyproject", "setup.py", "README", "MANIFEST")
    for name in [*filter(lambda name: name.startswith(kept), names), "LICENSE"]:
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())
    return folder


def test_the_recipe_ends_in_an_environment_that_serves(tmp_path: Path) -> None:
    *commands, serve = recipe()
    assert [line.split()[:2] for line in commands] == [
        ["pip", "install"], ["pip", "install"], ["specplug", "doctor"],
    ] and serve.startswith("vllm serve MODEL")  # fmt: skip
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    source = copy_of_sources(tmp_path / "source")
    environment = {**os.environ, "PATH": f"{venv}/bin:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
    # Of the environment that runs this test.
    for name in ("PYTHONPATH", "VLLM_CPU_KVCACHE_SPACE", "VIRTUAL_ENV"):
        environment.pop(name, None)

    def run(command: str | list[str]) -> str:
        done = subprocess.run(
            command, shell=isinstance(command, str), cwd=source, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}"
        return done.stdout

    for command in commands[:2]:
        run(command)
    # Before the repair: the message is short and names the next line of the recipe.
    broken = subprocess.run(
        "specplug doctor", shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    said = " ".join(broken.stdout.split())
    assert broken.returncode == 1 and "Run `specplug doctor --fix`" in said, said
    assert len(broken.stdout.splitlines() + broken.stderr.splitlines()) < 25
    assert re.search(r"^self test / ok +yes", run(commands[2]), re.MULTILINE)
    assert run("vllm --version").strip().endswith("0.32.0+cpu")
    python, script = str(venv / "bin/python"), tmp_path / "answer.py"
    script.write_text(ANSWER.format(config=speculative_config("smollm2", "jetspec")))
    answer = [python, str(script), str(prepare_target("smollm2"))]
    assert "tokens: 8" in run(answer)

    # A wheel of the source archive, for all Python versions, serves too.
    run([python, "-c", "from setuptools import build_meta; build_meta.build_sdist('dist')"])
    (archive,) = source.glob("dist/*.tar.gz")
    run(
        [
            "pip",
            "wheel",
            "--no-build-isolation",
            "--no-deps",
            f"--wheel-dir={tmp_path}",
            str(archive),
        ]
    )
    (wheel,) = tmp_path.glob("*-cp311-abi3-linux_x86_64.whl")
    run(["pip", "uninstall", "--yes", "vllm-specplug"])
    run(["pip", "install", "--no-deps", str(wheel)])
    assert "tokens: 8" in run(answer)
