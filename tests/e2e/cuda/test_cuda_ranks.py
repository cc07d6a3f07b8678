# SPDX-License-Identifier: Apache-2.0
"""Two ranks as on CUDA, in Triton's interpreter.

Tensor parallel: a target that drafts for itself, and a head that reads the target's caches, run on
all ranks or on none. Pipeline parallel: the last stage drafts.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.assistants import make_followed_target
from tests.e2e.fork_server import run_fresh
from tests.e2e.tiny import make_head, make_longspec_head, make_target, make_tokenswift_heads
from tests.e2e.tiny_engine import PARAMS, VOCAB, tiny_engine

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.xdist_group("cuda_ranks")]

# All of them outgrow the partial caches, one after the other, and there are two.
PROMPTS = [[(5 * i + n) % 9 + 2 for i in range(n)] for n in (34, 30, 16)]
SEEDED = {"temperature": 0.8, "seed": 3}
CALLS = [
    {
        "prompts": PROMPTS,
        "params": [{**PARAMS, "max_tokens": 28, **more} for more in ({}, SEEDED, {})],
    }
]
SPECULATIVE = {
    "method": "tokenswift", "draft_source": "self", "num_speculative_tokens": 6, "tree_budget": 6,
    "kv_budget": 36, "self_draft_requests": 2,
}  # fmt: skip


def _run(
    folder: Path,
    name: str,
    speculative: dict[str, Any] | None,
    calls: list[dict[str, Any]] = CALLS,
    num_ranks: int = 2,
    split: str = "tensor",
) -> dict[str, Any]:
    engine = {
        **tiny_engine(folder / "target"), f"{split}_parallel_size": num_ranks, "max_model_len": 128,
        "max_num_batched_tokens": 64, "kv_cache_memory_bytes": 1 << 24,
    }  # fmt: skip
    if speculative is not None:
        engine |= {"async_scheduling": True, "speculative_config": speculative}
    job = {"engine": engine, "calls": calls, "own_processes": True}
    notes, result, log = (folder / f"{name}.{kind}" for kind in ("notes", "json", "log"))
    notes.mkdir()
    (folder / f"{name}.job").write_text(json.dumps(job))
    arguments = [str(folder / f"{name}.job"), str(result), str(notes)]
    environment = {
        "SPECPLUG_INTERPRETED": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        # vLLM compiles what ranks do with tokens of others, and the interpreter is no compiler.
        "TORCHDYNAMO_DISABLE": "1",
    }
    run_fresh("tests.e2e.cuda.cuda_ranks", arguments, log, env=environment)
    assert result.is_file(), log.read_text()[-6000:]
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def _tokens(result: dict[str, Any]) -> list[list[list[int]]]:
    return [[request[0]["token_ids"] for request in call["outputs"]] for call in result["calls"]]


def test_ranks_draft_from_one_source(tmp_path: Path) -> None:
    make_target(tmp_path / "target", VOCAB)
    make_tokenswift_heads(tmp_path / "swift", VOCAB)
    plain = _run(tmp_path, "plain", None)
    tree = _run(tmp_path, "tree", {**SPECULATIVE, "model": str(tmp_path / "swift")})
    assert _tokens(tree) == _tokens(plain)
    assert tree["counters"]["vllm:spec_decode_num_accepted_tokens"] > 0
    notes = tmp_path / "tree.notes"
    first, second = (
        [json.loads(line) for line in (notes / f"rank{rank}.jsonl").read_text().splitlines()]
        for rank in (0, 1)
    )
    for name in ("requests", "source"):
        assert [step[name] for step in first] == [step[name] for step in second], name
    sources = [step["source"] for step in first]
    assert all(sources.count(source) > 3 for source in ("self", "heads")), sources
    # What would have parted them: what a rank knows late of its contexts, and so which of them it
    # reads in part.
    for name in ("would_fit_by_late_bounds", "partial"):
        assert [step[name] for step in first] != [step[name] for step in second], name
    assert any(step["partial"] for step in first) and any(step["partial"] for step in second)


MAKE: dict[str, Callable[[Path], object]] = {
    "longspec": lambda folder: make_longspec_head(
        make_target(folder / "target", VOCAB).parent / "assistant", VOCAB, window=24
    ),
    "assistant_tree": lambda folder: make_followed_target(folder, VOCAB),
}


@pytest.mark.parametrize("method", MAKE)
def test_ranks_attend_all_heads(tmp_path: Path, method: str) -> None:
    """Two ranks draft as one does under a fixed budget. An adaptive one decides late on the second
    rank."""
    MAKE[method](tmp_path)
    speculative = {"method": method, "model": str(tmp_path / "assistant"), "ngram_topk": 0,
                   "num_speculative_tokens": 8, "tree_depth": 2}  # fmt: skip
    calls = [{"prompts": [PROMPTS[0], PROMPTS[2][:5]], "params": {**PARAMS, "max_tokens": 12}}]
    fixed = {**speculative, "tree_budget": 8}
    one, two = (_run(tmp_path, f"fixed{n}", fixed, calls, n) for n in (1, 2))
    adaptive = _run(tmp_path, "adaptive", speculative, calls)
    assert _tokens(one) == _tokens(two) == _tokens(adaptive)
    names = [f"vllm:spec_decode_num_{counter}_tokens" for counter in ("draft", "accepted")]
    assert one["counters"][names[1]] > 0 and adaptive["counters"][names[0]] > 0
    assert [one["counters"][name] for name in names] == [two["counters"][name] for name in names]


def test_stages_keep_the_output(tmp_path: Path) -> None:
    make_target(tmp_path / "target", VOCAB)
    head = str(make_head(tmp_path / "head", VOCAB))
    speculative = {"method": "jetspec", "model": head, "num_speculative_tokens": 8}
    plain = _run(tmp_path, "plain", None, num_ranks=1)
    tree = _run(tmp_path, "tree", speculative, split="pipeline")
    assert _tokens(tree) == _tokens(plain)
    assert tree["counters"]["vllm:spec_decode_num_accepted_tokens"] > 0
