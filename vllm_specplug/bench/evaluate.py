# SPDX-License-Identifier: Apache-2.0
"""Acceptance of a head on prompt files, measured in a server: by data set, tree size and depth.

One server answers every prompt once per tree size; a request asks for its size with
`specplug_tree_budget`. Later turns of a prompt follow the server's own answers.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Container, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from rich.table import Table

from vllm_specplug.bench.counters import SpecCounters
from vllm_specplug.bench.server import ServerError, VllmServer
from vllm_specplug.rows import Conversation, LeftOut, RowFile

# Seconds without a change after which a server's counters hold all finished requests.
_SETTLED_S = 0.5


def cell_of(data: str, size: int, answers: int, counters: SpecCounters) -> dict[str, Any]:
    """Returns the results of one data set with one tree size, by name.

    `accepted_to_depth` is the share of the drafts that were accepted to depth 1, 2, .. or deeper.
    """
    reached = counters.accepted_by_depth
    deepest = max((depth for depth, count in reached.items() if count), default=0)
    drafts = max(counters.drafts, 1.0)
    return {
        "data": data,
        "tree_size": size,
        "answers": answers,
        "drafts": counters.drafts,
        "mean_acceptance_length": counters.mean_acceptance_length,
        "accepted_to_depth": [reached.get(d, 0.0) / drafts for d in range(1, deepest + 1)],
    }


def set_name(path: Path) -> str:
    """Returns the name of a data file's set."""
    return path.stem.removesuffix("_dev").removesuffix("_test")


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


def read_questions(path: Path, limit: int, left_out: LeftOut) -> list[Conversation]:
    """Returns the first `limit` prompts of a file (see `rows`), 0 for all; counts other rows."""
    return list(islice(RowFile(path).conversations(left_out), limit or None))


def earlier_results(
    path: Path | None, settings: Mapping[str, Any], left_out: LeftOut
) -> list[dict[str, Any]]:
    """Returns the results in the file of an interrupted evaluation with the same settings, and adds
    what it left out.

    Raises:
        ValueError: for a file of other settings.
    """
    if path is None or not path.exists():
        return []
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        stored = None
    if not isinstance(stored, dict) or not isinstance(stored.get("results"), list):
        raise ValueError(f"--out {path} is not a file of results; name another one")
    for name, value in settings.items():
        if stored.get(name) != value:
            raise ValueError(
                f"--out {path} has results with {name} = {stored.get(name)!r}, not {value!r}; name "
                "another file"
            )
    for what, places in stored.get("left_out", {}).items():
        for place in places:
            left_out.add(what, place)
    return list(stored["results"])


def measure(
    server: VllmServer,
    sets: Mapping[str, Sequence[Conversation]],
    sizes: Sequence[int],
    *,
    concurrency: int,
    sampling: Mapping[str, Any],
    left_out: LeftOut,
    done: Container[tuple[str, int]] = (),
    on_answer: Callable[[], None] = lambda: None,
) -> Iterator[dict[str, Any]]:
    """Yields the results of each data set and tree size, as soon as it is measured.

    Args:
        sampling: fields of every request, such as `max_tokens` and `temperature`.
        left_out: counts prompts that the server refuses, once per prompt.
        done: data sets and tree sizes to skip.

    Raises:
        ServerError: if the server does not answer any more.
    """
    from openai import OpenAIError

    for name, questions in sets.items():
        for size in sizes:
            if (name, size) in done:
                continue
            refused = left_out if size == sizes[0] else LeftOut()
            fields = {**sampling, "extra_body": {"vllm_xargs": {"specplug_tree_budget": size}}}
            try:
                before = settled_counters(server)
                answers = asyncio.run(
                    _ask_all(server, questions, concurrency, fields, refused, on_answer)
                )
                counters = settled_counters(server) - before
            except (OpenAIError, OSError) as error:
                raise ServerError(
                    f"{server.spec.name} did not answer {name} with {size} nodes: {error}. The end "
                    f"of its log:\n{server.log_tail()}"
                ) from error
            yield cell_of(name, size, answers, counters)


def settled_counters(server: VllmServer) -> SpecCounters:
    """Returns a server's counters when they do not change any more."""
    last = SpecCounters.parse(server.metrics_text())
    while True:
        time.sleep(_SETTLED_S)
        found = SpecCounters.parse(server.metrics_text())
        if found == last:
            return found
        last = found


async def _ask_all(
    server: VllmServer,
    questions: Sequence[Conversation],
    concurrency: int,
    fields: Mapping[str, Any],
    refused: LeftOut,
    on_answer: Callable[[], None],
) -> int:
    """Returns the number of answers to all questions. A refused turn ends its question; the answers
    before it count, as they do in the server's counters."""
    from openai import AsyncOpenAI, BadRequestError

    gate = asyncio.Semaphore(concurrency)
    async with AsyncOpenAI(
        base_url=f"{server.base_url}/v1", api_key="none", max_retries=0, timeout=3600.0
    ) as client:

        async def one(question: Conversation) -> int:
            answers = 0
            async with gate:
                try:
                    asked = _ask(client, server.spec.model, question, fields)
                    async for _ in asked:
                        answers += 1
                except BadRequestError as error:
                    refused.add(f"the server refuses it ({error.message})", question.place)
                on_answer()
            return answers

        return sum(await asyncio.gather(*(one(question) for question in questions)))


async def _ask(
    client: Any, model: str, conversation: Conversation, fields: Mapping[str, Any]
) -> AsyncIterator[Any]:
    """Yields the answer to each turn."""
    if conversation.text:
        yield await client.completions.create(model=model, prompt=conversation.text, **fields)
        return
    messages: list[dict[str, str]] = list(conversation.asked())
    later = list(conversation.follow_ups)
    while True:
        reply = await client.chat.completions.create(model=model, messages=messages, **fields)
        yield reply
        if not later:
            return
        said = reply.choices[0].message.content or ""
        messages += [
            {"role": "assistant", "content": said},
            {"role": "user", "content": later.pop(0)},
        ]


def acceptance_table(results: Sequence[Mapping[str, Any]]) -> Table:
    """Returns the results as a table."""
    table = Table(
        "data", "nodes", "answers", "drafts", "mean acceptance length", "to depth 1, 2, .."
    )
    for cell in results:
        length = cell["mean_acceptance_length"]
        table.add_row(
            cell["data"], str(cell["tree_size"]), str(cell["answers"]), f"{cell['drafts']:.0f}",
            "-" if length is None else f"{length:.2f}",
            " ".join(f"{share:.2f}" for share in cell["accepted_to_depth"]),
        )  # fmt: skip
    return table
