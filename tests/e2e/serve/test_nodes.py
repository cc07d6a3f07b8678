# SPDX-License-Identifier: Apache-2.0
"""One server over two nodes: tensor parallel ranks and data parallel replicas, as plain vLLM."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import engine_args, run_engine
from tests.e2e.serve.doc_commands import commands_of
from tests.e2e.served import MARK, Server
from tests.e2e.tiny import make_head, make_text_target
from vllm_specplug.bench.server import free_port

pytestmark = [pytest.mark.e2e, MARK]

ROOT = Path(__file__).resolve().parents[3]
PROMPTS = [[7, 40, 41], [60, 61, 62, 63], [100, 9], [270, 280, 290, 11, 12], [8], [33, 34]]
SAMPLING: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.8, "seed": 7}]
DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
METHODS: dict[str, dict[str, Any]] = {
    "ngram_tree": {"method": "ngram_tree", "tree_budget": 12},
    # The default budget, which follows the clock; every third request has its own budget.
    "jetspec": {"method": "jetspec", "model": "head"},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nodes")
    target = make_text_target(folder / "target")
    make_head(folder / "head", json.loads((target / "config.json").read_text())["vocab_size"])
    return folder


def _common(models: Path, method: str | None) -> list[str]:
    arguments = [
        str(models / "target"), "--dtype", "float32", "--enforce-eager", "--max-model-len", "256",
        "--max-num-seqs", "4", "--block-size", "32", "--no-enable-prefix-caching",
    ]  # fmt: skip
    if method is not None:
        spec = {"num_speculative_tokens": 12, "max_step_rows": 512, **METHODS[method]}
        if "model" in spec:
            spec["model"] = str(models / spec["model"])
        arguments += ["--speculative-config", json.dumps(spec)]
    return arguments


def _requests(models: Path, *, own_budgets: bool) -> list[dict[str, Any]]:
    requests = [
        {"model": str(models / "target"), "prompt": prompt, "max_tokens": 48, "ignore_eos": True,
         **sampling}
        for prompt in PROMPTS for sampling in SAMPLING
    ]  # fmt: skip
    if own_budgets:
        for request in requests[::3]:
            request["vllm_xargs"] = {"specplug_tree_budget": 8}
    return requests


def _rank_nodes(common: list[str], address: list[str], split: str = "tensor") -> list[list[str]]:
    """Returns the options of each node, which runs a tensor parallel rank or a pipeline stage."""
    common = [
        *common, f"--{split}-parallel-size", "2", "--nnodes", "2", "--master-addr", "127.0.0.1",
        "--master-port", str(free_port()),
    ]  # fmt: skip
    return [[*common, "--node-rank", "0", *address], [*common, "--node-rank", "1", "--headless"]]


def _replica_nodes(common: list[str], address: list[str]) -> list[list[str]]:
    common = [
        *common, "--data-parallel-size", "2", "--data-parallel-size-local", "1",
        "--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", str(free_port()),
    ]  # fmt: skip
    second = ["--data-parallel-start-rank", "1", "--headless"]
    return [[*common, "--api-server-count", "1", *address], [*common, *second]]


def _serve(
    models: Path, folder: Path, method: str | None, *sabotage: str,
    nodes: Callable[[list[str], list[str]], list[list[str]]] = _rank_nodes,
) -> Server:  # fmt: skip
    port = free_port()
    commands = nodes(_common(models, method), ["--host", "127.0.0.1", "--port", str(port)])
    return Server(commands, port, folder, *sabotage)


@pytest.fixture(scope="module")
def plain(models: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    with _serve(models, tmp_path_factory.mktemp("plain"), None) as server:
        tokens = server.complete_all(_requests(models, own_budgets=False))
        assert not server.metric(DRAFTED)
    assert len(set(map(tuple, tokens))) > len(PROMPTS)
    return tokens


@pytest.mark.parametrize("method", ["ngram_tree", pytest.param("jetspec", marks=pytest.mark.full)])
def test_ranks_on_two_nodes_keep_the_output(
    models: Path, tmp_path: Path, plain: list[list[int]], method: str
) -> None:
    """The second rank drafts other trees by another clock, and all ranks verify the first's."""
    with _serve(models, tmp_path, method, "clock", "drafts") as server:
        requests = _requests(models, own_budgets=method == "jetspec")
        assert server.complete_all(requests) == plain
        assert server.metric(DRAFTED)["0"] > server.metric(ACCEPTED)["0"] > 0


@pytest.mark.full
def test_stages_on_two_nodes_keep_the_output(
    models: Path, tmp_path: Path, plain: list[list[int]]
) -> None:
    nodes = partial(_rank_nodes, split="pipeline")
    with _serve(models, tmp_path, "jetspec", nodes=nodes) as server:
        assert server.complete_all(_requests(models, own_budgets=True)) == plain
        assert server.metric(DRAFTED)["0"] > server.metric(ACCEPTED)["0"] > 0


@pytest.mark.full
@pytest.mark.parametrize("method", [None, "ngram_tree"], ids=["plain", "trees"])
def test_a_node_that_dies_ends_the_engine(models: Path, tmp_path: Path, method: str | None) -> None:
    with _serve(models, tmp_path, method) as server:
        server.complete_all(_requests(models, own_budgets=False))
        server.kill_last_node()
        assert server.ends()


def test_replicas_on_two_nodes_keep_the_output(models: Path, tmp_path: Path) -> None:
    requests = _requests(models, own_budgets=False)
    prompts = [request["prompt"] for request in requests]
    params = [{k: v for k, v in r.items() if k not in ("model", "prompt")} for r in requests]
    engine = engine_args(model=str(models / "target"), max_model_len=256, max_num_seqs=4)
    plain = run_engine(engine, [{"prompts": prompts, "params": params}])
    with _serve(models, tmp_path, "ngram_tree", nodes=_replica_nodes) as server:
        assert server.complete_all(requests) == plain.token_ids()
        # Both replicas draft. How much each of them accepts depends on the requests that it gets.
        drafted = server.metric(DRAFTED)
        assert set(drafted) == {"0", "1"} and all(drafted.values())
        assert sum(drafted.values()) > sum(server.metric(ACCEPTED).values()) > 0


def test_the_page_has_these_commands() -> None:
    page = [
        set(filter(_is_option, shlex.split(command, comments=True)))
        for command in commands_of(ROOT / "docs" / "several_machines.md")
        if " ray" not in command
    ]
    nodes = [*_rank_nodes([], []), *_replica_nodes([], [])]
    assert len(page) == len(nodes)
    for documented, command in zip(page, nodes, strict=True):
        # Ports have defaults, and one API server is enough for a test.
        used = set(filter(_is_option, command)) - {"--master-port", "--api-server-count"}
        assert documented - {"--speculative-config"} == used


def _is_option(argument: str) -> bool:
    return argument.startswith("--")
