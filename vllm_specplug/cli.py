# SPDX-License-Identifier: Apache-2.0
"""The `specplug` command. Heavy imports stay inside the commands: `--help` must be instant."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from vllm_specplug import __version__

app = typer.Typer(
    name="specplug",
    help="Tree speculative decoding for vLLM: check the installation, try it, train heads.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)
_errors = Console(stderr=True, highlight=False, soft_wrap=True)


def _print_version(is_requested: bool) -> None:
    if is_requested:
        typer.echo(f"vllm-specplug {__version__}")
        raise typer.Exit


@app.callback()
def _all_commands(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


class DemoDtype(StrEnum):
    """Precision of the demo's servers."""

    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"


def _fail(message: str, code: int = 1) -> NoReturn:
    _errors.print(message, markup=False)
    raise typer.Exit(code)


def _say(message: str) -> None:
    """Prints progress to stderr, because stdout carries only the answer."""
    _errors.print(message, markup=False)


@app.command()
def doctor(
    target: Annotated[
        str | None,
        typer.Option(help="Model whose CUDA kernels are compared; default: an 8B model."),
    ] = None,
    tensor_parallel_size: Annotated[
        int, typer.Option(min=1, help="Ranks that share the target.")
    ] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    fix: Annotated[
        bool,
        typer.Option(
            "--fix",
            help="First repair the environment of vLLM's CPU build: uninstall CUDA builds that it "
            "pulled in, and add the package name that vLLM looks up.",
        ),
    ] = False,
) -> None:
    """Check versions, device and kernels, and run a self-test."""
    if fix:
        _repair_environment()
    _log_to_stderr()
    from vllm_specplug.engine.doctor import collect

    _say("checking; this takes up to 30 seconds")
    try:
        report = collect(target=target, num_ranks=tensor_parallel_size)
    except ValueError as error:
        _fail(str(error), 2)
    if as_json:
        typer.echo(json.dumps(report, indent=2, default=str))
    else:
        kernel = report.get("kernel", {})
        kernels = kernel.pop("kernels", None)
        _print_report(report)
        if kernels is not None:
            _print_kernels(kernels, kernel["kernel"], kernel["shape"])
    if report.get("ok") is False:
        raise typer.Exit(1)


def _log_to_stderr() -> None:
    """Redirects vLLM's log from stdout, which carries only the answer."""
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")


def _repair_environment() -> None:
    from vllm_specplug.cpu_environment import find_problems, repair

    problems = find_problems()
    _say(f"repairing: {problems}" if problems else "nothing to repair")
    try:
        repair(problems)
    except (RuntimeError, OSError) as error:
        _fail(f"the environment could not be repaired: {error}")


