# SPDX-License-Identifier: Apache-2.0
"""`specplug bench` and `specplug evaluate`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from vllm_specplug.bench.figure import write_figure
from vllm_specplug.bench.load import LoadError
from vllm_specplug.bench.plan import (
    AUTO,
    BenchPlan,
    PlanError,
    json_object,
    make_plan,
    read_plan_file,
)
from vllm_specplug.bench.plan import split_list as _names
from vllm_specplug.bench.process_group import raise_on_termination
from vllm_specplug.bench.server import ServerError, ServerSpec, VllmServer
from vllm_specplug.bench.summary import summarize, to_markdown, write_results
from vllm_specplug.bench.sweep import Sweep
from vllm_specplug.options import check_target
from vllm_specplug.presets import default_head
from vllm_specplug.provenance import provenance
from vllm_specplug.registry import BY_HEAD, default_method
from vllm_specplug.targets import TargetError, cache_dir, prepare_target

DEFAULT_SERVERS = ("plain", "ngram", default_method().name)
INCOMPLETE = 3
"""Exit status of a sweep without failures that has missing runs."""
_OWN_OPTIONS = {
    "method": "--method", "model": "--head", "num_speculative_tokens": "--sizes",
    "tree_budget": "--sizes", "max_request_budget": "--sizes",
}  # fmt: skip
"""Speculative options that `specplug evaluate` sets, and its own options for them."""

bench_app = typer.Typer(add_completion=False, rich_markup_mode=None)
evaluate_app = typer.Typer(add_completion=False, rich_markup_mode=None)

ModelOption = Annotated[str | None, typer.Option(help="Target model; default SmolLM2.")]
HeadOption = Annotated[str | None, typer.Option(help="Draft head; default the shipped one.")]
EagerOption = Annotated[
    bool,
    typer.Option(
        "--eager", help="No compilation, for plain vLLM too: faster start, slower servers."
    ),
]
DataOption = Annotated[
    list[Path] | None,
    typer.Option(
        envvar="SPECPLUG_DATA",
        help="JSONL or JSON file of prompts, or folder of JSONL files; may be repeated.",
    ),
]


@contextmanager
def _plain_errors(console: Console) -> Iterator[None]:
    """Turns errors that a user can cause into a message and an exit status."""
    try:
        yield
    except ValueError as error:
        console.print(str(error), markup=False, soft_wrap=True)
        raise typer.Exit(2) from error
    except (ServerError, LoadError, TargetError) as error:
        console.print(str(error), markup=False, soft_wrap=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        console.print("interrupted; run the same command again to continue")
        raise typer.Exit(130) from None


def _numbers(text: str, kind: type, flag: str) -> list[Any]:
    try:
        return [kind(part) for part in _names(text)]
    except ValueError:
        raise PlanError(f"{flag} {text!r} is not a list of numbers like 1,4,8") from None


def _rates(text: str) -> Any:
    if text == AUTO:
        return AUTO
    return [] if text == "none" else _numbers(text, float, "--rates")


def _fill_model(values: dict[str, Any], console: Console) -> None:
    """Sets SmolLM2 and its shipped head unless another model is named."""
    check_target(values.get("model"))
    if values.get("model") is None:
        values["model"] = str(prepare_target("smollm2", lambda text: console.print(text)))
        values.setdefault("head", default_head("smollm2"))


def plan_from(
    config: Path | None, flags: dict[str, Any], extra_servers: list[str], console: Console
) -> BenchPlan:
    """Returns the plan of a config file; flags override it.

    Raises:
        ValueError: naming every invalid setting.
    """
    values = {} if config is None else read_plan_file(config)
    values |= {name: value for name, value in flags.items() if value is not None}
    servers = values.get("servers", DEFAULT_SERVERS)
    if isinstance(servers, (list, tuple)):
        values["servers"] = [*servers, *extra_servers]
    if values.get("data") is None:
        raise PlanError("no prompts: point --data at a JSONL file or a folder of them")
    _fill_model(values, console)
    return make_plan(values)


@bench_app.command()
def bench(
    data: DataOption = None,
    config: Annotated[
        Path | None, typer.Option(help="Settings from a YAML or JSON file; flags override it.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("bench-results"),
    servers: Annotated[
        str | None,
        typer.Option(
            help="Servers: plain, ngram, suffix, METHOD[-NODES][-chain][-auto]; default "
            f"{','.join(DEFAULT_SERVERS)}."
        ),
    ] = None,
    server: Annotated[
        list[str] | None,
        typer.Option(
            help="One more server, NAME=JSON (a --speculative-config) or NAME=http://HOST:PORT "
            "(one that runs already). May be repeated."
        ),
    ] = None,
    model: ModelOption = None,
    head: HeadOption = None,
    rates: Annotated[
        str | None,
        typer.Option(
            help="Requests per second, e.g. 0.5,1,2; auto: from idle to past saturation; "
            "none. Default auto."
        ),
    ] = None,  # fmt: skip
    points: Annotated[int | None, typer.Option(help="Rates found by auto. Default 5.")] = None,
    concurrency: Annotated[
        str | None, typer.Option(help="Loads of this many requests in flight, e.g. 1,4,8.")
    ] = None,
    point_time: Annotated[
        float | None, typer.Option(help="Seconds of arrivals at each rate. Default 30.")
    ] = None,
    dataset_requests: Annotated[
        int | None, typer.Option(help="Requests to measure each data set on its own. Default: 0.")
    ] = None,
    repeats: Annotated[int | None, typer.Option(help="Runs per load. Default 1.")] = None,
    goodput: Annotated[
        list[str] | None,
        typer.Option(help="Objective for goodput, e.g. tpot:50 (ms). May be repeated."),
    ] = None,
    output_len: Annotated[
        int | None, typer.Option(help="Most tokens per answer. Default 128.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Precision. Default bfloat16.")] = None,
    eager: EagerOption = False,
    together: Annotated[
        bool, typer.Option("--together", help="Servers stay up and alternate (CPU: less noise).")
    ] = False,
    time_limit: Annotated[
        float | None,
        typer.Option(help="Seconds after which no run starts; exit status 3 if some are missing."),
    ] = None,
) -> None:
    """Measure servers against plain vLLM on the same traffic, from idle to past saturation.

    `vllm bench serve` makes the load. After an interruption the same command continues.
    """
    raise_on_termination()
    console = Console()
    with _plain_errors(console):
        flags = {
            "data": data or None,
            "servers": None if servers is None else list(_names(servers)),
            "model": model,
            "head": head,
            "rates": None if rates is None else _rates(rates),
            "points": points,
            "concurrency": (
                None if concurrency is None else _numbers(concurrency, int, "--concurrency")
            ),
            "point_time": point_time,
            "dataset_requests": dataset_requests,
            "repeats": repeats,
            "goodput": goodput or None,
            "output_len": output_len,
            "dtype": dtype,
            "enforce_eager": eager or None,
            "together": together or None,
        }
        plan = plan_from(config, flags, server or [], console)
        sweep = Sweep(plan, out, cache_dir() / "logs", console)
        outcome = sweep.run(time_limit)
    results = summarize(sweep, provenance(plan.execution))
    written = [*write_results(results, out), *write_figure(results, out)]
    console.print(to_markdown(results), markup=False, highlight=False, soft_wrap=True)
    console.print(f"written: {', '.join(str(path) for path in written)}", markup=False)
    if outcome.num_missing:
        reason = "the time limit is reached; " if outcome.out_of_time else ""
        console.print(
            f"{reason}{outcome.num_missing} runs are missing: run the same command again to "
            "measure them; nothing that is measured is lost",
            soft_wrap=True,
        )
        raise typer.Exit(1 if outcome.failures else INCOMPLETE)


@evaluate_app.command()
def evaluate(
    data: DataOption = None,
    model: ModelOption = None,
    head: HeadOption = None,
    method: Annotated[
        str, typer.Option(help="Method; default: the one that the head is for.")
    ] = BY_HEAD,
    speculative_config: Annotated[
        str, typer.Option(help="More fields of --speculative-config as JSON, e.g. a local head.")
    ] = "{}",
    sizes: Annotated[str, typer.Option(help="Tree sizes in nodes.")] = "8,16,32",
    requests: Annotated[int, typer.Option(min=0, help="First prompts of a file; 0: all.")] = 0,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests in flight.")] = 4,
    output_len: Annotated[int, typer.Option(min=2, help="Maximum tokens per answer.")] = 256,
    temperature: Annotated[float, typer.Option(min=0, help="Sampling temperature.")] = 0.0,
    max_model_len: Annotated[int, typer.Option(min=16, help="Longest prompt and answer.")] = 4096,
    dtype: Annotated[str, typer.Option(help="Precision.")] = "bfloat16",
    eager: EagerOption = False,
    out: Annotated[Path | None, typer.Option(help="JSON file of the results.")] = None,
) -> None:
    """Measure a head's acceptance by data set, tree size and depth, in a server.

    Rows of benchmarks are read by their fields: HumanEval, MBPP, GSM8K, MATH, AIME, LiveCodeBench,
    MT-Bench (both turns), Alpaca, LongBench, Spec-Bench.
    """
    from rich.progress import Progress

    from vllm_specplug.bench.evaluate import Cell, acceptance_table, measure, read_questions
    from vllm_specplug.bench.prompts import data_files, set_name
    from vllm_specplug.rows import LeftOut

    raise_on_termination()
    console = Console()
    with _plain_errors(console):
        counts = _numbers(sizes, int, "--sizes")
        values: dict[str, Any] = {"model": model} | ({} if head is None else {"head": head})
        if not counts or min(counts) < 1:
            raise PlanError(f"--sizes {sizes!r}, legal: numbers of nodes from 1 on; correct them")
        if not data:
            raise PlanError("no prompts: point --data at a JSONL or JSON file")
        more = json_object(speculative_config)
        if more is None:
            raise PlanError(
                f"--speculative-config {speculative_config!r}, legal: a JSON object such as "
                """'{"ngram_topk": 0}'; correct it"""
            )
        for name, option in _OWN_OPTIONS.items():
            if name in more and (name != "method" or method != BY_HEAD):
                raise PlanError(
                    f"--speculative-config {name} = {more[name]!r}, legal: none, because {option} "
                    "sets it; leave it out"
                )
        _fill_model(values, console)
        left_out = LeftOut()
        sets = {
            set_name(path): read_questions(path, requests, left_out) for path in data_files(data)
        }
        config: dict[str, Any] = {
            "method": method, **more,
            "num_speculative_tokens": max(counts), "max_request_budget": max(counts),
        }  # fmt: skip
        if values.get("head") is not None:
            config["model"] = str(values["head"])
        spec = ServerSpec("evaluate", str(values["model"]), config, max_model_len, dtype=dtype,
                          enforce_eager=eager)  # fmt: skip
        total = len(counts) * sum(map(len, sets.values()))
        cells: list[Cell] = []
        try:
            with VllmServer(spec, cache_dir() / "logs" / "evaluate.log") as server:
                with console.status("starting the server") as status:
                    server.wait_healthy(progress=status.update)
                with Progress(console=console) as bar:
                    task = bar.add_task("answers", total=total)
                    for cell in measure(
                        server, sets, counts, concurrency=concurrency, left_out=left_out,
                        sampling={"max_tokens": output_len, "temperature": temperature},
                        on_answer=lambda: bar.advance(task),
                    ):  # fmt: skip
                        cells.append(cell)
        finally:
            # Cells that were measured before an error are kept.
            for line in left_out.lines():
                console.print(f"left out: {line}", markup=False, soft_wrap=True)
            if cells:
                console.print(acceptance_table(cells))
            if cells and out is not None:
                results = {
                    "provenance": provenance(), "speculative_config": config,
                    "output_len": output_len, "temperature": temperature,
                    "results": [cell.to_json() for cell in cells], "left_out": left_out.places,
                }  # fmt: skip
                out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
