# SPDX-License-Identifier: Apache-2.0
"""`specplug demo`: a tree-drafting server and a plain one answer the same chats."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from vllm_specplug.bench.chat import LoadResult, run_chats
from vllm_specplug.bench.counters import SpecCounters
from vllm_specplug.bench.near_ties import Parting, partings
from vllm_specplug.bench.plan import VLLM_CONFIGS
from vllm_specplug.bench.server import ServerSpec, VllmServer
from vllm_specplug.bench.tables import Row, console_table, same_answers
from vllm_specplug.options import REQUEST_BUDGET_ARG
from vllm_specplug.registry import legal_method_names

# Chat prompts of the kinds people send: facts, arithmetic, code, rewriting, lists, a letter.
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

NGRAM_CONFIG = VLLM_CONFIGS["ngram"]


@dataclass(frozen=True)
class DemoOptions:
    """What the demo runs."""

    model: str
    method: str
    """Name shown for the speculating server."""
    speculative_config: dict[str, Any] | None
    """None compares nothing: only plain vLLM runs."""
    prompts: tuple[str, ...] = PROMPTS
    max_tokens: int = 128
    concurrency: int = 4
    dtype: str = "bfloat16"
    enforce_eager: bool = True
    log_folder: Path = Path("logs")


@dataclass
class _Measured:
    load: LoadResult
    counters: SpecCounters


def run_demo(options: DemoOptions, console: Console) -> list[Row]:
    """Starts the servers, sends the chats, prints the table; returns its rows.

    Raises:
        ServerError: when a server does not start.
        openai.OpenAIError: when a request fails.
    """
    specs = [_spec(options, "plain", None)]
    if options.speculative_config is not None:
        specs.append(_spec(options, options.method, options.speculative_config))
    servers = [VllmServer(spec, options.log_folder / f"demo-{spec.name}.log") for spec in specs]
    with contextlib.ExitStack() as stack:
        for server in servers:
            console.print(
                f"starting vllm serve ({server.spec.name}), log: {server.log_path}", soft_wrap=True
            )
            stack.enter_context(server)
        _wait_all(servers, console)
        single = _measure(servers, options, console, concurrency=1)
        several = _measure(servers, options, console, concurrency=options.concurrency)
        found, undrafted = None, None
        if options.speculative_config is not None:
            plain, other = (single[s.spec.name].load.answers for s in servers)
            found = partings(servers[0].base_url, options.model, zip(plain, other, strict=True))
            # vLLM's own methods draft whatever a request says.
            if found and options.speculative_config["method"] in legal_method_names():
                with _status(console, f"{options.method}, without drafts"):
                    undrafted = run_chats(
                        servers[1].base_url, options.model, options.prompts, concurrency=1,
                        max_tokens=options.max_tokens,
                        own={"vllm_xargs": {REQUEST_BUDGET_ARG: 0}},
                    )  # fmt: skip
    loads = {"1 at a time": single, f"{options.concurrency} at a time": several}
    rows = [row for load, measured in loads.items() for row in _rows(load, measured)]
    console.print()
    execution = "eager" if options.enforce_eager else "compiled"
    title = f"{Path(options.model).name}, {options.dtype}, greedy, all servers {execution}"
    console.print(console_table(rows, title))
    if options.enforce_eager:
        console.print(
            "eager starts fast; vLLM compiles by default, and both sides are faster then: "
            "--compile compares them so.",
            style="dim",
            soft_wrap=True,
        )
    console.print(
        "speed-up: tokens/s against plain. length: mean tokens per request and step, "
        "1 + accepted / drafts. TTFT, TPOT: medians.",
        style="dim",
        soft_wrap=True,
    )
    if found is not None:
        _print_comparison(options, single, several["plain"], undrafted, found, console)
    for server in servers:
        console.print(f"\n{server.spec.name}:", style="bold")
        console.print(server.spec.display(server.port), soft_wrap=True, highlight=False)
    return rows


def _spec(options: DemoOptions, name: str, config: dict[str, Any] | None) -> ServerSpec:
    return ServerSpec(
        name=name,
        model=options.model,
        speculative_config=config,
        dtype=options.dtype,
        enforce_eager=options.enforce_eager,
    )


def _wait_all(servers: Sequence[VllmServer], console: Console) -> None:
    with _status(console, "waiting for the servers") as status:
        for server in servers:
            name = server.spec.name

            def show(message: str, name: str = name) -> None:
                status.update(f"{name}: {message}")

            seconds = server.wait_healthy(progress=show)
            console.print(f"{name} answers ({seconds:.0f} s)")


def _measure(
    servers: Sequence[VllmServer], options: DemoOptions, console: Console, concurrency: int
) -> dict[str, _Measured]:
    """Sends every prompt to every server, taking turns, so that noise affects all alike."""
    prompts = options.prompts
    batches = [prompts[i : i + concurrency] for i in range(0, len(prompts), concurrency)]
    parts: dict[str, list[LoadResult]] = {server.spec.name: [] for server in servers}
    for server in servers:
        run_chats(server.base_url, options.model, [WARM_UP], concurrency=1, max_tokens=8)
    before = {server.spec.name: _counters(server) for server in servers}
    total = len(batches) * len(servers)
    with _status(console, "") as status:
        for index, batch in enumerate(batches):
            # The first server alternates too.
            turn = servers if index % 2 == 0 else list(reversed(servers))
            for place, server in enumerate(turn):
                done = index * len(servers) + place
                status.update(
                    f"{concurrency} at a time, {server.spec.name}: run {done + 1} of {total}"
                )
                result = run_chats(
                    server.base_url,
                    options.model,
                    batch,
                    concurrency=concurrency,
                    max_tokens=options.max_tokens,
                )
                parts[server.spec.name].append(result)
    console.print(f"{concurrency} at a time: {len(prompts)} chats to each server done")
    return {
        server.spec.name: _Measured(
            LoadResult.join(parts[server.spec.name]), _counters(server) - before[server.spec.name]
        )
        for server in servers
    }


def _counters(server: VllmServer) -> SpecCounters:
    return SpecCounters.parse(server.metrics_text())


def _rows(load: str, measured: dict[str, _Measured]) -> list[Row]:
    plain = measured["plain"].load.tokens_per_s
    return [
        Row(
            load=load,
            server=name,
            tokens_per_s=result.load.tokens_per_s,
            speed_up=None if name == "plain" else result.load.tokens_per_s / plain,
            mean_acceptance_length=result.counters.mean_acceptance_length,
            ttft_ms=result.load.median_ttft_ms,
            tpot_ms=result.load.median_tpot_ms,
        )
        for name, result in measured.items()
    ]


def _print_comparison(
    options: DemoOptions,
    single: dict[str, _Measured],
    several_plain: _Measured,
    undrafted: LoadResult | None,
    found: Sequence[Parting],
    console: Console,
) -> None:
    """How many answers are plain vLLM's, and whether rounding explains the others."""

    def texts(load: LoadResult) -> list[str]:
        return [answer.text for answer in load.answers]

    plain, count = texts(single["plain"].load), len(options.prompts)
    drafted = texts(single[options.method].load)
    equal, first = same_answers(plain, drafted)
    console.print(f"identical answers, one at a time: {equal} of {count}")
    if first is None:
        return
    if undrafted is not None:
        itself, _ = same_answers(drafted, texts(undrafted))
        console.print(f"{options.method} with drafts and without: {itself} of {count}")
    if options.dtype == "float32":
        console.print(
            f"NOT LOSSLESS: the answers to {options.prompts[first]!r} differ in float32. {_REPORT}",
            style="bold red",
        )
        return
    itself, _ = same_answers(plain, texts(several_plain.load))
    console.print(
        f"plain vLLM and itself, 1 and {options.concurrency} at a time: {itself} of {count}"
    )
    widest = max((parting.gap_nats for parting in found), default=0.0)
    if all(parting.is_near_tie for parting in found):
        console.print(
            f"Where answers part, plain vLLM scores the two tokens within {widest:.2f} nats: in "
            f"{options.dtype} such a tie rounds differently when rows are computed together, "
            "with drafts as with other requests. --dtype float32 compares exactly.",
            style="dim",
            soft_wrap=True,
        )
    else:
        console.print(
            f"NOT EXPLAINED BY ROUNDING: plain vLLM scores two tokens where answers part "
            f"{widest:.2f} nats apart. {_REPORT}",
            style="bold red",
        )


@contextlib.contextmanager
def _status(console: Console, text: str) -> Any:
    """A spinner on a terminal; elsewhere lines are printed by the steps themselves."""
    if console.is_terminal:
        with console.status(text) as status:
            yield status
    else:
        yield _LineStatus(console)


class _LineStatus:
    """Stands in for rich's Status where there is no terminal: one line per new stage."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last = ""

    def update(self, text: str) -> None:
        """Prints `text` unless only its number of seconds changed."""
        stage = text.split(" s: ")[-1]
        if stage != self._last:
            self._last = stage
            self._console.print(text, style="dim", highlight=False, soft_wrap=True)
