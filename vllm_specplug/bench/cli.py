# SPDX-License-Identifier: Apache-2.0
"""`specplug bench`: the benchmark behind the README's table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from vllm_specplug.bench.load import LoadError
from vllm_specplug.bench.process_group import raise_on_termination
from vllm_specplug.bench.provenance import provenance
from vllm_specplug.bench.server import ServerError
from vllm_specplug.bench.speed import SpeedBench, SpeedPlan
from vllm_specplug.bench.speed_report import summarize, to_markdown, write_report
from vllm_specplug.targets import TargetError, cache_dir, head_path, prepare_target

bench_app = typer.Typer(add_completion=False, rich_markup_mode=None)


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in _names(text))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list of whole numbers like 1,4,8") from None


@bench_app.command()
def bench(
    data: Annotated[
        Path,
        typer.Option(
            envvar="SPECPLUG_DATA",
            help="Folder with the prompts: spec_bench_dev.jsonl, humaneval_dev.jsonl, "
            "gsm8k_test_dev.jsonl.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("bench/results"),
    methods: Annotated[
        str, typer.Option(help="Compared methods: plain, ngram, jetspec-NODES[-BUILDER].")
    ] = "plain,ngram,ngram_tree-16,jetspec-16-best_first,jetspec-16",
    batches: Annotated[str, typer.Option(help="Requests at once.")] = "1,4,8",
    rounds: Annotated[int, typer.Option(min=1, help="Repetitions; medians are reported.")] = 3,
    nodes: Annotated[str, typer.Option(help="Budgets for acceptance lengths.")] = "8,16,32",
    builders: Annotated[
        str, typer.Option(help="Tree builders for acceptance lengths.")
    ] = "best_first,accum_logp",
    length_prompts: Annotated[
        int, typer.Option(min=0, help="Prompts of each set per acceptance length; 0: skip.")
    ] = 16,
    output_len: Annotated[int, typer.Option(min=2, help="Longest answer, tokens.")] = 128,
    model: Annotated[str | None, typer.Option(help="Target model; default SmolLM2.")] = None,
    head: Annotated[str | None, typer.Option(help="Draft head; default the shipped one.")] = None,
    compile_model: Annotated[bool, typer.Option("--compile", help="torch.compile models.")] = False,
) -> None:
    """Measure tokens/s against plain vLLM and ngram, and acceptance length by tree.

    Can be interrupted: run it again and it continues.
    """
    raise_on_termination()
    console = Console()
    try:
        if head is None and model is None and ("jetspec" in methods or length_prompts):
            head = str(head_path("smollm2", "jetspec"))
        plan = SpeedPlan(
            model=model or str(prepare_target("smollm2", lambda message: console.print(message))),
            head=head,
            methods=_names(methods),
            batches=_numbers(batches),
            rounds=rounds,
            output_len=output_len,
            length_nodes=_numbers(nodes) if length_prompts else (),
            length_builders=_names(builders),
            length_prompts=length_prompts,
            enforce_eager=not compile_model,
        )
        run = SpeedBench(plan, data, out, cache_dir() / "logs", console)
        run.run_speed()
        run.run_lengths()
    except ValueError as error:
        console.print(str(error), markup=False)
        raise typer.Exit(2) from error
    except (ServerError, LoadError, TargetError) as error:
        console.print(str(error), markup=False)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        console.print("interrupted; run the same command again to continue")
        raise typer.Exit(130) from None
    record = provenance()
    summary = summarize(run.store.cells("speed"), run.store.cells("length"))
    written = write_report(summary, record, out)
    console.print(to_markdown(summary, record), markup=False, highlight=False, soft_wrap=True)
    console.print(f"written: {', '.join(str(path) for path in written)}", markup=False)
