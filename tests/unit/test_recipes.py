# SPDX-License-Identifier: Apache-2.0
"""The pages in docs/recipes/ name published heads, with commands whose options are accepted."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from scripts import checkpoint_table as SCRIPT
from tests.e2e.serve.doc_commands import commands_of
from vllm_specplug.drafting.method import TargetInfo
from vllm_specplug.engine.spec_config import option_names
from vllm_specplug.options import TreeOptions
from vllm_specplug.registry import find_method

ROOT = Path(__file__).resolve().parents[2]
HEADS = {head.hub_id: head for heads in SCRIPT.RECIPES.values() for head in heads}
TARGETS = {head.target for head in HEADS.values()}
PAGES = sorted((ROOT / "docs" / "recipes").glob("*.md"))
# An owner and a name with a digit, as model ids have, neither of them part of a path.
HUB_ID = re.compile(r"(?<![\w./-])([A-Za-z][\w.-]*/[\w.-]*\d[\w.-]*)(?![\w./-])")


def page_name(page: Path) -> str:
    return page.stem


def speculative_configs(page: Path) -> list[tuple[str, dict[str, Any]]]:
    """The target and the `--speculative-config` of each command of a page that serves."""
    found = []
    for command in commands_of(page):
        words = shlex.split(command)
        if words[:2] == ["vllm", "serve"]:
            config = json.loads(words[words.index("--speculative-config") + 1])
            found.append((words[2], config))
    return found


@pytest.mark.parametrize("name", SCRIPT.RECIPES)
def test_tables_and_commands_are_those_the_checks_make(name: str) -> None:
    text = SCRIPT.RECIPE_PAGES[name].read_text()
    made = SCRIPT.recipe(SCRIPT.RECIPES[name])
    assert made in text, "run scripts/checkpoint_table.py --write"


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_hub_ids_are_those_with_a_source(page: Path) -> None:
    named = set(HUB_ID.findall(page.read_text()))
    assert named <= {*HEADS, *TARGETS}
    if page.stem in SCRIPT.RECIPES:
        assert named >= {head.hub_id for head in SCRIPT.RECIPES[page.stem]}


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_options_of_the_commands_are_accepted(page: Path, tmp_path: Path) -> None:
    for number, (target, config) in enumerate(speculative_configs(page)):
        sizes = SCRIPT.block.TINY_TARGET
        if hub_id := config.get("model"):
            head = HEADS[hub_id]
            assert target == head.target
            config["model"] = str(tmp_path / str(number))
            sizes = SCRIPT.make_hub_head(Path(config["model"]), head)
        method = find_method(config["method"], config.get("model"))
        assert method is not None and method.name == config["method"]
        assert set(config) <= set(option_names(method.name))
        TreeOptions(**{k: v for k, v in config.items() if k in TreeOptions.__dataclass_fields__})
        if hub_id:
            own = {k: v for k, v in config.items() if k in method.option_names()}
            shared = SCRIPT.Shared(Path(config["model"]), 16, 8)
            method.parse_options(own).resolve(method.name, shared, TargetInfo(sizes, 64, None))


def test_sizes_are_those_of_the_files() -> None:
    """Beside sizes that public pages show for the files."""
    known = {"z-lab/gpt-oss-20b-DFlash": 1.46, "z-lab/Qwen3.6-27B-DFlash": 3.22}
    for hub_id, gib in known.items():
        assert abs(2 * HEADS[hub_id].parameters() / 2**30 - gib) < 0.01, hub_id
    billions = {"JetSpec/jetspec-qwen3-8b": 1.05, "RedHatAI/gemma-4-31B-it-speculator.eagle3": 2.2}
    for hub_id, count in billions.items():
        assert abs(HEADS[hub_id].parameters() / 1e9 - count) < 0.05, hub_id
