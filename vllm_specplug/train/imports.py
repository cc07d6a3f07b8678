# SPDX-License-Identifier: Apache-2.0
"""Answers that exist already, from files of conversations or texts."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_specplug.rows import LeftOut, RowFile
from vllm_specplug.train.answers import MIN_ANSWER_TOKENS, Answer, AnswerWriter
from vllm_specplug.train.chat import ChatTokenizer


@dataclass(frozen=True)
class Imported:
    """Counts of an import."""

    rows: int
    answers: int
    answer_tokens: int
    prompt_tokens: int
    left_out: LeftOut


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
    """Writes the answers in `files` to a data folder like that of `specplug data generate`.

    Rows are shuffled, because answers are held out from the first shards. Every answer of a
    conversation becomes one with the earlier turns as its prompt. What is longer than `max_length`
    tokens is cut at its end; texts continue in another answer.

    Raises:
        ValueError: if the files hold no answer.
    """
    sources = [RowFile(path) for path in files]
    order = [(s, i) for s, source in enumerate(sources) for i in range(len(source))]
    random.Random(seed).shuffle(order)
    left_out, seen = LeftOut(), set()
    answer_tokens = prompt_tokens = 0
    with AnswerWriter(out, shard_size) as writer:
        for done, (s, index) in enumerate(order, 1):
            place = sources[s].place(index)
            on_row(done, len(order))
            conversation = sources[s].conversation(index, left_out)
            if conversation is None:
                continue
            if not conversation.has_answer and not conversation.text:
                left_out.add("no answer in the row", place)
                continue
            try:
                answers = list(chat.answers(conversation))
            except ValueError as error:
                left_out.add(str(error), place)
                continue
            for prompt, answer in answers:
                for part in _parts(prompt, answer, max_length, bool(conversation.text)):
                    if part is None:
                        left_out.add(f"prompt of {max_length} tokens or more", place)
                        continue
                    given, kept = part
                    if len(kept) < MIN_ANSWER_TOKENS:
                        left_out.add(f"answer of fewer than {MIN_ANSWER_TOKENS} tokens", place)
                        continue
                    if len(given) + len(kept) < len(prompt) + len(answer) and not conversation.text:
                        left_out.add(f"answer cut after {max_length} tokens", place)
                    key = hash((tuple(given), tuple(kept)))
                    if key in seen:
                        left_out.add("repeated answer", place)
                        continue
                    seen.add(key)
                    writer.add(
                        Answer(sources[s].path.stem, tuple(given), tuple(kept), 0.0,
                               chat.is_finished(kept))
                    )  # fmt: skip
                    answer_tokens += len(kept)
                    prompt_tokens += len(given)
        if not writer.count:
            raise ValueError("the files hold no answer to train on: " + "; ".join(left_out.lines()))
    return Imported(len(order), writer.count, answer_tokens, prompt_tokens, left_out)


def _parts(
    prompt: list[int], answer: list[int], max_length: int, is_text: bool
) -> Iterator[tuple[list[int], list[int]] | None]:
    """Yields a prompt and its answer of at most `max_length` tokens together; None without room for
    an answer. A text becomes parts of that length, each with its first token as the prompt."""
    if is_text:
        tokens = prompt + answer
        for start in range(0, len(tokens), max_length):
            part = tokens[start : start + max_length]
            yield part[:1], part[1:]
    elif len(prompt) >= max_length:
        yield None
    else:
        yield prompt, answer[: max_length - len(prompt)]