def _print_report(report: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(overflow="fold")
    for key, value in _flatten(report):
        table.add_row(key, value)
    Console(highlight=False).print(table)


def _print_kernels(kernels: dict[str, dict[str, Any]], chosen: str, shape: str) -> None:
    """Prints the CUDA kernels as a table, with a mark at the chosen one."""
    from rich.table import Table

    table = Table(title=f"Tree attention for {shape}", title_justify="left")
    for title in ("kernel", "serves", "µs per call"):
        table.add_column(title, justify="right" if title.startswith("µs") else "left")
    table.add_column("why not", overflow="fold")
    for name, entry in kernels.items():
        time = "-" if entry["us"] is None else f"{entry['us']:.0f}"
        mark = " (chosen)" if name == chosen else ""
        table.add_row(f"{name}{mark}", _plain_words(entry["serves"]), time, entry["why_not"] or "")
    Console(highlight=False).print(table)


def _flatten(value: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for key, item in value.items():
        name = f"{prefix}{key}".replace("_", " ")
        if isinstance(item, dict):
            rows += _flatten(item, f"{name} / ")
        elif isinstance(item, list):
            rows.append((name, "\n".join(str(entry) for entry in item) or "none"))
        else:
            rows.append((name, _plain_words(item)))
    return rows


def _plain_words(item: object) -> str:
    if isinstance(item, bool):
        return "yes" if item else "NO"
    return "-" if item is None else str(item)


@app.command("inspect")
def inspect_command(
    head: Annotated[str, typer.Argument(help="Draft head: a folder, or a hub id in the cache.")],
    target: Annotated[str | None, typer.Option(help="Model to draft for (path or hub id).")] = None,
    method: Annotated[
        str | None, typer.Option(help="Method to use instead of the one that the head is made for.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what a draft head is, and whether it can be served here."""
    _log_to_stderr()
    # The report contains the errors that vLLM would log.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
    from vllm_specplug.engine.inspect_head import inspect_head

    try:
        report = inspect_head(head, target, method)
    except ValueError as error:
        _fail(str(error), 2)
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        _print_report(report)
    if report["served"] is False:
        raise typer.Exit(1)


@app.command()
def target(
    name: Annotated[str, typer.Argument(help="Name of the target, e.g. smollm2.")] = "smollm2",
) -> None:
    """Print the path of a target model, preparing it if needed."""
    typer.echo(_prepared_target(name))


def _prepared_target(name: str) -> Path:
    from vllm_specplug.targets import TargetError, prepare_target

    try:
        return prepare_target(name, _say)
    except ValueError as error:
        _fail(str(error), 2)
    except TargetError as error:
        _fail(f"preparing target {name!r}: {error}")
    except OSError as error:
        _fail(
            f"preparing target {name!r}: {error}. Set SPECPLUG_CACHE to a folder that can be "
            "written, with 1 GB free."
        )


@app.command()
def config(
    target: Annotated[str, typer.Argument(help="Name of the target, e.g. smollm2.")],
    method: Annotated[str, typer.Argument(help="Name of the method, as vLLM takes it.")],
    nodes: Annotated[
        int | None, typer.Option(min=1, max=256, help="Node budget (num_speculative_tokens).")
    ] = None,
) -> None:
    """Print a --speculative-config with the shipped head, as JSON."""
    typer.echo(json.dumps(_speculative_config(target, method, nodes)))


def _speculative_config(
    target: str, method: str, nodes: int | None, head: str | None = None
) -> dict[str, Any]:
    from vllm_specplug.presets import speculative_config
    from vllm_specplug.registry import resolve_head_path

    overrides = {} if nodes is None else {"num_speculative_tokens": nodes}
    try:
        if head is not None and _needs_head(method):
            return {"method": method, "model": str(resolve_head_path(head, method)), **overrides}
        return speculative_config(target, method, **overrides)
    except ValueError as error:
        _fail(str(error), 2)


def _needs_head(method: str) -> bool:
    from vllm_specplug.registry import BY_HEAD, get_method

    return method == BY_HEAD or get_method(method).needs_head


@app.command("options")
def options_command(
    method: Annotated[
        str | None, typer.Argument(help="Name of the method; without one, lists the methods.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the methods, or every option of one method."""
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    from vllm_specplug.option_docs import HEADER, method_options, shared_options
    from vllm_specplug.registry import BY_HEAD, get_method, methods

    if method is None:
        summaries = {
            BY_HEAD: "with the method of the head, which is detected from its files",
            **{name: entry.summary for name, entry in methods().items()},
        }
        if as_json:
            typer.echo(json.dumps(summaries, indent=2))
            return
        table = Table(box=None, header_style="bold")
        for column in ("method", "drafts"):
            table.add_column(column)
        for name, summary in summaries.items():
            table.add_row(name, summary)
        Console(highlight=False).print(table)
        return
    try:
        own = [] if method == BY_HEAD else method_options(get_method(method))
    except ValueError as error:
        _fail(str(error), 2)
    # The cells are Markdown, for the documentation.
    rows = [tuple(cell.replace("`", "") for cell in row) for row in (*own, *shared_options())]
    if as_json:
        typer.echo(json.dumps([dict(zip(HEADER, row, strict=True)) for row in rows], indent=2))
        return
    console = Console(highlight=False)
    for name, kind, default, legal, meaning in rows:
        usual = default if default.startswith(("required", "unset")) else f"default {default}"
        console.print(Text.assemble((name, "bold"), f"  {kind}, {usual}"))
        allowed = "" if legal == "any" else f"Legal: {legal}. "
        console.print(Padding(Text(allowed + meaning), (0, 0, 0, 4)))


@app.command()
def demo(
    method: Annotated[
        str | None,
        typer.Option(
            help="Method to compare with plain vLLM: one that `specplug options` lists, vLLM's "
            "ngram, or none for plain vLLM only. Default: the one with the best shipped head."
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Model to serve instead of SmolLM2 (path or hub id).")
    ] = None,
    head: Annotated[
        str | None, typer.Option(help="Draft head to use instead of the shipped one.")
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, max=256, help="Node budget of the draft tree.")
    ] = None,
    dtype: Annotated[
        DemoDtype, typer.Option(help="float32 shows token-identical answers.")
    ] = DemoDtype.BFLOAT16,
    compile_model: Annotated[
        bool, typer.Option("--compile", help="torch.compile the model; starting takes longer.")
    ] = False,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens per answer.")] = 128,
    quick: Annotated[bool, typer.Option("--quick", help="Four prompts, short answers.")] = False,
) -> None:
    """Serve SmolLM2 with and without draft trees, and compare both."""
    from vllm_specplug.bench.demo import NGRAM_CONFIG, PROMPTS, run_demo
    from vllm_specplug.bench.process_group import raise_on_termination
    from vllm_specplug.bench.server import ServerError, ServerSpec
    from vllm_specplug.options import check_target
    from vllm_specplug.registry import default_method, legal_method_names
    from vllm_specplug.targets import cache_dir

    raise_on_termination()
    method = method or default_method().name
    legal = ("none", "ngram", *legal_method_names())
    if method not in legal:
        _fail(f"--method {method!r} is unknown; legal: {', '.join(legal)}.", 2)
    speculative: dict[str, Any] | None = None
    if method == "ngram":
        speculative = dict(NGRAM_CONFIG)
    elif method != "none":
        if head is None and model is not None and _needs_head(method):
            _fail("--model needs a draft head trained for it: add --head, or --method ngram.", 2)
        if head is not None and not _needs_head(method):
            _fail(f"--head {head!r}, legal: none with --method {method}; leave it out.", 2)
        speculative = _speculative_config("smollm2", method, nodes, head)
    try:
        check_target(model)
    except ValueError as error:
        _fail(str(error), 2)
    configs: dict[str, Any] = {"plain": None}
    if speculative is not None:
        configs[method] = speculative
    served = model or str(_prepared_target("smollm2"))
    specs = [
        ServerSpec(name, served, config, dtype=str(dtype), enforce_eager=not compile_model)
        for name, config in configs.items()
    ]
    prompts, max_tokens = (PROMPTS[:4], min(max_tokens, 48)) if quick else (PROMPTS, max_tokens)
    logs = cache_dir() / "logs"
    try:
        run_demo(specs, prompts, max_tokens, logs, Console())
    except ServerError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        _fail("interrupted; the servers are stopped", 130)
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in ("openai", "httpx"):
            raise
        _fail(
            f"a request failed: {type(error).__name__}: {error}\n"
            f"The servers' logs are in {logs}. `specplug doctor` checks the installation."
        )


def _forward(name: str, package: str) -> Callable[[typer.Context], None]:
    """Returns a command that forwards its arguments to an app and imports it only when it runs.

    Args:
        package: with the app `<name>_app` in its module `cli`; the extra with the app's
            requirements has the same name.
    """

    def command(ctx: typer.Context) -> None:
        try:
            module = importlib.import_module(f"vllm_specplug.{package}.cli")
            sub_app = getattr(module, f"{name}_app")
            sub_app(args=list(ctx.args), prog_name=f"specplug {name}")
        except ModuleNotFoundError as error:
            _fail(
                f"`specplug {name}` needs the package {error.name!r}, which is not installed. "
                f"Run `make setup`, or install the extra in a clone of the repository: "
                f"pip install --no-build-isolation -e '.[{package}]'."
            )

    return command


# All arguments are passed on, including `--help`.
_PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
for _name, _package, _help in (
    ("data", "train", "Make training data"),
    ("train", "train", "Train a draft head"),
    ("evaluate", "bench", "Measure a head's acceptance"),
):
    app.command(
        _name,
        help=f"{_help} (see: specplug {_name} --help).",
        context_settings=_PASS_THROUGH,
    )(_forward(_name, _package))


def main() -> None:
    """Entry point of the `specplug` command."""
    try:
        app(prog_name="specplug")
    except BrokenPipeError:
        # The reader of the output has closed it (`specplug doctor | head`).
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


if __name__ == "__main__":
    main()
