# SPDX-License-Identifier: Apache-2.0
"""Steps against plain decoding, with the scheduler waiting for each of them and ahead of it.

Without a Triton for CPUs, both engines take the kernels that stand in for vLLM's;
`kernels/test_cpu_kernels.py` compares each with vLLM's own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.e2e.pair import (
    ENGINE,
    Counts,
    Pair,
    generate,
    head_options,
    scheduled,
    target,
    watch_preemptions,
    watch_prefix_hits,
)
from tests.e2e.requests import LONG, PROMPTS, greedy, seeded
from tests.e2e.tiny import make_dspark_head
from vllm_specplug.vllm_v2 import backend, stage

pytestmark = [pytest.mark.e2e, pytest.mark.own_process]


def mixed() -> list[Any]:
    return [greedy(max_tokens=24), *(seeded(i, max_tokens=24) for i in range(3))]


def engines(
    method: str = "oracle", *, ahead: bool = True, model: str | None = None, **tree: Any
) -> Pair:
    """A pair with six nodes per tree at most. `model` takes the place of the method's own head,
    `tree` has engine arguments of the tree engine alone."""
    options = {"num_speculative_tokens": 6, "tree_budget": 6, "ngram_topk": 3}
    options |= {} if model is None else {"model": model}
    made = scheduled(ahead, method, speculative=options, tree=tree)
    bases = {base.__module__ for base in type(made.runner).__mro__}
    assert "vllm.v1.worker.cpu.model_runner" in bases
    return made


def compare(method: str, ahead: bool, model: str | None = None) -> Counts:
    made = engines(method, ahead=ahead, model=model)
    _, counts = made.compare(PROMPTS[:4], mixed())
    # Steps that were prepared ahead, or none.
    assert (counts.stale > 0) == ahead, counts
    return counts


# tests/fuzz has all methods with a scheduler that waits.
@pytest.mark.parametrize(
    "method", ["oracle", "jetspec", "ddtree", "ngram_tree", "dels", "longspec", "eagle3_tree"]
)
def test_greedy_and_seeded_scheduled_ahead(method: str) -> None:
    assert compare(method, ahead=True).skipping > 3 or method != "oracle"


def test_a_local_head_behind_a_causal_block() -> None:
    causal = str(head_options("jetspec")["model"])
    for ahead in (False, True):
        compare("dels", ahead, causal)
    drafter = engines("dels", model=causal).runner.speculator.proposer.drafter
    assert drafter.config.causal and drafter.local_tree is not None
    assert not drafter.local_tree.is_idle


def test_drafts_of_the_target_itself() -> None:
    """Over a partial cache of 20 tokens, smaller than the contexts, selected again after 18."""
    for ahead in (False, True):
        made = engines("tokenswift", ahead=ahead)
        drafter = made.runner.drafter.drafter
        pool = drafter.target_forward.pool
        drafter.steps_from.clear()
        with patch.object(pool, "choose", wraps=pool.choose) as choose:
            made.compare([LONG[0], *PROMPTS[:3]], mixed())
        assert set(drafter.steps_from) == {"self"} and choose.call_count >= 4, drafter.steps_from
        # The next step drops what ended.
        generate(made.tree, PROMPTS[:1], greedy(max_tokens=2))
        assert len(pool.free) == pool.max_requests and not pool.regions
    made = engines("tokenswift", num_gpu_blocks_override=9)
    preempted = watch_preemptions(made.tree)
    made.compare(LONG[:3], greedy(max_tokens=70))
    assert preempted


@pytest.mark.parametrize("source", ["heads", "self"])
def test_sources_of_tokenswifts_drafts(source: str) -> None:
    """With penalties, which drafts apply as the next sample does. The target drafts for only some
    requests at once."""
    options = {"draft_source": source, "self_draft_requests": 2}
    made = scheduled(True, "tokenswift", speculative=options, tree={"enable_prefix_caching": True})
    drafted_from = made.runner.drafter.drafter.steps_from
    drafted_from.clear()
    own = {"extra_args": {"specplug_penalty": 1.4, "specplug_penalty_window": 20}}
    params = [
        greedy(max_tokens=40, presence_penalty=1.5, frequency_penalty=0.8),
        greedy(max_tokens=40, **own), seeded(2, max_tokens=40), seeded(3, max_tokens=40, **own),
    ]  # fmt: skip
    made.compare([LONG[0], *PROMPTS[:3]], params, branching=False)
    assert drafted_from[source] > 0, drafted_from


@pytest.mark.parametrize("kind", ["gated", "rnn", "domino"])
def test_heads_that_read_the_tokens_before(kind: str, tmp_path: Path) -> None:
    vocab = json.loads((target() / "config.json").read_text())["vocab_size"]
    compare("dspark_tree", True, str(make_dspark_head(tmp_path, vocab, kind=kind)))


def test_a_prefix_hit_that_leaves_one_token() -> None:
    """vLLM would pad such a request with drafts that nobody proposed."""
    made = engines(enable_prefix_caching=True)
    prompt = list(range(30, 63))
    made.compare([prompt], greedy(max_tokens=8))
    made.compare([prompt, *PROMPTS[:2]], greedy(max_tokens=8))


def test_full_prefix_hits_of_prompts_in_pieces() -> None:
    """Prompts of whole blocks, cached but for the last token or block, that are cut into pieces
    beside requests that decode."""
    for method, ahead in (("oracle", False), ("oracle", True), ("jetspec", True),
                          ("eagle3_tree", False), ("longspec", True)):  # fmt: skip
        made = engines(
            method, ahead=ahead, enable_prefix_caching=True, max_num_batched_tokens=64,
            long_prefill_token_threshold=10, num_gpu_blocks_override=24,
        )  # fmt: skip
        text = [6 + i % 50 for i in range(129)]
        prompts = [text[:128], text, text[:97], *PROMPTS[:3]]
        hits = watch_prefix_hits(made.tree)
        made.compare(prompts, greedy(max_tokens=12))
        assert not any(hits.values()), hits
        # All of them again, and a second time with seeds.
        for params in (greedy(max_tokens=12), seeded(4, max_tokens=12)):
            hits.clear()
            made.compare([*prompts, text[:65]], params)
            # A head that reads the next token has the last block computed again.
            again = 32 if method == "eagle3_tree" else 0
            assert sorted(n + again for n in hits.values())[-4:] == [64, 96, 96, 128], hits


def test_prompts_of_one_token_and_of_the_whole_context() -> None:
    longest = int(ENGINE["max_model_len"])
    prompts = [[8], *(list(range(6, 6 + longest - short)) for short in (1, 2, 20))]
    for method, ahead in (("oracle", False), ("oracle", True), ("jetspec", True)):
        made = scheduled(ahead, method, tree={"max_num_batched_tokens": 100})
        outputs, _ = made.compare(prompts, greedy(max_tokens=300))
        lengths = [len(o.prompt_token_ids) + len(o.outputs[0].token_ids) for o in outputs]
        assert lengths == [longest] * 4
        assert {o.outputs[0].finish_reason for o in outputs} == {"length"}


def test_rows_that_run_out() -> None:
    """Eight requests leave a request two nodes, then one, then the requests that are left more."""
    options = {"num_speculative_tokens": 6, "tree_budget": 6, "max_step_rows": 20}
    made = scheduled(True, speculative=options)
    made.compare(PROMPTS * 2, [greedy(max_tokens=6 + 4 * i) for i in range(8)])


def _diverges(made: Pair) -> None:
    def compare() -> None:
        for _ in range(3):
            made.compare(PROMPTS[:4], greedy(max_tokens=40))

    with pytest.raises(AssertionError, match="differs"):
        compare()


def test_it_would_notice_missing_compaction() -> None:
    made = engines(ahead=False)
    with patch.object(made.runner.tree_backend, "compact", lambda *args: None):
        _diverges(made)


def test_it_would_notice_linear_positions() -> None:
    with patch.object(stage, "set_positions", lambda *args: None):
        _diverges(engines())


def test_it_would_notice_a_causal_mask() -> None:
    def causal(trees: Any) -> torch.Tensor:
        offsets = trees.rows.offsets
        return (torch.ones_like(offsets) << (offsets + 1))[:, None] - 1

    with patch.object(backend, "ancestor_words", causal):
        _diverges(engines())
