# SPDX-License-Identifier: Apache-2.0
"""Answer shards: JSONL files of prompts with the target's own answers.

A data folder holds `prompts.jsonl` (the plan: one request per line, written first) and
`answers-00000.jsonl`, .. of a fixed number of requests each. A shard gets its name when it is
complete, so generation resumes with the shards that are missing. Imported answers have the same
files; their plan is written last.
"""

from __future__ import annotations

import itertools
import json
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

PLAN_NAME, SETTINGS_NAME = "prompts.jsonl", "settings.json"
# Shorter answers are left out.
MIN_ANSWER_TOKENS = 4


@dataclass(frozen=True)
class Request:
    """An answer to generate: token ids of the rendered prompt, and how to sample."""

    source: str
    prompt_ids: tuple[int, ...]
    temperature: float
    seed: int


@dataclass(frozen=True)
class Answer:
    """A generated answer; `finished`: its last token ends a turn."""

    source: str
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    temperature: float
    finished: bool


_REQUEST, _ANSWER = TypeAdapter(Request), TypeAdapter(Answer)
# generate(requests) -> one (answer ids, finished) per request, in order
Generate = Callable[[Sequence[Request]], Sequence[tuple[Sequence[int], bool]]]


def plan_requests(
    prompts: Iterable[tuple[str, Sequence[int]]],
    *,
    sampled_share: float,
    temperatures: Sequence[float],
    seed: int,
) -> list[Request]:
    """Returns requests without duplicate prompts, a share of them sampled and the others greedy."""
    rng = random.Random(seed)
    seen: set[tuple[int, ...]] = set()
    requests = []
    for source, ids in prompts:
        key = tuple(ids)
        if key in seen:
            continue
        seen.add(key)
        sampled = rng.random() < sampled_share
        temperature = rng.choice(list(temperatures)) if sampled else 0.0
        requests.append(Request(source, key, temperature, rng.getrandbits(31)))
    rng.shuffle(requests)
    return requests


def write_plan(folder: Path, requests: Sequence[Request], settings: dict[str, object]) -> None:
    """Writes the settings of a plan, then the plan."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SETTINGS_NAME).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    _write_lines(folder / PLAN_NAME, requests, _REQUEST)


def refuse_other_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Raises ValueError if the plan in `folder` was made with other settings, or unknown ones."""
    path = folder / SETTINGS_NAME
    if not path.is_file():
        raise ValueError(
            f"{folder} has {PLAN_NAME} without {SETTINGS_NAME}: it was interrupted, or {path} was "
            "removed; name another folder, or remove this one"
        )
    stored = json.loads(path.read_text(encoding="utf-8"))
    for name, value in settings.items():
        if stored.get(name, value) != value:
            raise ValueError(
                f"{name} = {value!r}, but {folder} was begun with {stored[name]!r}; continue it "
                "with that one, or name another folder"
            )


def read_plan(folder: Path) -> list[Request]:
    """Returns the plan of a data folder.

    Raises:
        ValueError: if it has none.
    """
    path = folder / PLAN_NAME
    if not path.is_file():
        raise ValueError(f"{path} does not exist; make it with `specplug data generate`")
    return list(_read_lines(path, _REQUEST))


def missing_shards(folder: Path, shard_size: int = 512) -> list[int]:
    """Returns the numbers of the plan's shards that do not exist yet."""
    shards = -(-len(read_plan(folder)) // shard_size)
    return [shard for shard in range(shards) if not answer_path(folder, shard).is_file()]


def generate_missing(
    folder: Path, generate: Generate, shard_size: int = 512
) -> Iterator[list[Answer]]:
    """Makes the shards of the plan that do not exist yet; yields the answers of each."""
    requests = read_plan(folder)
    for shard in missing_shards(folder, shard_size):
        part = requests[shard * shard_size : (shard + 1) * shard_size]
        answers = [
            Answer(r.source, r.prompt_ids, tuple(ids), r.temperature, finished)
            for r, (ids, finished) in zip(part, generate(part), strict=True)
        ]
        _write_lines(answer_path(folder, shard), answers, _ANSWER)
        yield answers


def write_answers(folder: Path, answers: Iterable[Answer], shard_size: int = 512) -> None:
    """Writes answers to the shards of a new data folder, and their plan at the end.

    Raises:
        ValueError: if the folder holds a plan.
    """
    if (folder / PLAN_NAME).is_file():
        raise ValueError(f"{folder} holds answers already; name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    # An interrupted import may have had other shards.
    for path in answer_shards(folder):
        path.unlink()
    written = _written(folder, iter(answers), shard_size)
    plan = (Request(a.source, a.prompt_ids, a.temperature, 0) for a in written)
    _write_lines(folder / PLAN_NAME, plan, _REQUEST)


def _written(folder: Path, answers: Iterator[Answer], shard_size: int) -> Iterator[Answer]:
    """Writes answers to shards; yields the answers of each complete shard."""
    shard = 0
    while part := list(itertools.islice(answers, shard_size)):
        _write_lines(answer_path(folder, shard), part, _ANSWER)
        yield from part
        shard += 1


def answer_path(folder: Path, shard: int) -> Path:
    """Returns the file of a shard."""
    return folder / f"answers-{shard:05d}.jsonl"


def answer_shards(folder: Path) -> list[Path]:
    """Returns the files of the finished shards, in order."""
    return sorted(folder.glob("answers-*.jsonl"))


def finished_answers(folder: Path) -> list[Path]:
    """Returns the files of the finished shards, in order.

    Raises:
        ValueError: if there are none.
    """
    files = answer_shards(folder)
    if not files:
        raise ValueError(
            f"{folder} holds no finished answers; run `specplug data generate` or `specplug data "
            "import` first"
        )
    return files


def read_answers(path: Path) -> Iterator[Answer]:
    """Reads the answers of a shard."""
    return _read_lines(path, _ANSWER)


def is_repetitive(answer_ids: Sequence[int], window: int = 96, distinct: int = 24) -> bool:
    """Whether an answer ends in a loop: its last `window` tokens have at most `distinct` values."""
    if len(answer_ids) < window + distinct:
        return False
    return len(set(answer_ids[-window:])) <= distinct


def keep_answer(answer: Answer, rng: random.Random, repetitive_share: float) -> bool:
    """Whether to keep an answer: not if it is very short, and only a share of those that end in a
    loop."""
    if len(answer.answer_ids) < MIN_ANSWER_TOKENS:
        return False
    return not is_repetitive(answer.answer_ids) or rng.random() < repetitive_share


def _write_lines(path: Path, rows: Iterable[Any], kind: TypeAdapter[Any]) -> None:
    partial = path.with_suffix(".tmp")
    with partial.open("wb") as stream:
        for row in rows:
            stream.write(kind.dump_json(row) + b"\n")
    os.replace(partial, path)


def _read_lines(path: Path, kind: TypeAdapter[Any]) -> Iterator[Any]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield kind.validate_json(line)
            except ValidationError as error:
                raise ValueError(
                    f"{path}:{number} is damaged ({error.errors()[0]['msg']}); restore the file, "
                    "or make it again"
                ) from error
