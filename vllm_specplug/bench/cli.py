# SPDX-License-Identifier: Apache-2.0
"""`specplug evaluate`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from vllm_specplug.bench.evaluate import (
    acceptance_table,
    data_files,
    earlier_results,
    measure,
    read_questions,
    set_name,
)
from vllm_specplug.bench.process_group import raise_on_termination
from vllm_specplug.bench.server import ServerError, ServerSpec, VllmServer
from vllm_specplug.options import check_target, parse_object
from vllm_specplug.presets import default_head
from vllm_specplug.progress import progress
from vllm_specplug.provenance import provenance
from vllm_specplug.registry import BY_HEAD, resolve_head_path
from vllm_specplug.rows import LeftOut
from vllm_specplug.targets import TargetError, cache_dir, prepare_target

_OWN_OPTIONS = {
    "method": "--method", "model": "--head", "num_speculative_tokens": "--sizes",
    "tree_budget": "--sizes", "max_request_budget": "--sizes",
}  # fmt: skip
"""Speculative options that `specplug evaluate` sets, and its own options for them."""

evaluate_app = typer.Typer(add_completion=False, rich_markup_mode=None)


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Turns errors that a user can cause into a message on stderr and an exit status."""
    console = Console(stderr=True)
    try:
        yield
    except ValueError as error:
        console.print(str(error), markup=False, soft_wrap=True)
        raise typer.Exit(2) from error
    except (ServerError, TargetError, OSError) as error:
        console.print(str(error), markup=False, soft_wrap=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        console.print("interrupted; the server is stopped")
        raise typer.Exit(130) from None


def _counts(text: str) -> list[int]:
    """Returns the tree sizes of a list such as 8,16,32.

    Raises:
        ValueError: for anything else.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdigit() and int(part) for part in parts):
        raise ValueError(f"--sizes {text!r}, legal: numbers of nodes from 1 on; correct them")
    return [int(part) for part in parts]


def _more_config(text: str, method: str) -> dict[str, Any]:
    """Returns the fields that `--speculative-config` adds.

    Raises:
        ValueError: unless it is a JSON object without the fields that other options set.
    """
    more = parse_object("--speculative-config", text, '{"ngram_topk": 0}')
    for name, option in _OWN_OPTIONS.items():
        if name in more and (name != "method" or method != BY_HEAD):
            raise ValueError(
                f"--speculative-config {name} = {more[name]!r}, legal: none, because {option} "
                "sets it; leave it out"
            )
    return more


def _target_and_head(
    model: str | None, head: str | None, console: Console
) -> tuple[str, str | None]:
    """Returns the given model and head; without a model SmolLM2, by default with its shipped
    head."""
    check_target(model)
    if head is not None:
        resolve_head_path(head, BY_HEAD)
    if model is not None:
        return model, head
    target = prepare_target("smollm2", lambda text: console.print(text))
    return str(target), head or default_head("smollm2")


@evaluate_app.command()
def evaluate(
    data: Annotated[
        list[Path] | None,
        typer.Option(
            envvar="SPECPLUG_DATA",
            help="JSONL or JSON file of prompts, or folder of JSONL files; may be repeated.",
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Target model; default SmolLM2.")] = None,
    head: Annotated[str | None, typer.Option(help="Draft head; default the shipped one.")] = None,
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
    eager: Annotated[
        bool, typer.Option("--eager", help="No compilation: faster start, slower server.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="JSON file of the results; an unfinished one is continued.")
    ] = None,
) -> None:
    """Measure a head's acceptance by data set, tree size and depth, in a server.

    Rows of benchmarks are read by their fields: HumanEval, MBPP, GSM8K, MATH, AIME, LiveCodeBench,
    MT-Bench (both turns), Alpaca, LongBench, Spec-Bench.
    """
    raise_on_termination()
    console = Console()
    with _plain_errors():
        counts, more = _counts(sizes), _more_config(speculative_config, method)
        if not data:
            raise ValueError("no prompts: point --data at a JSONL or JSON file")
        target, head = _target_and_head(model, head, console)
        files, left_out = data_files(data), LeftOut()
        sets = {set_name(path): read_questions(path, requests, left_out) for path in files}
        config: dict[str, Any] = {
            "method": method, **more,
            "num_speculative_tokens": max(counts), "max_request_budget": max(counts),
        }  # fmt: skip
        if head is not None:
            config["model"] = head
        spec = ServerSpec(
            "evaluate", target, config, max_model_len, dtype=dtype, enforce_eager=eager
        )
        settings = {
            "model": target, "speculative_config": config, "requests": requests,
            "output_len": output_len, "temperature": temperature, "files": [*map(str, files)],
        }  # fmt: skip
        results = earlier_results(out, settings, left_out)
        done = {(cell["data"], cell["tree_size"]) for cell in results}
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)

        def save() -> None:
            if out is None or not results:
                return
            found = {
                "provenance": provenance(), **settings, "results": results,
                "left_out": left_out.places,
            }  # fmt: skip
            partial = out.with_name(f"{out.name}.tmp")
            partial.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
            partial.replace(out)

        total = sum(len(sets[name]) for name in sets for size in counts if (name, size) not in done)
        try:
            if not any(sets.values()):
                raise ValueError("no prompt can be read")
            if not total:
                return
            with VllmServer(spec, cache_dir() / "logs" / "evaluate.log") as server:
                with console.status("starting the server") as status:
                    server.wait_healthy(progress=status.update)
                with progress(console) as bar:
                    task = bar.add_task("answers", total=total)
                    for cell in measure(
                        server, sets, counts, concurrency=concurrency, left_out=left_out,
                        sampling={"max_tokens": output_len, "temperature": temperature},
                        done=done, on_answer=lambda: bar.advance(task),
                    ):  # fmt: skip
                        results.append(cell)
                        save()
        finally:
            save()
            for line in left_out.lines():
                console.print(f"left out: {line}", markup=False, soft_wrap=True)
            if results:
                console.print(acceptance_table(results))
