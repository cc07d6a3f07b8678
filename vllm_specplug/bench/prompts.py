# SPDX-License-Identifier: Apache-2.0
"""Prompts to measure with, read from JSONL files of any of the usual shapes."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FIELDS = ("prompt", "turns", "question", "messages")

# A prompt longer than this many characters may not fit the servers' context.
MAX_PROMPT_CHARS = 6000


@dataclass(frozen=True)
class PromptSet:
    """The prompts of one file, in a fixed random order."""

    name: str
    prompts: tuple[str, ...]


def prompt_of(row: Any) -> str:
    """The first user message of one row.

    Rows: `prompt` (text), `turns` (list of texts or messages; the first), `question` (text) or
    `messages` (the first of role user). A row with `prompt` and `entry_point`, which is a HumanEval
    task, is asked for as a completion.

    Raises:
        ValueError: saying what the row lacks.
    """
    if not isinstance(row, Mapping):
        raise ValueError("not a JSON object")
    field = next((name for name in FIELDS if name in row), None)
    if field is None:
        have = ", ".join(row) or "none"
        raise ValueError(f"none of the fields {', '.join(FIELDS)} (fields there: {have})")
    value = row[field]
    if field in ("turns", "messages"):
        if not isinstance(value, list) or not value:
            raise ValueError(f"field {field!r} is not a list with something in it")
        if field == "messages":
            users = (m for m in value if isinstance(m, Mapping) and m.get("role") == "user")
            value = next(users, None)
        else:
            value = value[0]
        if isinstance(value, Mapping):
            value = value.get("content")
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"field {field!r} holds no text")
    return f"Complete this Python function.\n\n{value}" if "entry_point" in row else value


def _set_name(path: Path) -> str:
    return path.stem.removesuffix("_dev").removesuffix("_test")


def read_prompts(path: Path, max_chars: int = MAX_PROMPT_CHARS) -> PromptSet:
    """All prompts of one JSONL file up to `max_chars` long.

    Raises:
        ValueError: when the file is missing, has no usable prompt, or a line cannot be read; the
            message carries the line's number.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"data file {path} cannot be read: {error}.") from error
    prompts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            prompts.append(prompt_of(json.loads(line)))
        except ValueError as error:  # a JSONDecodeError is one
            raise ValueError(f"{path}, line {number}: {error}.") from error
    fitting = [prompt for prompt in prompts if len(prompt) <= max_chars]
    if not fitting:
        raise ValueError(f"{path} holds no prompt of up to {max_chars} characters.")
    random.Random(0).shuffle(fitting)
    return PromptSet(_set_name(path), tuple(fitting))


def load_sets(paths: Sequence[Path], max_chars: int = MAX_PROMPT_CHARS) -> list[PromptSet]:
    """The sets of all `paths`; a folder stands for its *.jsonl files.

    Files of a folder that have "train" in their name are left out: what a head was trained on
    says nothing about prompts it has not seen.

    Raises:
        ValueError: when a path does not exist, a folder has no such file, a file cannot be read, or
            two files would have the same name in tables.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            found = sorted(file for file in path.glob("*.jsonl") if "train" not in file.name)
            if not found:
                raise ValueError(f"folder {path} holds no *.jsonl file to measure with.")
            files += found
        elif path.exists():
            files.append(path)
        else:
            raise ValueError(
                f"{path} does not exist. Point --data at a JSONL file, or a folder of them, with "
                f"one of the fields {', '.join(FIELDS)} in each row."
            )
    sets = [read_prompts(file, max_chars) for file in files]
    names = [prompt_set.name for prompt_set in sets]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two data files are called {name!r}; rename one of them.")
    return sets


def mixed_prompts(sets: Sequence[Sequence[str]], start: int, count: int) -> list[str]:
    """`count` prompts drawn from all sets in turn, beginning at the `start`-th draw.

    Sets are reused from their beginning when they run out.
    """
    draws = range(start, start + count)
    return [sets[i % len(sets)][(i // len(sets)) % len(sets[i % len(sets)])] for i in draws]


def chat_token_ids(target: str, data: Path, count: int, longest: int) -> list[list[int]]:
    """Token ids under the target's chat template of `count` prompts of all files of `data` in turn;
    those of more than `longest` tokens are left out."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(target)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in mixed_prompts([s.prompts for s in load_sets([data])], 0, count)
    ]
    return [ids for ids in prompts if len(ids) <= longest]
