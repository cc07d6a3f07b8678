# SPDX-License-Identifier: Apache-2.0
"""A target's own module under vLLM's method and as trees, and one that is stored in fp8."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from vllm import envs

from tests.e2e.eagle3_chains import CHAIN, compare_in_batches_and_after_hits, own_engine
from tests.e2e.fp8_modules import BLOCKS, CHANNELS, write_checkpoints
from tests.e2e.latent import BACKEND, make_latent_target
from tests.e2e.mimo import PREFIX, make_mimo_target
from tests.e2e.mtp_modules import PROMPTS, VOCAB, add_module
from tests.e2e.pair import generate, make_engine, pair, sequences_of, watch_drafts
from tests.e2e.requests import greedy, seeded
from tests.e2e.tiny import make_other_target

pytestmark = [pytest.mark.e2e, pytest.mark.own_process]
LONG = [3 + (7 * i * i + 3 * i) % 20 for i in range(101)]


GLM: dict[str, Any] = {
    "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
    "intermediate_size": 128, "max_position_embeddings": 256, "num_hidden_layers": 2,
    "moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5,
    "use_qk_norm": True, "attention_bias": True, "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}  # fmt: skip


# vLLM's operator for rotary embeddings is wrong for three dimensions; this selects its torch code.
LATENT: dict[str, Any] = {**BACKEND, "compilation_config": {"custom_ops": ["none"]}}


@pytest.fixture(
    scope="module",
    params=["mimo", "glm", "Glm4MoeLite", pytest.param("DeepseekV3", marks=pytest.mark.full)],
)
def target(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("target")
    arguments = {"model": str(folder), "skip_tokenizer_init": True, "trust_remote_code": True}
    if request.param == "mimo":
        make_mimo_target(folder, VOCAB)
    elif request.param == "glm":
        add_module(make_other_target(folder, "Glm4Moe", VOCAB, **GLM))
    else:
        # With MLA
        add_module(make_latent_target(folder, request.param, vocab_size=VOCAB))
        arguments |= LATENT
    return arguments


def test_chains_are_those_of_vllms_own_method(target: dict[str, Any]) -> None:
    """Found by the target itself, with prompts in a batch and after prefix hits."""
    engine = {**target, "enable_prefix_caching": True, "async_scheduling": False}
    ours = {**CHAIN, "method": "tree", "model": engine["model"]}
    # vLLM's MLA on a CPU cannot verify drafts. Without MLA it computes the same from the weights.
    with patch.object(envs, "VLLM_MLA_DISABLE", True):
        own = own_engine("mtp", **{n: engine[n] for n in engine if n != "attention_backend"})
    engines = (own, make_engine("mtp_tree", speculative=ours, **engine))
    compare_in_batches_and_after_hits(engines, PROMPTS, LONG)


def test_trees_are_lossless_and_branch(target: dict[str, Any]) -> None:
    """The module is the target's own where no model is named."""
    engines = pair("mtp_tree", **target)
    params = [greedy(detokenize=False), seeded(3, detokenize=False)]
    prompts = [p for p in PROMPTS for _ in params]
    engines.compare(prompts, [p.clone() for _ in PROMPTS for p in params], least_accepted=8)


@pytest.mark.parametrize("kind", ["glm", pytest.param("mimo", marks=pytest.mark.full)])
def test_a_module_in_fp8_drafts_what_its_numbers_draft(kind: str, tmp_path: Path) -> None:
    """With experts and scales of blocks, which end within them, and with scales of channels in the
    target's own checkpoint. vLLM serves no target in the former's format in float32, so there the
    module comes from a folder of its own."""
    if kind == "glm":
        folder = add_module(make_other_target(tmp_path / "made", "Glm4Moe", VOCAB, **GLM))
        quantization = {**BLOCKS, "weight_block_size": [24, 40]}
        in_fp8, plain = write_checkpoints(folder, "model.layers.2.", quantization)
        engine: dict[str, Any] = {"model": str(plain), "speculative": {"model": str(in_fp8)}}
    else:
        folder = make_mimo_target(tmp_path / "made", VOCAB)
        in_fp8, plain = write_checkpoints(folder, PREFIX, CHANNELS)
        engine = {"model": str(in_fp8)}
    arguments = {"skip_tokenizer_init": True, "trust_remote_code": True, "async_scheduling": False}
    engines = pair("mtp_tree", **engine, **arguments)
    params = greedy(detokenize=False)
    with watch_drafts(engines.tree) as drafted:
        outputs, _ = engines.compare(PROMPTS, params, least_accepted=8)
    other = make_engine("mtp_tree", model=str(plain), **arguments)
    with watch_drafts(other) as expected:
        assert sequences_of(generate(other, PROMPTS, params)) == sequences_of(outputs)
    assert len(expected) > 20 and drafted == expected
