# SPDX-License-Identifier: Apache-2.0
"""The project's benchmark: speed against plain vLLM and ngram, acceptance by tree.

Every measurement is one cell, written down as soon as it is known, so that an interrupted
benchmark continues where it stopped.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from vllm_specplug.bench.chat import run_chats
from vllm_specplug.bench.demo import NGRAM_CONFIG, WARM_UP
from vllm_specplug.bench.load import run_load
from vllm_specplug.bench.prompts import PROMPT_SETS, load_prompts, mixed_prompts
from vllm_specplug.bench.provenance import code_fingerprint, commit
from vllm_specplug.bench.server import ServerSpec, VllmServer
from vllm_specplug.config import BUILDER_NAMES
from vllm_specplug.methods import METHOD_NAMES, get_method

CHAIN = "chain"
# More rows than any step has: trees keep their full budget whatever the batch.
UNLIMITED_ROWS = 65536


@dataclass(frozen=True)
class SpeedPlan:
    """Everything that determines the measurements; results of another plan are not mixed in."""

    model: str
    head: str | None
    methods: tuple[str, ...] = (
        "plain",
        "ngram",
        "ngram_tree-16",
        "jetspec-16-best_first",
        "jetspec-16",
    )
    batches: tuple[int, ...] = (1, 4, 8)
    rounds: int = 3
    prompts_per_slot: int = 5
    """Prompts of one run = this x batch, at least `min_prompts`."""
    min_prompts: int = 9
    output_len: int = 128
    length_nodes: tuple[int, ...] = (8, 16, 32)
    length_builders: tuple[str, ...] = ("best_first", "accum_logp")
    length_prompts: int = 16
    """Prompts of each set for one acceptance length."""
    dtype: str = "bfloat16"
    enforce_eager: bool = True
    max_model_len: int = 4096

    def __post_init__(self) -> None:
        for name in (*self.methods, *self.length_methods()):
            method_config(name, self.head)
        if self.methods and "plain" not in self.methods:
            raise ValueError("methods must contain 'plain': every speed is a ratio to it.")

    def length_methods(self) -> tuple[str, ...]:
        """Methods whose acceptance length is measured."""
        return tuple(
            f"jetspec-{nodes}-{builder}"
            for nodes in self.length_nodes
            for builder in self.length_builders
        )

    def digest(self, fingerprint: str) -> str:
        """Short name of this plan, run with the code of this fingerprint."""
        # How many rounds and which lists are run does not change a cell.
        text = asdict(self)
        for key in ("methods", "batches", "rounds", "length_nodes", "length_builders"):
            del text[key]
        payload = json.dumps([text, fingerprint], sort_keys=True)
        return hashlib.sha256(payload.encode()).hexdigest()[:12]


def method_config(name: str, head: str | None) -> dict[str, Any] | None:
    """The speculative config a benchmark name stands for; None for plain vLLM.

    Names: "plain", "ngram", "<method>-<nodes>" or "<method>-<nodes>-<builder>", where the
    builder may also be "chain" (a tree of width 1). A named builder measures the head alone,
    without n-gram branches.

    Raises:
        ValueError: for any other name, or a method that needs a head when there is none.
    """
    if name == "plain":
        return None
    if name == "ngram":
        return dict(NGRAM_CONFIG)
    method, _, rest = name.partition("-")
    nodes, _, builder = rest.partition("-")
    legal_builder = builder in ("", CHAIN, *BUILDER_NAMES)
    if method not in METHOD_NAMES or not nodes.isdigit() or not legal_builder:
        raise ValueError(
            f"benchmark method {name!r} is unknown. Use plain, ngram, or METHOD-NODES[-BUILDER] "
            f"with METHOD one of {', '.join(METHOD_NAMES)} and BUILDER one of "
            f"{', '.join((*BUILDER_NAMES, CHAIN))}; for example jetspec-16-accum_logp."
        )
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": int(nodes)}
    if get_method(method).needs_head:
        if head is None:
            raise ValueError(f"benchmark method {name!r} needs a draft head: add --head.")
        config["model"] = head
        if builder:
            config["ngram_topk"] = 0
    if builder == CHAIN:
        config["tree_width"] = 1
    elif builder:
        config["tree_builder"] = builder
    return config


class CellStore:
    """Measured cells in a JSONL file, one line each, kept across runs."""

    def __init__(self, path: Path, digest: str) -> None:
        self.path = path
        self.digest = digest
        self._cells: dict[tuple[str, ...], dict[str, Any]] = {}
        if path.is_file():
            for line in path.read_text().splitlines():
                # A line cut off by a kill is measured again.
                with contextlib.suppress(ValueError, KeyError):
                    cell = json.loads(line)
                    if cell["digest"] == digest:
                        self._cells[tuple(cell["key"])] = cell

    def __contains__(self, key: tuple[str, ...]) -> bool:
        return key in self._cells

    def cells(self, kind: str) -> list[dict[str, Any]]:
        """All cells whose key begins with `kind`."""
        return [cell for key, cell in self._cells.items() if key[0] == kind]

    def add(self, key: tuple[str, ...], values: dict[str, Any]) -> None:
        """Records a cell and writes it down."""
        cell = {"digest": self.digest, "commit": commit(), "key": list(key)}
        cell |= {"load_average": os.getloadavg()[0], **values}
        self._cells[key] = cell
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # The leading line break ends a line that a kill cut off.
        with self.path.open("a") as stream:
            stream.write("\n" + json.dumps(cell))


class SpeedBench:
    """Runs a plan's missing cells."""

    def __init__(
        self, plan: SpeedPlan, data: Path, out: Path, log_folder: Path, console: Console
    ) -> None:
        self.plan = plan
        self.store = CellStore(out / "cells.jsonl", plan.digest(code_fingerprint(plan.head)))
        self.log_folder = log_folder
        self.console = console
        self.sets = {name: load_prompts(data, name) for name in PROMPT_SETS}

    def run_speed(self) -> None:
        """Tokens per second of every method at every batch, methods taking turns.

        All servers stay up together, so that the machine's drift hits all methods alike; all but
        the one that is measured are paused.
        """
        plan = self.plan
        todo = [
            (str(round_), str(batch), method)
            for round_ in range(plan.rounds)
            for batch in plan.batches
            for method in self._turn(round_)
        ]
        missing = [cell for cell in todo if ("speed", *cell) not in self.store]
        if not missing:
            return
        with contextlib.ExitStack() as stack:
            names = [name for name in plan.methods if any(cell[2] == name for cell in missing)]
            servers = {}
            for name in names:
                servers[name] = stack.enter_context(self._server(name))
                self._wait(servers[name])
                servers[name].pause()
            for number, (round_, batch, method) in enumerate(missing, start=1):
                count = max(plan.min_prompts, plan.prompts_per_slot * int(batch))
                prompts = mixed_prompts(list(self.sets.values()), int(round_) * count, count)
                server = servers[method]
                server.resume()
                run = run_load(server, prompts, concurrency=int(batch), output_len=plan.output_len)
                server.pause()
                self.store.add(("speed", round_, batch, method), run.to_json())
                self._say(
                    f"speed {number}/{len(missing)}: batch {batch}, round {int(round_) + 1}, "
                    f"{method}: {run.tokens_per_s:.1f} tokens/s"
                )

    def run_lengths(self) -> None:
        """Mean acceptance length of every tree setting on every prompt set."""
        plan = self.plan
        for method in plan.length_methods():
            missing = [name for name in self.sets if ("length", method, name) not in self.store]
            if not missing:
                continue
            with self._server(method, max_step_rows=UNLIMITED_ROWS) as server:
                self._wait(server)
                for name in missing:
                    run = run_load(
                        server,
                        self.sets[name][: plan.length_prompts],
                        concurrency=4,
                        output_len=plan.output_len,
                    )
                    self.store.add(("length", method, name), run.to_json())
                    length = run.mean_acceptance_length
                    self._say(f"length: {method}, {name}: {length if length else 'no drafts'}")

    def _turn(self, round_: int) -> Sequence[str]:
        """The methods in this round's order: who goes first moves on."""
        shift = round_ % len(self.plan.methods)
        return self.plan.methods[shift:] + self.plan.methods[:shift]

    def _server(self, method: str, **options: Any) -> VllmServer:
        config = method_config(method, self.plan.head)
        spec = ServerSpec(
            name=method,
            model=self.plan.model,
            speculative_config=None if config is None else {**config, **options},
            max_model_len=self.plan.max_model_len,
            dtype=self.plan.dtype,
            enforce_eager=self.plan.enforce_eager,
            # A prompt met again must cost what it cost the first time.
            extra_args=("--no-enable-prefix-caching",),
        )
        return VllmServer(spec, self.log_folder / f"bench-{method}.log")

    def _wait(self, server: VllmServer) -> None:
        seconds = server.wait_healthy()
        run_chats(server.base_url, self.plan.model, [WARM_UP], concurrency=1, max_tokens=16)
        self._say(f"{server.spec.name} answers ({seconds:.0f} s)")

    def _say(self, message: str) -> None:
        self.console.print(message, highlight=False, markup=False)
