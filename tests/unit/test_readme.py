# SPDX-License-Identifier: Apache-2.0
"""What the README and the pages in docs/ promise exists."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from tests.unit.scripts import ROOT, load_script
from vllm_specplug.cli import app
from vllm_specplug.option_docs import method_options, shared_options
from vllm_specplug.options import tree_option_names
from vllm_specplug.registry import method_names, methods

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
    script = load_script("checkpoint_table")
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
    script = load_script("options_table")
    assert script.tables() in script.PAGE.read_text(), "run scripts/options_table.py --write"


def test_every_option_has_type_default_range_and_meaning() -> None:
    shared = shared_options()
    names = [row[0].strip("`") for row in shared]
    assert names == ["method", "model", "num_speculative_tokens", *tree_option_names()]
    own = [row for method in methods().values() for row in method_options(method)]
    rows = [*shared, *own]
    assert all(len(row) == 5 and all(row) for row in rows)
    by_name = {row[0].strip("`"): row for row in rows}
    assert by_name["tree_width"][1:4] == ("int", "`8`", "1..64")
    assert by_name["local_head"][1:4] == ("string", "unset", "a path")


def test_methods_of_the_readme_are_those_that_exist() -> None:
    table = README.partition("| `method` | Drafts |")[2].partition("\n\n")[0]
    assert tuple(re.findall(r"^\| \[`(\w+)`\]", table, re.MULTILINE)) == method_names()


def test_numbers_of_the_readme_are_those_measured() -> None:
    results = (ROOT / "bench" / "results" / "lookups.md").read_text()
    # Tokens/s of plain decoding, then the ratio of each other system to it.
    measured: dict[str, list[str]] = {}
    table = results[results.index("| load |") :].partition("\n\n")[0]
    for line in table.splitlines()[2:]:
        load, _, rate, over_plain = [cell.strip() for cell in line.strip("|").split("|")][:4]
        shown = measured.setdefault(load.removesuffix(" at once"), [])
        shown.append(over_plain.partition(" (")[0] if shown else f"{rate} tokens/s")
    section = README.partition("<!-- numbers -->")[2].partition("<!-- /numbers -->")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")][2:]
    cells = [[cell.strip(" *") for cell in row.strip("|").split("|")] for row in rows]
    assert {row[0]: row[1:] for row in cells} == measured


def test_gpu_numbers_of_the_readme_are_those_measured() -> None:
    page = (ROOT / "bench" / "results" / "gpu_speed.md").read_text()

    def rows(text: str) -> list[list[str]]:
        lines = [line for line in text.splitlines() if line.startswith("|")]
        return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]

    plain = page.partition("## Plain decoding, compiled")[2].partition("##")[0]
    speeds = page.partition("## Speed-up over plain decoding, compiled")[2].partition("##")[0]
    header, _, *cells = rows(speeds)
    (_, _, *shown_arms), _, *shown = rows(
        README.partition("<!-- GPU numbers -->")[2].partition("<!-- /GPU numbers -->")[0]
    )
    rates = {batch: f"{rate} tokens/s" for batch, rate, _ in rows(plain)[2:]}
    names = {"adaptive (default)": "auto", "vLLM's chain of 15": "vLLM chain of 15"}
    columns = [
        header.index(
            names.get(arm, f"{re.sub(r'(trees )?of ', '', arm).removesuffix(' nodes')} nodes")
        )
        for arm in shown_arms
    ]
    measured = {
        line[0]: [rates[line[0]], *(line[column] for column in columns)]
        for line in cells
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
