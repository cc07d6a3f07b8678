# SPDX-License-Identifier: Apache-2.0
"""Prompts for measurements, from JSONL files with the usual fields."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_specplug.rows import RowFile, conversation_of

MAX_PROMPT_CHARS = 6000


@dataclass(frozen=True)
class PromptSet:
    """The prompts of a file in a fixed random order."""

    name: str
    prompts: tuple[str, ...]


def prompt_of(row: Any) -> str:
    """Returns the first user message of a row (see `rows`).

    Raises:
        ValueError: for a row without one.
    """
    users = (m["content"] for m in conversation_of(row).messages if m["role"] == "user")
    text = next(users, "")
    if not text.strip():
        raise ValueError("it is raw text, not a prompt")
    return text


def set_name(path: Path) -> str:
    """Returns the name of a data file's set."""
    return path.stem.removesuffix("_dev").removesuffix("_test")


def read_prompts(path: Path, max_chars: int = MAX_PROMPT_CHARS) -> PromptSet:
    """Returns the prompts of a JSONL file with up to `max_chars` characters.

    Raises:
        ValueError: if the file is missing, has no usable prompt or an unreadable line, whose number
            is in the message.
    """
    rows, prompts = RowFile(path), []
    for index in range(len(rows)):
        try:
            prompts.append(prompt_of(rows[index][1]))
        except ValueError as error:
            raise ValueError(f"{rows.place(index)}: {error}.") from error
    fitting = [prompt for prompt in prompts if len(prompt) <= max_chars]
    if not fitting:
        raise ValueError(f"{path} holds no prompt of up to {max_chars} characters.")
    random.Random(0).shuffle(fitting)
    return PromptSet(set_name(path), tuple(fitting))


def data_files(paths: Sequence[Path]) -> list[Path]:
    """Returns the files of all `paths`, files or folders of *.jsonl files.

    Files of a folder with "train" in their name are skipped, because a head may know their prompts.

    Raises:
        ValueError: if a path does not exist, a folder has no such file, or two files have the same
            name.
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
                f"{path} does not exist. Point --data at a JSONL file of prompts, or a folder of "
                "them."
            )
    names = [set_name(file) for file in files]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two data files are called {name!r}; rename one of them.")
    return files


def load_sets(paths: Sequence[Path], max_chars: int = MAX_PROMPT_CHARS) -> list[PromptSet]:
    """Returns the sets of the `data_files` of all paths.

    Raises:
        ValueError: if there are none, or a file cannot be read.
    """
    return [read_prompts(file, max_chars) for file in data_files(paths)]


def mixed_prompts(sets: Sequence[Sequence[str]], start: int, count: int) -> list[str]:
    """Returns `count` prompts of all sets in turn, from the `start`-th draw on.

    A set that runs out begins again.
    """
    draws = range(start, start + count)
    return [sets[i % len(sets)][(i // len(sets)) % len(sets[i % len(sets)])] for i in draws]


def chat_token_ids(target: str, data: Path, count: int, longest: int) -> list[list[int]]:
    """Returns token ids of `count` prompts of all files of `data` in turn, in the target's chat
    template. Prompts of more than `longest` tokens are skipped."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(target)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in mixed_prompts([s.prompts for s in load_sets([data])], 0, count)
    ]
    return [ids for ids in prompts if len(ids) <= longest]
