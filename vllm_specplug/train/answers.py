# SPDX-License-Identifier: Apache-2.0
"""Answer shards: JSONL files of prompts with the target's own answers, made once, resumable.

A data folder holds `prompts.jsonl` (the plan: one request per line, written before anything is
generated) and `answers-00000.jsonl`, .. of a fixed number of requests each. A shard appears under
its name only when complete, so generation resumes by making the shards that are missing.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

PLAN_NAME = "prompts.jsonl"


@dataclass(frozen=True)
class Request:
    """One answer to generate: token ids of the rendered prompt and how to sample."""

    source: str
    prompt_ids: tuple[int, ...]
    temperature: float
    seed: int


@dataclass(frozen=True)
class Answer:
    """A generated answer; `finished` says that it ended by itself (its last token ends a turn)."""

    source: str
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    temperature: float
    finished: bool


# generate(requests) -> one (answer ids, finished) per request, in their order
Generate = Callable[[Sequence[Request]], Sequence[tuple[Sequence[int], bool]]]


def plan_requests(
    prompts: Iterable[tuple[str, Sequence[int]]],
    *,
    sampled_share: float,
    temperatures: Sequence[float],
    seed: int,
) -> list[Request]:
    """Greedy requests with a share of sampled ones; duplicates of a prompt are dropped.

    Raises ValueError for a share outside 0..1 or a temperature that is not above 0.
    """
    if not 0 <= sampled_share <= 1:
        raise ValueError(f"sampled_share = {sampled_share}, legal: 0..1; correct it")
    if sampled_share and not all(t > 0 for t in temperatures):
        raise ValueError(f"temperatures = {list(temperatures)}, legal: numbers > 0; correct them")
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
    """Writes the plan and the settings it was made with, once."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_lines(folder / PLAN_NAME, (asdict(request) for request in requests))
    (folder / "settings.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def read_plan(folder: Path) -> list[Request]:
    """The plan of a data folder."""
    path = folder / PLAN_NAME
    if not path.is_file():
        raise ValueError(f"{path} does not exist; make it with `specplug data generate`")
    with path.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    return [Request(r["source"], tuple(r["prompt_ids"]), r["temperature"], r["seed"]) for r in rows]


def missing_shards(folder: Path, shard_size: int = 512) -> list[int]:
    """Numbers of the plan's shards that do not exist yet."""
    shards = -(-len(read_plan(folder)) // shard_size)
    return [shard for shard in range(shards) if not answer_path(folder, shard).is_file()]


def generate_missing(
    folder: Path,
    generate: Generate,
    *,
    shard_size: int = 512,
    on_shard: Callable[[int, int, int], None] | None = None,
) -> int:
    """Makes every shard of the plan that does not exist yet; returns the new answer tokens.

    `on_shard(shard, shards, new_tokens)` is called after each one, and before the first with
    `new_tokens` 0 for those that are already there.
    """
    requests = read_plan(folder)
    shards = -(-len(requests) // shard_size)
    total = 0
    for shard in range(shards):
        path = answer_path(folder, shard)
        if path.is_file():
            if on_shard is not None:
                on_shard(shard, shards, 0)
            continue
        part = requests[shard * shard_size : (shard + 1) * shard_size]
        answers = [
            Answer(r.source, r.prompt_ids, tuple(ids), r.temperature, finished)
            for r, (ids, finished) in zip(part, generate(part), strict=True)
        ]
        _write_lines(path, (asdict(answer) for answer in answers))
        count = sum(len(a.answer_ids) for a in answers)
        total += count
        if on_shard is not None:
            on_shard(shard, shards, count)
    return total


def answer_path(folder: Path, shard: int) -> Path:
    """File of one answer shard."""
    return folder / f"answers-{shard:05d}.jsonl"


def answer_shards(folder: Path) -> list[Path]:
    """Finished shards in order."""
    return sorted(folder.glob("answers-*.jsonl"))


def read_answers(path: Path) -> Iterator[Answer]:
    """The answers of one shard."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            yield Answer(
                row["source"],
                tuple(row["prompt_ids"]),
                tuple(row["answer_ids"]),
                row["temperature"],
                row["finished"],
            )


def is_repetitive(answer_ids: Sequence[int], window: int = 96, distinct: int = 24) -> bool:
    """Whether an answer ends in a loop: few distinct tokens among its last `window`."""
    if len(answer_ids) < window + distinct:
        return False
    return len(set(answer_ids[-window:])) <= distinct


def keep_answer(answer: Answer, rng: random.Random, repetitive_share: float = 0.7) -> bool:
    """Drops answers too short to draft in, and part of those that end in a loop.

    Loops stay in part, since a small target really produces them when served.
    """
    if len(answer.answer_ids) < 4:
        return False
    return not is_repetitive(answer.answer_ids) or rng.random() < repetitive_share


def split_answers(
    files: Sequence[Path], heldout: int, repetitive_share: float
) -> Iterator[tuple[str, list[Answer], list[Answer]]]:
    """Name of each shard, its answers that are held out and those to train on.

    Held out are greedy answers of the first shards, so that growing data never moves one.
    """
    left = heldout
    for number, path in enumerate(files):
        rng = random.Random(number)
        kept = [a for a in read_answers(path) if keep_answer(a, rng, repetitive_share)]
        aside = [a for a in kept if a.temperature == 0][:left]
        left -= len(aside)
        yield path.stem.replace("answers", "shard"), aside, [a for a in kept if a not in aside]


def check_heldout(files: Sequence[Path], heldout: int, repetitive_share: float) -> str | None:
    """What to tell where more answers are held out than left to train on, before any work.

    Raises:
        ValueError: where none would be left.
    """
    aside = rest = 0
    for _, held, others in split_answers(files, heldout, repetitive_share):
        aside += len(held)
        rest += len(others)
    told = f"--heldout-answers {heldout} holds {aside} of {aside + rest} answers out"
    if not rest:
        raise ValueError(f"{told} and leaves none to train on; lower it, or generate more answers")
    return f"{told} and leaves {rest} to train on" if aside > rest else None


def _write_lines(path: Path, rows: Iterable[dict[str, object]]) -> None:
    partial = path.with_suffix(".tmp")
    with partial.open("w", encoding="utf-8") as stream:
        for row in rows:
            stream.write(json.dumps(row) + "\n")
    os.replace(partial, path)
