# SPDX-License-Identifier: Apache-2.0
"""`specplug demo`: a server with draft trees and a plain one answer the same chats."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from vllm_specplug.bench.chat import ChatAnswer, LoadResult, run_chats
from vllm_specplug.bench.counters import SpecCounters
from vllm_specplug.bench.near_ties import Parting, partings
from vllm_specplug.bench.server import ServerSpec, VllmServer
from vllm_specplug.bench.tables import format_number

PROMPTS = (
    "What is the capital of France, and what is it known for?",
    "A train travels 60 miles in 1.5 hours. What is its average speed? Explain step by step.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Explain how rainbows form to a ten-year-old.",
    "List five tips for saving energy at home.",
    "Tom has 3 boxes with 12 pencils each and gives away 7 pencils. How many are left?",
    "Rewrite this sentence politely: Send me the report now.",
    "Write a short email asking a colleague to review a document by Friday.",
)
WARM_UP = "Say hello."

_REPORT = "Please report this with the output of `specplug doctor --json`."

# vLLM's own method that needs no head, with the settings of its documentation.
NGRAM_CONFIG: dict[str, Any] = {
    "method": "ngram",
    "num_speculative_tokens": 6,
    "prompt_lookup_min": 2,
    "prompt_lookup_max": 4,
}
COLUMNS = ("chats", "server", "tokens/s", "speed-up", "length", "TTFT ms", "TPOT ms")
CONCURRENCY = 4


@dataclass
class _Measured:
    load: LoadResult
    counters: SpecCounters


def run_demo(
    specs: Sequence[ServerSpec],
    prompts: Sequence[str],
    max_tokens: int,
    log_folder: Path,
    console: Console,
) -> None:
    """Starts the servers, sends the chats and prints a table.

    Args:
        specs: plain vLLM, and possibly a server that differs only by its drafts.

    Raises:
        ServerError: if a server does not start.
        openai.OpenAIError: if a request fails.
    """
    servers = [VllmServer(spec, log_folder / f"demo-{spec.name}.log") for spec in specs]
    with contextlib.ExitStack() as stack:
        for server in servers:
            console.print(
                f"starting vllm serve ({server.spec.name}), log: {server.log_path}", soft_wrap=True
            )
            stack.enter_context(server)
        _wait_all(servers, console)
        single, several = (
            _measure(servers, prompts, max_tokens, console, concurrency)
            for concurrency in (1, CONCURRENCY)
        )
        plain, *others = (measured.load.answers for measured in single.values())
        found = [
            partings(servers[0].base_url, specs[0].model, zip(plain, other, strict=True))
            for other in others
        ]
    loads = {"1 at a time": single, f"{CONCURRENCY} at a time": several}
    console.print()
    execution = "eager" if specs[0].enforce_eager else "compiled"
    title = f"{Path(specs[0].model).name}, {specs[0].dtype}, greedy, all servers {execution}"
    console.print(_table(loads, title))
    if specs[0].enforce_eager:
        console.print(
            "Eager servers start fast. vLLM compiles by default, which makes both faster: add "
            "--compile.",
            style="dim",
            soft_wrap=True,
        )
    console.print(
        "speed-up: tokens/s against plain. length: mean tokens per request and step, "
        "1 + accepted / drafts. TTFT, TPOT: medians.",
        style="dim",
        soft_wrap=True,
    )
    for other, differences in zip(others, found, strict=True):
        _print_comparison(plain, other, differences, prompts, specs[0].dtype, console)
    for server in servers:
        console.print(f"\n{server.spec.name}:", style="bold")
        console.print(server.spec.display(server.port), soft_wrap=True, highlight=False)


def _wait_all(servers: Sequence[VllmServer], console: Console) -> None:
    with console.status("waiting for the servers") as status:
        # A server that refuses its head ends long before plain vLLM answers.
        for server in reversed(servers):
            name = server.spec.name

            def show(message: str, name: str = name) -> None:
                status.update(f"{name}: {message}")

            seconds = server.wait_healthy(progress=show)
            console.print(f"{name} answers ({seconds:.0f} s)")


def _measure(
    servers: Sequence[VllmServer],
    prompts: Sequence[str],
    max_tokens: int,
    console: Console,
    concurrency: int,
) -> dict[str, _Measured]:
    """Sends every prompt to every server. Servers take turns, so that noise affects all equally."""
    batches = [prompts[i : i + concurrency] for i in range(0, len(prompts), concurrency)]
    parts: dict[str, list[LoadResult]] = {server.spec.name: [] for server in servers}
    for server in servers:
        run_chats(server.base_url, server.spec.model, [WARM_UP], concurrency=1, max_tokens=8)
    before = {server.spec.name: _counters(server) for server in servers}
    total = len(batches) * len(servers)
    with console.status("") as status:
        for index, batch in enumerate(batches):
            # The first server alternates.
            turn = servers if index % 2 == 0 else list(reversed(servers))
            for number, server in enumerate(turn, index * len(servers) + 1):
                name = server.spec.name
                status.update(f"{concurrency} at a time, {name}: run {number} of {total}")
                result = run_chats(
                    server.base_url,
                    server.spec.model,
                    batch,
                    concurrency=concurrency,
                    max_tokens=max_tokens,
                )
                parts[name].append(result)
    console.print(f"{concurrency} at a time: {len(prompts)} chats to each server done")
    return {
        server.spec.name: _Measured(
            LoadResult.join(parts[server.spec.name]), _counters(server) - before[server.spec.name]
        )
        for server in servers
    }


def _counters(server: VllmServer) -> SpecCounters:
    return SpecCounters.parse(server.metrics_text())


def _table(loads: Mapping[str, dict[str, _Measured]], title: str) -> Table:
    """Returns a table of all servers by load, with a rule between loads."""
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(COLUMNS):
        table.add_column(column, justify="left" if index < 2 else "right", no_wrap=True)
    for load, measured in loads.items():
        plain = measured["plain"].load.tokens_per_s
        for number, (name, result) in enumerate(measured.items(), 1):
            speed_up = result.load.tokens_per_s / plain
            table.add_row(
                load,
                name,
                f"{result.load.tokens_per_s:.1f}",
                f"{speed_up:.2f} x",
                format_number(result.counters.mean_acceptance_length, 2),
                f"{result.load.median_ttft_ms:.0f}",
                format_number(result.load.median_tpot_ms, 1),
                end_section=number == len(measured),
                style="bold" if speed_up > 1.0 else None,
            )
    return table


def _print_comparison(
    plain: Sequence[ChatAnswer],
    other: Sequence[ChatAnswer],
    found: Sequence[Parting],
    prompts: Sequence[str],
    dtype: str,
    console: Console,
) -> None:
    """Prints how many answers equal plain vLLM's, and whether rounding explains the others."""
    differing = [i for i, (a, b) in enumerate(zip(plain, other, strict=True)) if a.text != b.text]
    equal = len(plain) - len(differing)
    console.print(f"identical answers, one at a time: {equal} of {len(plain)}")
    if not differing:
        return
    if dtype == "float32":
        console.print(
            f"NOT LOSSLESS: the answers to {prompts[differing[0]]!r} differ in float32. {_REPORT}",
            style="bold red",
        )
        return
    widest = max((parting.gap_nats for parting in found), default=0.0)
    if all(parting.is_near_tie for parting in found):
        console.print(
            f"Where answers differ, plain vLLM scores the two tokens within {widest:.2f} nats: in "
            f"{dtype} such near ties round differently when rows are computed together, "
            "with drafts as with other requests. --dtype float32 compares exactly.",
            style="dim",
            soft_wrap=True,
        )
    else:
        console.print(
            f"NOT EXPLAINED BY ROUNDING: where answers differ, plain vLLM scores two tokens "
            f"{widest:.2f} nats apart. {_REPORT}",
            style="bold red",
        )
