# SPDX-License-Identifier: Apache-2.0
"""Rows of data files: conversations, prompts and texts, recognised by their fields.

A row is read by the fields that it has, never by the name of its file:

    messages, conversations      roles with texts (OpenAI, ShareGPT)
    turns                        user turns (MT-Bench, Spec-Bench); a list in `prompt` likewise
    instruction, input, output   Alpaca; Dolly, with its context and response
    context, input or question   LongBench, SQuAD
    question_content             LiveCodeBench, with its starter code
    prompt                       a prompt (HumanEval, with `entry_point`), and its completion if any
    text, with test_list         MBPP
    question, problem            GSM8K, MATH, AIME
    text                         raw text
    body                         a logged request, whose own fields are read

A `system` (or `system_prompt`) beside them becomes the first message. Rows with content that a
conversation cannot hold, such as tool calls, are refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
    "system": "system", "tool": "tool",
}  # fmt: skip
_COMPLETIONS = ("completion", "response", "output")
# An answer without its tools or reasoning is not what the target writes.
_UNREAD_OF_ROW = ("tools", "functions")
_UNREAD_OF_MESSAGE = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
# JSON can hold half of a surrogate pair, which tokenizers refuse.
_SURROGATE = re.compile("[\ud800-\udfff]")
TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")
# Most lines of a report, and most characters of a reason in it.
_SHOWN_KINDS, _SHOWN_CHARS = 10, 200


@dataclass(frozen=True)
class Conversation:
    """What a row holds: `messages` of a conversation, whose last one may be an answer, or a raw
    `text`. `follow_ups` are later user turns, to be asked after the answer. `is_cut` tells that the
    row began with an answer, which is left out. `place` is the row's, "file:line"."""

    messages: tuple[dict[str, str], ...] = ()
    follow_ups: tuple[str, ...] = ()
    text: str = ""
    is_cut: bool = False
    place: str = field(default="", compare=False)

    @property
    def has_answer(self) -> bool:
        """Whether a message is an assistant's."""
        return any(message["role"] == "assistant" for message in self.messages)

    @property
    def source(self) -> str:
        """The name of the row's file."""
        return Path(self.place).stem

    def asked(self) -> tuple[dict[str, str], ...]:
        """Returns the messages up to the last one that is not an answer; a text as a user's."""
        if self.text:
            return _asked(self.text)
        last = len(self.messages)
        while last and self.messages[last - 1]["role"] == "assistant":
            last -= 1
        return self.messages[:last]


def conversation_of(row: Any) -> Conversation:
    """Returns the conversation, prompt or text of a row.

    Raises:
        ValueError: for a row with none of the known fields, or with a field of another kind.
    """
    if not isinstance(row, Mapping):
        raise ValueError("not a JSON object")
    if isinstance(row.get("body"), Mapping):
        row = row["body"]
    _refuse_unread(row, _UNREAD_OF_ROW, "the row")
    for name, read in _READERS.items():
        if name in row:
            found = _with_system(row, read(row, name))
            texts = (found.text, *found.follow_ups, *(m["content"] for m in found.messages))
            if any(map(_SURROGATE.search, texts)):
                raise ValueError(f"field {name!r} holds half of a surrogate pair")
            return found
    have = ", ".join(row) or "none"
    raise ValueError(f"none of the fields {', '.join(_READERS)} (fields there: {have})")


def _refuse_unread(held: Mapping[str, Any], fields: tuple[str, ...], holder: str) -> None:
    """Raises ValueError for a field with content that no conversation holds."""
    for name in fields:
        if held.get(name):
            raise ValueError(f"{holder} has {name!r}, which is not read")


def _with_system(row: Mapping[str, Any], found: Conversation) -> Conversation:
    """Returns a conversation with the row's system message, if it has one."""
    field = "system" if row.get("system") else "system_prompt"
    if found.text or not row.get(field):
        return found
    message = {"role": "system", "content": _content(row[field], field)}
    if found.messages[0] == message:
        return found
    return replace(found, messages=(message, *found.messages))


