# SPDX-License-Identifier: Apache-2.0
"""Prompts for on-policy data: read from files, or made from templates and files of the machine.

The makers are deterministic in their `random.Random` and yield prompts until their material runs
out; a caller takes what it needs.
"""

from __future__ import annotations

import ast
import random
import re
import sysconfig
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vllm_specplug.rows import LeftOut, RowFile

_DATA = tomllib.loads(Path(__file__).with_name("prompts.toml").read_text(encoding="utf-8"))


def _words(text: str) -> list[str]:
    """Entries of a list separated by "|"; a line break counts as a space."""
    return [" ".join(entry.split()) for entry in text.split("|")]


_SLOTS = {name: _words(text) for name, text in _DATA["slots"].items()}
_SLOTS["n"] = [str(number) for number in range(2, 60)]
_FAMILIES: dict[str, list[str]] = _DATA["families"]
_TEMPLATES: dict[str, list[str]] = _DATA["templates"]


def fill(template: str, rng: random.Random) -> str:
    """Replaces every `{slot}` by a random word of its list."""
    return re.sub(r"\{(\w+)\}", lambda slot: rng.choice(_SLOTS[slot[1]]), template)


def _filled(kind: str, rng: random.Random) -> str:
    """A random template of a kind, filled."""
    return fill(rng.choice(_TEMPLATES[kind]), rng)


@dataclass(frozen=True)
class Prompt:
    """One chat prompt; `source` names its maker, for statistics, and `place` its row."""

    source: str
    messages: tuple[dict[str, str], ...] = ()
    opens_user_turn: bool = False
    """Whether the prompt ends where a user would speak after `messages`."""
    place: str = ""

    @staticmethod
    def user(source: str, text: str) -> Prompt:
        """A prompt of a single user turn."""
        return Prompt(source, ({"role": "user", "content": text},))


def read_prompt_file(path: str | Path, left_out: LeftOut) -> Iterator[Prompt]:
    """Yields the prompts of a file's rows (see `rows`), without the answers that the rows hold.

    Rows without a prompt are counted, and so are later turns, which depend on an answer.
    """
    rows = RowFile(path)
    for index in range(len(rows)):
        conversation, place = rows.conversation(index, left_out), rows.place(index)
        if conversation is None:
            continue
        messages = conversation.asked()
        if conversation.text:
            messages = ({"role": "user", "content": conversation.text},)
        if conversation.follow_ups:
            left_out.add("later turns of a prompt", place)
        yield Prompt(rows.path.stem, messages, place=place)


def topic_prompts(rng: random.Random) -> Iterator[Prompt]:
    """Chat questions of several task families."""
    families = list(_FAMILIES)
    while True:
        family = rng.choice(families)
        yield Prompt.user(f"topic/{family}", fill(rng.choice(_FAMILIES[family]), rng))


def _function_stubs(path: Path) -> Iterator[str]:
    """Signature plus docstring of the documented functions of one Python file."""
    try:
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError, RecursionError):
        return
    lines = source.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or len(node.body) < 2:
            continue
        doc = ast.get_docstring(node)
        if doc is None or not 30 <= len(doc) <= 700:
            continue
        if any(arg.arg in ("self", "cls") for arg in node.args.args):
            continue
        end = node.body[0].end_lineno
        stub = lines[node.lineno - 1 : end]
        indent = len(stub[0]) - len(stub[0].lstrip())
        yield "\n".join(
            line[indent:] if line[:indent].isspace() or not indent else line for line in stub
        )


def code_prompts(rng: random.Random) -> Iterator[Prompt]:
    """Prompts to complete documented functions of the Python installation, mixed with short
    programming tasks."""
    roots = [Path(sysconfig.get_paths()["stdlib"]), Path(sysconfig.get_paths()["purelib"])]
    files = [p for root in roots for p in root.rglob("*.py") if "/tests/" not in str(p)]
    files = sorted(set(files))
    rng.shuffle(files)
    for path in files:
        stubs = list(_function_stubs(path))
        rng.shuffle(stubs)
        for stub in stubs[:3]:
            if rng.random() < 0.4:
                stub = rng.choice(_TEMPLATES["code_imports"]) + "\n\n\n" + stub
            yield Prompt.user("code/complete", _completion(stub, rng))
            if rng.random() < 0.8:
                yield Prompt.user("code/task", _filled("code_tasks", rng))


def _completion(stub: str, rng: random.Random) -> str:
    return rng.choice(_TEMPLATES["code_complete"]).format(stub=stub)


def self_instruct_prompts(rng: random.Random) -> Iterator[Prompt]:
    """Prompts that end where a user would speak: the target writes the user turn.

    Part of them have a system message about a topic, which makes the turns more diverse.
    """
    while True:
        system: tuple[dict[str, str], ...] = ()
        if rng.random() < 0.6:
            system = ({"role": "system", "content": _filled("systems", rng)},)
        yield Prompt("self", system, opens_user_turn=True)
