# SPDX-License-Identifier: Apache-2.0
"""Prompts for on-policy data: read from files, or made from what is on the machine.

A prompt is a `Prompt(source, messages)`. The makers are deterministic in their `random.Random`
and yield new prompts until their raw material runs out; a caller takes what it needs.
"""

from __future__ import annotations

import ast
import gettext
import json
import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from vllm_specplug.train import prompt_templates as templates


@dataclass(frozen=True)
class Prompt:
    """One chat prompt.

    `source` names the maker (kept with the data for statistics), `messages` are chat messages,
    or `prefix_text` is raw text that is tokenised without a chat template.
    """

    source: str
    messages: tuple[dict[str, str], ...] = ()
    prefix_text: str | None = None
    stop: tuple[str, ...] = field(default=())

    @staticmethod
    def user(source: str, text: str) -> Prompt:
        """A prompt of a single user turn."""
        return Prompt(source, ({"role": "user", "content": text},))


def read_prompt_file(path: str | Path) -> Iterator[Prompt]:
    """Prompts of a JSONL file: each row has `messages`, `turns` (first), `prompt` or `question`.

    Raises ValueError naming file and line where a row has none of them.
    """
    path = Path(path)
    source = path.stem
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{path}:{number} is not JSON ({error}); one object a line"
                ) from None
            if row.get("messages"):
                yield Prompt(source, tuple(row["messages"]))
                continue
            if row.get("turns"):
                yield Prompt.user(source, row["turns"][0])
                continue
            text = row.get("prompt") or row.get("question")
            if not isinstance(text, str):
                raise ValueError(
                    f"{path}:{number} has none of the keys 'messages', 'turns', 'prompt', "
                    f"'question' (found {sorted(row)}); add one of them"
                )
            yield Prompt.user(source, text)


def topic_prompts(rng: random.Random) -> Iterator[Prompt]:
    """Chat questions: a template of a task family over a topic, an audience, a form."""
    families = list(templates.FAMILIES)
    while True:
        family = rng.choice(families)
        template = rng.choice(templates.FAMILIES[family])
        yield Prompt.user(f"topic/{family}", templates.fill(template, rng))


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
    """Complete-this-function prompts from documented functions of the Python installation,
    mixed with short programming tasks from templates."""
    roots = [Path(sysconfig.get_paths()["stdlib"]), Path(sysconfig.get_paths()["purelib"])]
    files = [p for root in roots for p in root.rglob("*.py") if "/tests/" not in str(p)]
    files = sorted(set(files))
    rng.shuffle(files)
    for path in files:
        stubs = list(_function_stubs(path))
        rng.shuffle(stubs)
        for stub in stubs[:3]:
            if rng.random() < 0.4:
                stub = rng.choice(templates.CODE_IMPORTS) + "\n\n\n" + stub
            yield Prompt.user(
                "code/complete", rng.choice(templates.CODE_COMPLETE).format(stub=stub)
            )
            if rng.random() < 0.8:
                task = templates.fill(rng.choice(templates.CODE_TASKS), rng)
                yield Prompt.user("code/task", task)


def puzzle_prompts(rng: random.Random) -> Iterator[Prompt]:
    """Function stubs with invented examples: name, typed arguments, docstring, doctest lines."""
    while True:
        stub = templates.function_stub(rng)
        yield Prompt.user("code/puzzle", rng.choice(templates.CODE_COMPLETE).format(stub=stub))


def _paragraphs(path: Path) -> Iterator[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return
    block: list[str] = []
    for line in [*text.splitlines(), ""]:
        stripped = line.strip()
        if stripped and stripped[0].isalnum() and "|" not in stripped:
            block.append(stripped)
            continue
        paragraph = " ".join(block)
        block = []
        letters = sum(c.isalpha() or c.isspace() for c in paragraph)
        if 200 <= len(paragraph) <= 1800 and letters > 0.9 * len(paragraph):
            yield paragraph


def document_texts(rng: random.Random, extra_roots: tuple[Path, ...] = ()) -> Iterator[str]:
    """Prose found on the machine: documentation and package descriptions, 200-3000 characters."""
    roots = [Path(sysconfig.get_paths()["purelib"]), Path("/usr/share/doc"), *extra_roots]
    names = ("*.md", "*.rst", "METADATA", "README*")
    files = sorted({p for root in roots if root.is_dir() for n in names for p in root.rglob(n)})
    rng.shuffle(files)
    for path in files:
        paragraphs = list(_paragraphs(path))
        taken = 0
        while paragraphs and taken < 3:
            count = min(len(paragraphs), rng.randint(1, 3))
            yield " ".join(paragraphs[:count])[:3000]
            del paragraphs[:count]
            taken += 1


def document_prompts(texts: Iterator[str], rng: random.Random) -> Iterator[Prompt]:
    """Summaries and questions over given texts."""
    for text in texts:
        if rng.random() < 0.6:
            yield Prompt.user("document/summary", rng.choice(templates.SUMMARIES).format(text=text))
        else:
            question = rng.choice(templates.DOCUMENT_QUESTIONS)
            yield Prompt.user("document/question", f"{text}\n{question}")


def translation_prompts(
    rng: random.Random, language: str = "de", name: str = "German"
) -> Iterator[Prompt]:
    """Sentences to translate, from the machine's message catalogues (empty where there are none)
    and from a small sentence grammar."""
    sentences: list[str] = []
    for catalogue in sorted(Path("/usr/share/locale", language, "LC_MESSAGES").glob("*.mo")):
        try:
            with catalogue.open("rb") as stream:
                messages = gettext.GNUTranslations(stream)._catalog  # type: ignore[attr-defined]
        except (OSError, ValueError, UnicodeDecodeError):
            continue
        for text in messages.values():
            plain = isinstance(text, str) and not any(c in text for c in "%<>{}$|\\=\n")
            if plain and 60 <= len(text) <= 300:
                sentences.append(text)
    rng.shuffle(sentences)
    while True:
        if sentences and (language != "de" or rng.random() < 0.4):
            sentence = sentences.pop()
        elif language == "de":
            sentence = templates.german_sentence(rng)
        else:
            return
        yield Prompt.user("translation", f"Translate {name} to English: {sentence}")


def self_instruct_prefixes(rng: random.Random, system_prompts: bool = True) -> Iterator[Prompt]:
    """Chat prefixes that end where a user would speak: the target itself writes the user turn.

    Half of them carry a system prompt about a topic, which spreads the turns over subjects.
    """
    while True:
        system = templates.DEFAULT_SYSTEM
        if system_prompts and rng.random() < 0.6:
            system = templates.fill(rng.choice(templates.SELF_INSTRUCT_SYSTEMS), rng)
        yield Prompt(
            "self",
            prefix_text=f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n",
            stop=("<|im_end|>",),
        )


def article_prompts(rng: random.Random) -> Iterator[Prompt]:
    """Requests for news and encyclopedia texts, later used as documents."""
    while True:
        yield Prompt.user("article", templates.fill(rng.choice(templates.ARTICLES), rng))
