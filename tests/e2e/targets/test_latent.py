# SPDX-License-Identifier: Apache-2.0
"""Trees over latent caches against plain decoding, float32 but for one test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.e2e.families import WINDOW_PROMPTS
from tests.e2e.latent import BACKEND, VOCAB, latent_target, make_latent_target
from tests.e2e.oracle import OracleDrafter
from tests.e2e.pair import (
    Counts,
    Pair,
    changed,
    core_of,
    generate,
    make_engine,
    pair,
    sequences_of,
)
from tests.e2e.requests import greedy, mixed_params
from tests.e2e.tiny import make_tokenswift_heads
from vllm_specplug.vllm_attention import latent
from vllm_specplug.vllm_v2 import latent_backend

pytestmark = [pytest.mark.e2e, pytest.mark.own_process(timeout_s=1500)]

ENGINE: dict[str, Any] = {"skip_tokenizer_init": True, **BACKEND}
# More than there is room for: prompts come in beside trees.
PROMPTS = [*WINDOW_PROMPTS, *([9, *p] for p in WINDOW_PROMPTS)]
# vLLM's operator for rotary embeddings is wrong for three dimensions; this asks for its torch code.
NATIVE_ROTARY = {"compilation_config": {"custom_ops": ["none"]}}


def engines(method: str = "oracle", **options: Any) -> Pair:
    return pair(method, **{"model": latent_target(), **ENGINE, **options})


def compared(made: Pair, **options: Any) -> Counts:
    return made.compare(PROMPTS, mixed_params(16), **options)[1]


def lines_for_trees() -> Any:
    def mask(stock: Any, words: torch.Tensor, columns: int) -> Any:
        return latent.line_mask(columns)

    return changed(latent_backend, "words_to_bool", mask)


def nothing_moves() -> Any:
    return patch.object(latent_backend, "move_latents", lambda *args: None)


def differs(made: Pair, wrong: Callable[[], Any]) -> None:
    with wrong(), pytest.raises(AssertionError, match="differs"):
        compared(made)


def test_greedy_and_seeded() -> None:
    """DeepSeek-V2's shape; vLLM never expands a context for it."""
    from vllm.model_executor.layers.attention.mla_attention import MLACommonBaseImpl

    made = engines()
    unexpected = AssertionError("a context was expanded")
    with patch.object(MLACommonBaseImpl, "_compute_prefill_context", side_effect=unexpected):
        counts = compared(made, least_accepted=100)
    assert counts.skipping > 20, counts


@pytest.mark.parametrize(
    "engine", [{}, pytest.param({"enforce_eager": False}, marks=pytest.mark.full)]
)
def test_lines_for_trees_and_lost_compaction_show(engine: dict[str, bool]) -> None:
    """Also in compiled engines, where experts are scored by a softmax."""
    made = engines(**engine)
    for wrong in (lines_for_trees, nothing_moves):
        differs(made, wrong)
    # Nothing of it is left behind.
    compared(made, least_accepted=100)


def test_drafts_that_do_not_read_the_cache(tmp_path: Path) -> None:
    """TokenSwift's heads read only hidden states."""
    options = {"model": str(make_tokenswift_heads(tmp_path, VOCAB)), "draft_source": "heads"}
    made = engines("tokenswift", model=latent_target(sharp=False), speculative=options)
    params = greedy(max_tokens=160, detokenize=False, ignore_eos=True)
    made.compare(WINDOW_PROMPTS, params, least_accepted=20)


# vLLM keeps one rotary embedding of equal ones in a process, with the operator that it got first:
# the frequencies here are of no other check.
@pytest.mark.full
def test_a_rotary_embedding_that_mixes_rows_is_refused(tmp_path: Path) -> None:
    """Where plain vLLM answers differently in a batch and alone, and only there."""
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 3e4}}
    model = str(make_latent_target(tmp_path, "Glm4MoeLite", **rope))
    with pytest.raises((ValueError, RuntimeError), match=r"\(RotaryEmbedding\).*custom_ops.*none"):
        make_engine("ngram_tree", model=model, **ENGINE)
    plain = make_engine(None, model=model, **ENGINE)
    params = greedy(max_tokens=8, detokenize=False, logprobs=1)
    together = generate(plain, WINDOW_PROMPTS[:4], params)
    alone = [generate(plain, [p], params)[0] for p in WINDOW_PROMPTS[:4]]
    best = [
        [max(x.logprob for x in step.values()) for o in outputs for step in o.outputs[0].logprobs]
        for outputs in (together, alone)
    ]
    difference = max(abs(a - b) for a, b in zip(*best, strict=True))
    print(f"plain vLLM, in a batch and alone: log-probabilities differ by {difference:.3f}")
    assert difference > 0.01


