# SPDX-License-Identifier: Apache-2.0
"""`specplug options` in a terminal and as JSON."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

import vllm_specplug.cli as cli
from vllm_specplug.options import tree_option_names
from vllm_specplug.registry import method_names

runner = CliRunner()


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
    # No word is cut: the text is that of the JSON but for white space.
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
