# SPDX-License-Identifier: Apache-2.0
"""The commands, without what they start."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import vllm_specplug.bench.demo as demo_module
import vllm_specplug.cli as cli
import vllm_specplug.presets as presets
import vllm_specplug.targets as targets
from vllm_specplug.bench.server import ServerError
from vllm_specplug.cpu_environment import Problems
from vllm_specplug.options import tree_option_names
from vllm_specplug.registry import method_names

runner = CliRunner()


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A prepared target and a shipped head, without preparing or shipping anything."""
    folder = tmp_path / "target"

    def prepare(name: str, progress: Any) -> Path:
        targets.get_target(name)
        progress("preparing, step by step")
        return folder

    monkeypatch.setattr(targets, "prepare_target", prepare)
    monkeypatch.setattr(presets, "shipped_head", lambda folder: tmp_path / "head")
    return folder


def test_help_lists_every_command_and_imports_nothing_heavy() -> None:
    script = (
        "import sys; sys.argv = ['specplug', '--help']\n"
        "from vllm_specplug.cli import main\n"
        "try: main()\n"
        "except SystemExit as leave: assert not leave.code\n"
        "assert not {'torch', 'vllm', 'transformers'} & set(sys.modules)\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    for command in (
        "doctor",
        "demo",
        "inspect",
        "target",
        "config",
        "data",
        "train",
        "evaluate",
    ):
        assert f"\n  {command} " in result.stdout


def test_target_prints_only_the_path_on_stdout(prepared: Path) -> None:
    result = runner.invoke(cli.app, ["target", "smollm2"])
    assert result.exit_code == 0
    assert result.stdout == f"{prepared}\n"
    assert "step by step" in result.stderr


def test_a_target_that_cannot_be_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_index(name: str, progress: Any) -> Path:
        raise targets.TargetError("downloading failed. Check that pip can reach a package index")

    monkeypatch.setattr(targets, "prepare_target", no_index)
    result = runner.invoke(cli.app, ["target"])
    assert result.exit_code == 1
    assert "preparing target 'smollm2': downloading failed. Check" in result.stderr


def test_config_prints_ready_json(prepared: Path) -> None:
    result = runner.invoke(cli.app, ["config", "smollm2", "jetspec", "--nodes", "24"])
    assert result.exit_code == 0
    config = json.loads(result.stdout)
    assert config["method"] == "jetspec" and config["num_speculative_tokens"] == 24
    assert config["model"] == str(prepared.parent / "head")
    result = runner.invoke(cli.app, ["config", "smollm2", "ngram_tree"])
    assert json.loads(result.stdout) == {"method": "ngram_tree"}


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("target llama", "known: smollm2"),
        ("config llama jetspec", "known: smollm2"),
        ("config smollm2 medusa", "known: assistant_tree, ddtree, dels, dflash2_tree"),
        ("config smollm2 jetspec --nodes 0", "--nodes"),
        ("demo --model m", "add --head"),
        ("demo --method ngram_tree --head /nothing", "legal: none with --method ngram_tree"),
        ("demo --head /nothing", "'/nothing' is not usable: there is no such folder"),
        ("doctor --target /nothing", "/nothing"),
        ("options jetspek", "Did you mean 'jetspec'?"),
    ],
)
def test_wrong_arguments_are_named(command: str, words: str) -> None:
    result = runner.invoke(cli.app, command.split())
    assert (result.exit_code, result.stdout) == (2, "") and words in result.stderr


@pytest.mark.parametrize("ok", [True, False])
def test_doctor_prints_its_report(monkeypatch: pytest.MonkeyPatch, ok: bool) -> None:
    asked: list[dict[str, Any]] = []
    kernels = {
        "cute": {"serves": False, "us": None, "why_not": "head size 80 is not one of 64, 96, 128"},
        "flash": {"serves": True, "us": 21.4, "why_not": None},
    }
    shape = "9 query heads over 3 KV heads of 80"
    report = {
        "versions": {"vllm": "0.32.0"}, "problem": None, "self_test": {"seconds": 1.0}, "ok": ok,
        "kernel": {"kernel": "flash", "shape": shape, "kernels": kernels},
    }  # fmt: skip
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(
        "vllm_specplug.engine.doctor.collect", lambda **given: asked.append(given) or report
    )
    arguments = ["doctor", "--target", "some/model", "--tensor-parallel-size", "2"]
    result = runner.invoke(cli.app, arguments)
    assert asked == [{"target": "some/model", "num_ranks": 2}]
    assert result.exit_code == (0 if ok else 1), result.output
    rows = [tuple(line.rsplit(maxsplit=1)) for line in result.stdout.splitlines()]
    shown = {key.strip(): value for key, value in (row for row in rows if len(row) == 2)}
    assert shown["versions / vllm"] == "0.32.0" and shown["self test / seconds"] == "1.0"
    assert shown["problem"] == "-" and shown["ok"] == ("yes" if ok else "NO")
    assert f"Tree attention for {shape}" in result.stdout
    table = [[cell.strip() for cell in line.strip("│").split("│")]
             for line in result.stdout.splitlines() if line.startswith("│")]  # fmt: skip
    assert table == [
        ["cute", "NO", "-", "head size 80 is not one of 64, 96, 128"],
        ["flash (chosen)", "yes", "21", ""],
    ]
    assert "kernel / kernels" not in result.stdout, "the table is the only place"
    result = runner.invoke(cli.app, ["doctor", "--json"])
    assert json.loads(result.stdout) == report