@pytest.mark.full
def test_default_rotary_embeddings_without_the_operator() -> None:
    """GLM-4.7-Flash's shape, and a scheduler that works ahead."""
    tree = {"async_scheduling": True}
    made = engines(model=latent_target("Glm4MoeLite"), tree=tree, **NATIVE_ROTARY)
    counts = compared(made, least_accepted=100)
    assert counts.stale > 0, counts


@pytest.mark.full
def test_compressed_queries_and_grouped_experts() -> None:
    """DeepSeek-V3's shape, which Kimi-K2 has as well."""
    made = engines(model=latent_target("DeepseekV3"))
    compared(made, least_accepted=100)
    differs(made, lines_for_trees)


@pytest.mark.full
def test_chains() -> None:
    """Drafts without branches are decoded as trees are: vLLM would expand their context."""
    compared(engines(speculative={"tree_width": 1}), least_accepted=100, branching=False)


@pytest.mark.full
def test_what_vllm_switches_off() -> None:
    """Prefix caching and prompts in chunks, with trees or without: they come in whole, and blocks
    are of 16 tokens."""
    made = engines(tree={"enable_prefix_caching": True, "max_num_batched_tokens": 64})
    config = made.tree.llm_engine.vllm_config
    assert not config.cache_config.enable_prefix_caching
    assert not config.scheduler_config.enable_chunked_prefill
    assert config.cache_config.block_size == 16
    assert core_of(made.tree).scheduler.block_size == 16
    compared(made, least_accepted=100)


@pytest.mark.full
def test_costs_are_measured_with_trees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the adaptive budget starts from: rows of trees over one context, but for single rows."""
    monkeypatch.setenv("SPECPLUG_CACHE", str(tmp_path))
    rows: list[int] = []

    def noted(stock: Any, query: Any, cache: Any, output: Any, spans: Any, *args: Any) -> None:
        rows.append(sum(span.num_rows for span in spans))
        assert all(span.num_rows <= 17 for span in spans)
        stock(query, cache, output, spans, *args)

    with changed(latent, "latent_attn", noted):
        made = engines(speculative={"tree_budget": "auto", "max_step_rows": 40})
    measured = made.runner.planner.adaptive.costs.forward.rows.tolist()
    assert len(measured) > 2 and measured[0] == 1, measured
    assert {float(count) for count in rows} == {*measured[1:]}
    assert made.runner.tree_backend.warmup_rows == 0
    compared(made, least_accepted=0, branching=False)


def _furthest_behind(plain: Any, made: list[Any], prompts: list[list[int]]) -> float:
    """How far, as a log-probability, a token of `made` is behind what `plain` finds the best after
    the same tokens, which it takes for a prompt."""
    params = greedy(max_tokens=1, detokenize=False, prompt_logprobs=1)
    behind = 0.0
    for prompt, output in zip(prompts, generate(plain, sequences_of(made), params), strict=True):
        pairs = zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
        for token, found in list(pairs)[len(prompt) :]:
            best = max(x.logprob for x in found.values())
            behind = max(behind, best - found[token].logprob)
    return behind


@pytest.mark.full
def test_bfloat16_is_as_close_as_plain_decoding() -> None:
    """vLLM decodes over latent rows and computes prompts over expanded keys, which round
    differently: trees may not be further from its prompts than its own decoding is."""
    made = engines(model=latent_target(sharp=False), dtype="bfloat16")
    params = greedy(max_tokens=40, detokenize=False)
    OracleDrafter.sequences = sequences_of(plain := generate(made.plain, PROMPTS, params))
    made.take_counts()
    drafted = generate(made.tree, PROMPTS, params)
    counts = made.take_counts()
    own, trees = (_furthest_behind(made.plain, each, PROMPTS) for each in (plain, drafted))
    print(f"furthest behind the best: plain {own:.4f}, trees {trees:.4f}; {counts}")
    assert counts.accepted > 100 and counts.branching > 0
    assert trees <= max(2 * own, 2**-5)
