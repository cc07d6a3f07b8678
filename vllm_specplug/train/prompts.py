# SPDX-License-Identifier: Apache-2.0
"""Prompts for on-policy data, read from files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vllm_specplug.rows import LeftOut, RowFile


@dataclass(frozen=True)
class Prompt:
    """One chat prompt; `source` names its file, for statistics, and `place` its row."""

    source: str
    messages: tuple[dict[str, str], ...] = ()
    place: str = ""


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
