# SPDX-License-Identifier: Apache-2.0
"""Prompts to measure with, read from a folder of JSONL files."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class PromptSet:
    """Where a set of prompts lies and how one row becomes one chat message."""

    name: str
    file_name: str
    to_prompt: Callable[[Mapping[str, Any]], str]


PROMPT_SETS = {
    prompt_set.name: prompt_set
    for prompt_set in (
        PromptSet("spec_bench", "spec_bench_dev.jsonl", lambda row: row["turns"][0]),
        PromptSet(
            "humaneval",
            "humaneval_dev.jsonl",
            lambda row: f"Complete this Python function.\n\n{row['prompt']}",
        ),
        PromptSet("gsm8k", "gsm8k_test_dev.jsonl", lambda row: row["question"]),
    )
}

# A prompt longer than this many characters may not fit the servers' context.
MAX_PROMPT_CHARS = 6000


def load_prompts(folder: Path, name: str) -> list[str]:
    """All prompts of the set `name`, in a fixed random order.

    Raises:
        ValueError: when the set is unknown, or its file is missing or malformed.
    """
    if name not in PROMPT_SETS:
        raise ValueError(f"prompt set {name!r} is unknown; known: {', '.join(PROMPT_SETS)}.")
    prompt_set = PROMPT_SETS[name]
    path = folder / prompt_set.file_name
    if not path.is_file():
        raise ValueError(
            f"{path} does not exist. Point --data at the folder that holds "
            f"{', '.join(entry.file_name for entry in PROMPT_SETS.values())}."
        )
    prompts = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            prompts.append(prompt_set.to_prompt(json.loads(line)))
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: not a row of {name}: {error!r}.") from error
    prompts = [prompt for prompt in prompts if len(prompt) <= MAX_PROMPT_CHARS]
    random.Random(0).shuffle(prompts)
    return prompts


def mixed_prompts(sets: Sequence[Sequence[str]], start: int, count: int) -> list[str]:
    """`count` prompts drawn from all sets in turn, beginning at the `start`-th draw.

    Sets are reused from their beginning when they run out.
    """
    draws = range(start, start + count)
    return [sets[i % len(sets)][(i // len(sets)) % len(sets[i % len(sets)])] for i in draws]