def _chat(row: Mapping[str, Any], field: str) -> Conversation:
    value = row[field]
    if not isinstance(value, list) or not value:
        raise ValueError(f"field {field!r} is not a list with something in it")
    messages = [_message(part, field) for part in value]
    if not any(m["role"] == "user" and m["content"].strip() for m in messages):
        raise ValueError(f"field {field!r} holds no text of a user")
    # Nothing asks for an answer before that, and many templates refuse it.
    asked = next(at for at, m in enumerate(messages) if m["role"] not in ("system", "assistant"))
    kept = tuple(m for at, m in enumerate(messages) if at > asked or m["role"] != "assistant")
    return Conversation(kept, is_cut=len(kept) < len(messages))


def _message(part: Any, field: str) -> dict[str, str]:
    if not isinstance(part, Mapping):
        raise ValueError(f"field {field!r} holds something that is not a message")
    _refuse_unread(part, _UNREAD_OF_MESSAGE, f"a message in field {field!r}")
    role = part.get("role", part.get("from"))
    if not isinstance(role, str):
        raise ValueError(f"field {field!r} has a role that is no text, legal: {', '.join(_ROLES)}")
    if role not in _ROLES:
        raise ValueError(f"field {field!r} has the role {role!r}, legal: {', '.join(_ROLES)}")
    return {
        "role": _ROLES[role],
        "content": _content(part.get("content", part.get("value")), field),
    }


def _content(value: Any, field: str) -> str:
    """Returns a message's text; of a list, that of its text parts."""
    is_list = isinstance(value, list) and value
    parts = value if is_list else [{"type": "text", "text": value}]
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text":
            named = repr(kind) if isinstance(kind, str) else "without a type"
            raise ValueError(f"field {field!r} has a message part {named}, legal: 'text'")
        if not isinstance(part.get("text"), str):
            raise ValueError(f"field {field!r} has a message without text")
        texts.append(part["text"])
    return "".join(texts)


def _turns(row: Mapping[str, Any], field: str) -> Conversation:
    turns = row[field]
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"field {field!r} is not a list with something in it")
    if isinstance(turns[0], Mapping):
        return _chat(row, field)
    first, *later = (_text(turn, field) for turn in turns)
    return Conversation(_asked(first), tuple(later))


def _instruction(row: Mapping[str, Any], field: str) -> Conversation:
    return _answered(row, _joined(row, field, "input", "context"))


def _long_context(row: Mapping[str, Any], field: str) -> Conversation:
    return _answered(row, _joined(row, field, "input", "question", "prompt"))


def _programming_task(row: Mapping[str, Any], field: str) -> Conversation:
    text, code = _text(row[field], field), row.get("starter_code")
    return Conversation(_asked(f"{text}\n\n```python\n{code}\n```" if code else text))


def _prompt(row: Mapping[str, Any], field: str) -> Conversation:
    if isinstance(row[field], list):
        return _turns(row, field)
    text = _text(row[field], field)
    if "entry_point" in row:
        text = f"Complete this Python function.\n\n{text}"
    return _answered(row, text)


def _raw(row: Mapping[str, Any], field: str) -> Conversation:
    text = _text(row[field], field)
    return Conversation(_asked(text)) if "test_list" in row else Conversation(text=text)


def _text(value: Any, field: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"field {field!r} holds no text")
    return value


def _joined(row: Mapping[str, Any], *fields: str) -> str:
    """Returns the texts of those of the fields that have one; the first must."""
    first, *others = fields
    held = [first, *(field for field in others if row.get(field))]
    return "\n\n".join(_text(row[field], field) for field in held)


def _asked(text: str) -> tuple[dict[str, str], ...]:
    return ({"role": "user", "content": text},)


def _answered(row: Mapping[str, Any], prompt: str) -> Conversation:
    """Returns a prompt with its completion, where the row has one."""
    messages = [*_asked(prompt)]
    answer = next((row[name] for name in _COMPLETIONS if row.get(name)), None)
    if isinstance(answer, str):
        messages.append({"role": "assistant", "content": answer})
    return Conversation(tuple(messages))


