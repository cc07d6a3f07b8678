# SPDX-License-Identifier: Apache-2.0
"""What the architecture promises about the sources: methods are named in their folders only."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_specplug.registry import method_names

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "vllm_specplug"
METHODS = PACKAGE / "methods"
MAX_LINES = 600


def _sources() -> list[Path]:
    folders = (PACKAGE, ROOT / "kernels/src", ROOT / "bench", ROOT / "scripts", ROOT / "tests")
    return [path for folder in folders for path in folder.rglob("*.py")]


def _words_of_code(source: str) -> Iterator[tuple[int, str]]:
    """Identifiers and string literals with their lines; docstrings and comments have no part."""
    tree = ast.parse(source)
    documentation = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) not in documentation:
                yield line, node.value
            continue
        for name in ("id", "attr", "arg", "name", "asname", "module"):
            value = getattr(node, name, None)
            if isinstance(value, str):
                yield line, value


def _mentions(text: str, name: str) -> bool:
    """Whether a method's name stands in `text` as words: "JetSpec" and "jet_spec" both say
    "jetspec", "models" does not say "dels"."""
    sought = name.replace("_", "")
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+", text)
    joined = "".join(words).lower()
    if sought not in joined:
        return False
    starts, at = {0}, 0
    for word in words:
        starts.add(at := at + len(word))
    places = (found.start() for found in re.finditer(f"(?={re.escape(sought)})", joined))
    return any({place, place + len(sought)} <= starts for place in places)


@pytest.mark.parametrize(
    ("text", "name", "found"),
    [
        ("jetspec", "jetspec", True),
        ("Use method 'jetspec' instead", "jetspec", True),
        ("JetSpecDrafter", "jetspec", True),
        ("make_ngram_tree", "ngram_tree", True),
        ("transformers.models", "dels", False),
        ("NgramBranches", "ngram_tree", False),
    ],
)
def test_a_name_is_found_as_words(text: str, name: str, found: bool) -> None:
    assert _mentions(text, name) == found


def test_only_methods_name_methods() -> None:
    shared = [path for path in PACKAGE.rglob("*.py") if METHODS not in path.parents]
    assert len(shared) > 100
    named = [
        f"{path.relative_to(ROOT)}:{line}: {text!r} names {name}"
        for path in [*shared, *(ROOT / "kernels/src").rglob("*.py")]
        for line, text in _words_of_code(path.read_text())
        for name in method_names()
        if _mentions(text, name)
    ]
    assert not named, "\n".join(named)


def test_no_source_is_too_long() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for path in _sources()
        if (lines := len(path.read_text().splitlines())) > MAX_LINES
    }
    assert not long


# What vLLM's runner holds; the package's own classes share the last few names.
_RUNNER_STATE = {
    "input_batch", "req_states", "block_tables", "requests", "query_start_loc", "_dummy_run",
    "_set_active_loras", "static_forward_context", "compilation_config", "kv_cache_config",
    "get_kv_cache_spec", "max_num_reqs", "max_num_tokens",
}  # fmt: skip


def _reads_of_a_runner(source: str) -> list[str]:
    """Attributes of `_RUNNER_STATE` that code reads from `self`, or from anything called runner."""
    return [
        ast.unparse(node)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute)
        and node.attr in _RUNNER_STATE
        and re.search(
            r"(^|\.)(self|runner|_runner|model_runner|input_batch)$", ast.unparse(node.value)
        )
    ]


def test_one_module_reads_the_state_of_vllms_runner() -> None:
    """Beside the runner itself, which is in another package."""
    paths = (PACKAGE / "vllm_worker").rglob("*.py")
    readers = {path.name: _reads_of_a_runner(path.read_text()) for path in paths}
    assert readers.pop("runner_view.py")
    assert {name: reads for name, reads in readers.items() if reads} == {}


@pytest.mark.parametrize(
    "code",
    ["self.input_batch.num_reqs", "self.model_runner._dummy_run(1)", "x = runner.requests['a']"],
)
def test_a_read_of_the_runners_state_is_noticed(code: str) -> None:
    assert _reads_of_a_runner(code)
