# SPDX-License-Identifier: Apache-2.0
"""What the README promises exists."""

from __future__ import annotations

import re

import pytest

from tests.unit.scripts import ROOT, load_script
from vllm_specplug.cli import app
from vllm_specplug.config import tree_option_names

README = (ROOT / "README.md").read_text()


def test_options_table_is_the_one_the_code_makes() -> None:
    script = load_script("options_table")
    assert script.with_table(README) == README, "run scripts/options_table.py --write"


def test_every_option_has_type_default_range_and_meaning() -> None:
    rows = load_script("options_table").option_rows()
    names = [row[0].strip("`") for row in rows]
    assert names == ["method", "model", "num_speculative_tokens", *tree_option_names()]
    assert all(len(row) == 5 and all(row) for row in rows)
    by_name = dict(zip(names, rows, strict=True))
    assert by_name["tree_width"][1:4] == ("int", "`8`", "1..64")
    assert by_name["causal"][1:4] == ("bool", "unset", "`true`, `false`")


def test_options_table_needs_its_markers() -> None:
    with pytest.raises(ValueError, match="lacks the markers"):
        load_script("options_table").with_table("no markers")


def test_make_targets_and_commands_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"(?:^|`)make (\w+)", README, re.MULTILINE)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make {target}"
    known = {command.name or command.callback.__name__ for command in app.registered_commands}
    for command in set(re.findall(r"specplug ([a-z]+)\b", README)):
        assert command in known, f"specplug {command}"


def test_links_lead_somewhere() -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / link).exists(), link


def test_every_row_of_the_feature_table_names_a_test_that_exists() -> None:
    table = README.partition("| vLLM feature | with trees | test |")[2].partition("\n\n")[0]
    rows = [line.strip("|").split("|") for line in table.strip().splitlines()[1:]]
    assert len(rows) > 30
    for feature, answer, test in rows:
        assert answer.strip(), feature
        if test.strip() == "vLLM's own":
            continue
        file, _, name = test.strip().strip("`").partition("::")
        text = (ROOT / "tests" / file).read_text()
        assert re.search(rf"^def {name}\(", text, re.MULTILINE), (feature, test)
        assert "pytest.mark.full" not in text, f"`make test` leaves out {test}"