# The first field that a row has decides. Rows with several of them exist: Alpaca's also have
# `text`, some chats repeat their first turn in `prompt`.
_READERS: dict[str, Callable[[Mapping[str, Any], str], Conversation]] = {
    "messages": _chat, "conversations": _chat, "turns": _turns, "instruction": _instruction,
    "context": _long_context, "question_content": _programming_task, "prompt": _prompt,
    "question": _prompt, "problem": _prompt, "text": _raw,
}  # fmt: skip


class RowFile:
    """The rows of a file, each with its place ("file:line").

    JSON lines are read when they are asked for. A file that is a JSON list is read at once. A text
    file is one row.

    Raises:
        ValueError: for a file that cannot be read, holds no rows or is of another kind.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        # Number of each row with the row, or with the offset of its line.
        self._rows: list[tuple[int, Any]] = []
        self._has_offsets = False
        if self.path.suffix not in (".json", ".jsonl", *TEXT_SUFFIXES):
            raise ValueError(
                f"data file {path} is not usable: it ends in {self.path.suffix!r}, legal: "
                f".jsonl, .json, {', '.join(TEXT_SUFFIXES)}; convert it"
            )
        try:
            with self.path.open("rb") as stream:
                if self.path.suffix in TEXT_SUFFIXES:
                    self._rows = [(1, {"text": stream.read().decode("utf-8")})]
                elif stream.read(64).lstrip().startswith(b"["):
                    stream.seek(0)
                    self._rows = list(enumerate(json.load(stream), 1))
                else:
                    stream.seek(0)
                    self._has_offsets, offset = True, 0
                    for number, line in enumerate(stream, 1):
                        if line.strip():
                            self._rows.append((number, offset))
                        offset += len(line)
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"data file {path} cannot be read: {error}.") from error
        if not len(self):
            raise ValueError(f"data file {path} holds no rows; leave it out")

    def __len__(self) -> int:
        return len(self._rows)

    def place(self, index: int) -> str:
        """Returns "file:line"; of a JSON list, the number of the row."""
        return f"{self.path}:{self._rows[index][0]}"

    def __getitem__(self, index: int) -> Any:
        """Returns a row.

        Raises:
            ValueError: for a line that is not JSON.
        """
        found = self._rows[index][1]
        if not self._has_offsets:
            return found
        with self.path.open("rb") as stream:
            stream.seek(found)
            line = stream.readline()
        try:
            return json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not JSON ({error})") from None

    def conversation(self, index: int, left_out: LeftOut) -> Conversation | None:
        """Returns the conversation of a row; counts what is left out of it, and returns None for a
        row that cannot be read."""
        place = self.place(index)
        try:
            found = replace(conversation_of(self[index]), place=place)
        except ValueError as error:
            left_out.add(str(error), place)
            return None
        if found.is_cut:
            left_out.add("first message an answer, left out", place)
        return found

    def conversations(self, left_out: LeftOut) -> Iterator[Conversation]:
        """Yields the conversations of all rows that can be read; counts what is left out."""
        found = (self.conversation(index, left_out) for index in range(len(self)))
        return (conversation for conversation in found if conversation is not None)


class LeftOut:
    """Counts what was left out or changed, with the places."""

    def __init__(self) -> None:
        self.places: dict[str, list[str]] = {}
        self._known: set[tuple[str, str]] = set()

    def add(self, what: str, place: str) -> None:
        """Counts one place, once for the same reason."""
        if (what, place) not in self._known:
            self._known.add((what, place))
            self.places.setdefault(what, []).append(place)

    def lines(self) -> Iterator[str]:
        """Yields one line for each of the most frequent kinds, with the first places, as printable
        text: words of a file must not reach a terminal as they are."""
        kinds = sorted(self.places.items(), key=lambda kind: -len(kind[1]))
        for what, places in kinds[:_SHOWN_KINDS]:
            shown = what if len(what) <= _SHOWN_CHARS else f"{what[:_SHOWN_CHARS]}..."
            more = f", and {len(places) - 3:,} more" if len(places) > 3 else ""
            line = f"{len(places):,} x {shown}: {', '.join(places[:3])}{more}"
            yield "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
        rest = kinds[_SHOWN_KINDS:]
        if rest:
            yield f"{sum(len(places) for _, places in rest):,} x {len(rest):,} other reasons"
