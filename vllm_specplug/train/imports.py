# SPDX-License-Identifier: Apache-2.0
"""Answers that exist already, from files of conversations or texts."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vllm_specplug.rows import Conversation, LeftOut, RowFile
from vllm_specplug.train.answers import MIN_ANSWER_TOKENS, Answer, write_answers
from vllm_specplug.train.chat import ChatTokenizer


@dataclass
class Imported:
    """Counts of an import."""

    rows: int
    answers: int = 0
    answer_tokens: int = 0
    prompt_tokens: int = 0
    left_out: LeftOut = field(default_factory=LeftOut)


def import_answers(
    files: Sequence[str | Path],
    out: Path,
    chat: ChatTokenizer,
    *,
    max_length: int,
    shard_size: int = 512,
    seed: int = 0,
    on_row: Callable[[int, int], None] = lambda done, total: None,
) -> Imported:
    """Writes the answers in `files` to a data folder as `specplug data generate` does.

    Rows are shuffled, because answers are held out from the first shards. Every assistant turn
    becomes an answer with the earlier turns as its prompt. Longer answers are cut at `max_length`
    tokens; texts continue in another answer.

    Raises:
        ValueError: if the files hold no answer.
    """
    sources = [RowFile(path) for path in files]
    order = [(source, index) for source in sources for index in range(len(source))]
    random.Random(seed).shuffle(order)
    found = Imported(len(order))
    seen: set[int] = set()

    def kept() -> Iterator[Answer]:
        for done, (source, index) in enumerate(order, 1):
            on_row(done, len(order))
            row = source.conversation(index, found.left_out)
            if row is None:
                continue
            for prompt, answer in _pairs(row, chat, max_length, found.left_out):
                given, said = tuple(prompt), tuple(answer)
                if len(said) < MIN_ANSWER_TOKENS:
                    reason = f"answer of fewer than {MIN_ANSWER_TOKENS} tokens"
                elif hash((given, said)) in seen:
                    reason = "repeated answer"
                else:
                    seen.add(hash((given, said)))
                    found.answers += 1
                    found.answer_tokens += len(said)
                    found.prompt_tokens += len(given)
                    yield Answer(row.source, given, said, 0.0, chat.is_finished(said))
                    continue
                found.left_out.add(reason, row.place)
        if not found.answers:
            told = "; ".join(found.left_out.lines())
            raise ValueError(f"the files hold no answer to train on: {told}")

    write_answers(out, kept(), shard_size)
    return found


def _pairs(
    row: Conversation, chat: ChatTokenizer, max_length: int, left_out: LeftOut
) -> Iterator[tuple[list[int], list[int]]]:
    """Yields prompts of a row with their answers, of at most `max_length` tokens together. A text
    becomes parts of that length, each with its first token as the prompt."""
    if not row.has_answer and not row.text:
        left_out.add("no answer in the row", row.place)
        return
    try:
        answers = list(chat.answers(row))
    except ValueError as error:
        left_out.add(str(error), row.place)
        return
    for prompt, answer in answers:
        room = max_length - len(prompt)
        if row.text:
            tokens = prompt + answer
            for start in range(0, len(tokens), max_length):
                yield tokens[start : start + 1], tokens[start + 1 : start + max_length]
        elif room <= 0:
            left_out.add(f"prompt of {max_length} tokens or more", row.place)
        else:
            if len(answer) > room >= MIN_ANSWER_TOKENS:
                left_out.add(f"answer cut after {max_length} tokens", row.place)
            yield prompt, answer[:room]
