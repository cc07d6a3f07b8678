# SPDX-License-Identifier: Apache-2.0
"""More of what `test_latent` compares."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e import latent_pairs
from tests.e2e.families import WINDOW_PROMPTS
from tests.e2e.latent import latent_target, make_latent_target
from tests.e2e.latent_pairs import PROMPTS, compared, engines
from tests.e2e.oracle import OracleDrafter
from tests.e2e.pair import (
    changed,
    core_of,
    generate,
    make_engine,
    sequences_of,
)
from tests.e2e.requests import greedy

pytestmark = [pytest.mark.e2e, pytest.mark.own_process, pytest.mark.full]

# vLLM's operator for rotary embeddings is wrong for three dimensions; this asks for its torch code.
NATIVE_ROTARY = {"compilation_config": {"custom_ops": ["none"]}}


# vLLM keeps one rotary embedding of equal ones in a process, with the operator that it got first:
# the frequencies here are of no other check.
def test_a_rotary_embedding_that_mixes_rows_is_refused(tmp_path: Path) -> None:
    """Where plain vLLM answers differently in a batch and alone, and only there."""
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 3e4}}
    model = str(make_latent_target(tmp_path, "Glm4MoeLite", **rope))
    with pytest.raises((ValueError, RuntimeError), match=r"\(RotaryEmbedding\).*custom_ops.*none"):
        make_engine("ngram_tree", model=model, **latent_pairs.ENGINE)
    plain = make_engine(None, model=model, **latent_pairs.ENGINE)
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


def test_default_rotary_embeddings_without_the_operator() -> None:
    """GLM-4.7-Flash's shape, and a scheduler that works ahead."""
    tree = {"async_scheduling": True}
    made = engines(model=latent_target("Glm4MoeLite"), tree=tree, **NATIVE_ROTARY)
    counts = compared(made, least_accepted=100)
    assert counts.stale > 0, counts


def test_compressed_queries_and_grouped_experts() -> None:
    """DeepSeek-V3's shape, which Kimi-K2 has as well."""
    made = engines(model=latent_target("DeepseekV3"))
    compared(made, least_accepted=100)
    with latent_pairs.lines_for_trees(), pytest.raises(AssertionError, match="differs"):
        compared(made)


def test_chains() -> None:
    """Drafts without branches are decoded as trees are: vLLM would expand their context."""
    compared(engines(speculative={"tree_width": 1}), least_accepted=100, branching=False)


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


def test_costs_are_measured_with_trees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the adaptive budget starts from: rows of trees over one context, but for single rows."""
    from vllm_specplug.vllm_attention import latent

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