def test_doctor_mends_before_it_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    module = "vllm_specplug.cpu_environment"
    monkeypatch.setattr(f"{module}.find_problems", lambda: Problems(("torchcodec",), False))
    monkeypatch.setattr(f"{module}.repair", lambda problems: done.append(problems.broken[0]))
    monkeypatch.setattr(
        "vllm_specplug.engine.doctor.collect",
        lambda **asked: done.append("report") or {"ok": True},
    )
    result = runner.invoke(cli.app, ["doctor", "--fix"])
    assert result.exit_code == 0 and "repairing: torchcodec" in result.stderr
    assert done == ["torchcodec", "report"]
    assert runner.invoke(cli.app, ["doctor"]).exit_code == 0
    assert done[2:] == ["report"]

    def fail(problems: Problems) -> None:
        raise RuntimeError("externally managed")

    monkeypatch.setattr(f"{module}.repair", fail)
    result = runner.invoke(cli.app, ["doctor", "--fix"])
    assert result.exit_code == 1 and "could not be repaired: externally managed" in result.stderr


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (ServerError("vllm serve (jetspec) exited"), 1, "vllm serve (jetspec) exited"),
        (KeyboardInterrupt(), 130, "the servers are stopped"),
    ],
)
def test_demo_failures(
    prepared: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, status: int, text: str
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(demo_module, "run_demo", fail)
    result = runner.invoke(cli.app, ["demo"])
    assert result.exit_code == status and text in result.stderr


def test_arguments_are_forwarded(monkeypatch: pytest.MonkeyPatch) -> None:
    sub_app = typer.Typer(add_completion=False)

    @sub_app.command()
    def jetspec(steps: int = 1) -> None:
        """Train it."""
        typer.echo(f"steps={steps}")

    @sub_app.command()
    def other() -> None:
        """Another."""

    module = type(sys)("pretend_train")
    module.train_app = sub_app  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm_specplug.train.cli", module)
    result = runner.invoke(cli.app, ["train", "jetspec", "--steps", "7"])
    assert result.exit_code == 0 and "steps=7" in result.stdout
    result = runner.invoke(cli.app, ["train", "--help"])
    assert result.exit_code == 0 and "Train it." in result.stdout
    assert "specplug train" in result.stdout
    assert runner.invoke(cli.app, ["train", "jetspec", "--steps", "x"]).exit_code == 2


def test_missing_extras_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError("No module named 'accelerate'", name="accelerate")

    monkeypatch.setattr(cli.importlib, "import_module", missing)
    result = runner.invoke(cli.app, ["train", "jetspec"])
    assert result.exit_code == 1
    assert "needs the package 'accelerate'" in result.stderr and "[train]" in result.stderr


def _shown(monkeypatch: pytest.MonkeyPatch, method: str, width: int) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(width))
    result = runner.invoke(cli.app, ["options", method])
    assert result.exit_code == 0, result.output
    return [line.rstrip() for line in result.stdout.splitlines()]


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("method", ["tree", *method_names()])
def test_options_fit_a_terminal(monkeypatch: pytest.MonkeyPatch, method: str, width: int) -> None:
    lines = _shown(monkeypatch, method, width)
    assert max(map(len, lines)) <= width
    assert "`" not in "".join(lines)
    # An option begins a line with its whole name; what it means is set in below it.
    starts = [line.split()[0] for line in lines if line and not line.startswith(" ")]
    assert set(tree_option_names()) <= set(starts)
    whole = json.loads(runner.invoke(cli.app, ["options", method, "--json"]).stdout)
    assert starts == [row["option"] for row in whole]
    assert all(all(row.values()) for row in whole)
    # No word is cut: the text differs from the JSON's only in white space.
    text = " ".join(" ".join(lines).split())
    assert all(" ".join(row["meaning"].split()) in text for row in whole)
    # Few lines are nearly empty, as narrow columns would make them.
    filled = [line for line in lines if len(line) > width / 2]
    assert len(lines) < 110 and len(filled) > len(lines) / 3


def test_options_as_json_are_plain_text() -> None:
    rows = json.loads(runner.invoke(cli.app, ["options", "jetspec", "--json"]).stdout)
    assert "`" not in json.dumps(rows)
    by_name = {row["option"]: row for row in rows}
    assert by_name["tree_width"]["default"] == "8" and by_name["tree_width"]["legal"] == "1..64"


def test_the_method_by_head_has_the_shared_options() -> None:
    result = runner.invoke(cli.app, ["options", "tree", "--json"])
    assert result.exit_code == 0, result.output
    names = [row["option"] for row in json.loads(result.stdout)]
    assert names == ["method", "model", "num_speculative_tokens", *tree_option_names()]


def test_all_that_method_takes_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = runner.invoke(cli.app, ["options"])
    assert max(map(len, result.stdout.splitlines())) <= 80
    listed = json.loads(runner.invoke(cli.app, ["options", "--json"]).stdout)
    assert list(listed) == ["tree", *method_names()]
    assert all(f"\n {name} " in result.stdout for name in listed)


def test_version() -> None:
    from vllm_specplug import __version__

    result = runner.invoke(cli.app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"vllm-specplug {__version__}\n")
