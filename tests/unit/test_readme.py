# SPDX-License-Identifier: Apache-2.0
"""What the README and the pages in docs/ promise exists."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from scripts import checkpoint_table, options_table
from vllm_specplug.cli import app
from vllm_specplug.registry import method_names

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]

FILES = [
    str(file.relative_to(ROOT))
    for folder in (
        "vllm_specplug",
        "kernels",
        "csrc",
        "tests",
        "scripts",
        "tools",
        "bench",
        "examples",
    )
    for file in (ROOT / folder).rglob("*.*")
] + [file.name for file in ROOT.iterdir()]


def page_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_readme_is_short() -> None:
    assert len(README.splitlines()) <= 120


def test_table_of_checkpoints_is_the_one_the_checks_make() -> None:
    script = checkpoint_table
    listed = {*script.BLOCK_HEADS, *script.EAGLE3_HEADS}
    published = {
        name
        for module in (script.block, script.eagle3)
        for name, value in vars(module).items()
        if isinstance(value, dict)
        and {"architectures", "hidden_act"} <= {*value, *value.get("transformer_layer_config", {})}
    }
    assert published <= listed
    assert script.table() in script.PAGE.read_text(), "run scripts/checkpoint_table.py --write"


@pytest.mark.parametrize("folder", sorted((ROOT / "heads").iterdir()), ids=lambda path: path.name)
def test_a_model_card_has_the_numbers_of_its_head(folder: Path) -> None:
    card = (folder / "README.md").read_text()
    made = json.loads((folder / "provenance.json").read_text())
    progress, heldout = made["progress"], made["heldout"]
    assert f"# {folder.name}\n" in card
    for number in (progress["step"], progress["slots_trained"], made["data"]["sequences"]):
        assert f" {number:,} " in card.replace("\n", " ")
    lengths = heldout["mean_acceptance_length"].values()
    assert [line for line in lengths if f" {line:.2f} |" not in card] == []
    assert f" {heldout['sequences']} held-out" in card.replace("\n", " ")


def test_options_table_is_the_one_the_code_makes() -> None:
    assert options_table.tables() in options_table.PAGE.read_text(), (
        "run scripts/options_table.py --write"
    )


def test_methods_of_the_readme_are_those_that_exist() -> None:
    table = README.partition("| `method` | Drafts |")[2].partition("\n\n")[0]
    assert tuple(re.findall(r"^\| \[`(\w+)`\]", table, re.MULTILINE)) == method_names()


def cells(text: str, after: str, before: str) -> list[list[str]]:
    """Rows of the table between two marks of a page, its rule left out."""
    lines = text.partition(after)[2].partition(before)[0].splitlines()
    rows = [[c.strip(" *") for c in x.strip("|").split("|")] for x in lines if x.startswith("|")]
    return [row for row in rows if not set(row[0]) <= set("-:")]


def test_numbers_of_the_readme_are_those_measured() -> None:
    results = (ROOT / "bench" / "results" / "lookups.md").read_text()
    # Tokens/s of plain decoding, then the ratio of each other system to it.
    measured: dict[str, list[str]] = {}
    for load, _, rate, over_plain, *_ in cells(results, "| load |", "\n\n"):
        shown = measured.setdefault(load.removesuffix(" at once"), [])
        shown.append(over_plain.partition(" (")[0] if shown else f"{rate} tokens/s")
    _, *rows = cells(README, "<!-- numbers -->", "<!-- /numbers -->")
    assert {row[0]: row[1:] for row in rows} == measured


def test_gpu_numbers_of_the_readme_are_those_measured() -> None:
    page = (ROOT / "bench" / "results" / "gpu_speed.md").read_text()
    _, *plain = cells(page, "## Plain decoding, compiled", "##")
    header, *speeds = cells(page, "## Speed-up over plain decoding, compiled", "##")
    (_, _, *arms), *shown = cells(README, "<!-- GPU numbers -->", "<!-- /GPU numbers -->")
    rates = {batch: f"{rate} tokens/s" for batch, rate, _ in plain}
    names = {"adaptive (default)": "auto", "vLLM's chain of 15": "vLLM chain of 15"}
    columns = [
        header.index(
            names.get(arm, f"{re.sub(r'(trees )?of ', '', arm).removesuffix(' nodes')} nodes")
        )
        for arm in arms
    ]
    measured = {
        line[0]: [rates[line[0]], *(line[column] for column in columns)]
        for line in speeds
        if line[1] == "GSM8K"
    }
    assert len(shown) == 3 and all(measured[batch] == row for batch, *row in shown)


def test_make_targets_and_commands_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    known = {command.name or command.callback.__name__ for command in app.registered_commands}
    for page in PAGES:
        text = page.read_text()
        for target in set(re.findall(r"(?:^|`)make ([\w-]+)", text, re.MULTILINE)):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), (page, f"make {target}")
        for command in set(re.findall(r"(?:^|`)specplug ([a-z]+)\b", text, re.MULTILINE)):
            assert command in known, (page, f"specplug {command}")


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_lead_somewhere(page: Path) -> None:
    for link, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]+))?\)", page.read_text()):
        if "://" in link:
            continue
        target = page.parent / link if link else page
        assert target.exists(), link
        if anchor:
            assert anchor in heading_anchors(target.read_text()), (link, anchor)


# Pages that name files of other projects.
FOREIGN = {"comparison", *(page.stem for page in (ROOT / "docs" / "notes" / "upstream").iterdir())}


@pytest.mark.parametrize("page", [p for p in PAGES if p.stem not in FOREIGN], ids=page_name)
def test_files_that_pages_name_exist(page: Path) -> None:
    text = re.sub(r"`[^`]+`\s+of\s+commit", "", page.read_text())
    for name in set(re.findall(r"`([\w/.]+\.(?:py|cpp|h|toml))(?:::\w+)?`", text)):
        is_vllms = name.startswith(("v1/", "vllm/", "tests/v1/"))
        assert is_vllms or any(f"/{file}".endswith(f"/{name}") for file in FILES), name


def test_links_of_the_alerts_lead_somewhere() -> None:
    rules = (ROOT / "examples" / "prometheus_rules.yml").read_text()
    links = re.findall(r"^ +docs: ([\w/]+\.md)#(\S+)$", rules, re.MULTILINE)
    assert len(links) == rules.count("- alert:")
    for page, anchor in links:
        assert anchor in heading_anchors((ROOT / page).read_text()), (page, anchor)


def heading_anchors(text: str) -> set[str]:
    """Anchors of the headings of a page, as code hosts and the site make them."""
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).lower().replace(" ", "-") for title in titles}


def test_every_page_can_be_found_from_the_index() -> None:
    seen: set[Path] = set()
    todo = [ROOT / "docs" / "index.md"]
    while todo:
        page = todo.pop()
        if page in seen or page.suffix != ".md":
            continue
        seen.add(page)
        links = re.findall(r"\]\(([^)#\s]+)", page.read_text())
        todo += [(page.parent / link).resolve() for link in links if "://" not in link]
    assert set(PAGES) <= seen


def test_every_row_of_the_feature_table_names_a_test_that_exists() -> None:
    page = (ROOT / "docs" / "compatibility.md").read_text()
    table = page.partition("| vLLM feature | with trees | test |")[2].partition("\n\n")[0]
    rows = [line.strip("|").split("|") for line in table.strip().splitlines()[1:]]
    assert len(rows) > 30
    for feature, answer, tests in rows:
        assert answer.strip(), feature
        if tests.strip() == "vLLM's own":
            continue
        named = re.findall(r"`([^`]+)`", tests)
        assert named, feature
        file = ""
        for test in named:
            # Without a file it is in that of the test before.
            file = test.partition("::")[0] if "::" in test else file
            assert is_in_make_test(file, test.rpartition("::")[2]), (feature, test)


def is_in_make_test(file: str, name: str) -> bool:
    """Whether a test exists and `make test` runs it."""
    tree = ast.parse((ROOT / "tests" / file).read_text())
    found = [x for x in tree.body if isinstance(x, ast.FunctionDef) and x.name == name]
    marks = [x for x in tree.body if isinstance(x, ast.Assign) and "pytestmark" in ast.unparse(x)]
    marked = [ast.unparse(x) for x in (*(y for f in found for y in f.decorator_list), *marks)]
    return bool(found) and not any(
        re.search(r"\bpytest\.mark\.full\b", text) and "param(" not in text for text in marked
    )
