# SPDX-License-Identifier: Apache-2.0
"""Quantised targets: the formats that vLLM's CPU build computes with, with a quantised LM head and
without.

Kernels for float32 activations are compared exactly. Four-bit weights, and int8 ones with AMX, need
bfloat16, where tree rows round otherwise than vLLM's own attention and products do, and trees part
from plain decoding only at near ties.
"""

from __future__ import annotations

import tempfile
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.pair import Pair, core_of, generate, make_engine, pair, sequences_of
from tests.e2e.quantised import dequantised, make_quantised_target
from tests.e2e.requests import greedy, seeded
from tests.e2e.tiny import make_head
from vllm_specplug.kernels.packed_linear import (
    has_packed_int4_products,
    has_packed_int8_products,
    has_packed_products,
)
from vllm_specplug.options import REQUEST_BUDGET_ARG
from vllm_specplug.vllm_worker.target import quantised

pytestmark = [pytest.mark.e2e, pytest.mark.own_process]

VOCAB = 128
PROMPTS = [[(37 * i + 11 * n) % 120 + 5 for i in range(n)] for n in (5, 9, 17, 30, 3, 12, 40, 7)]
# Of a logprob: four units of rounding of bfloat16 numbers between 1 and 2, the size of the scores.
MARGIN = 2.0**-5


@cache
def folder_of(scheme: str, head: bool, tied: bool = False, seed: int = 0) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="specplug-quantised-")) / "target"
    return make_quantised_target(folder, VOCAB, scheme, head=head, tied=tied, seed=seed)


@cache
def draft_head() -> Path:
    return make_head(Path(tempfile.mkdtemp(prefix="specplug-quantised-")) / "head", VOCAB)


def engines_of(scheme: str, dtype: str, head: bool, tied: bool = False, **options: Any) -> Pair:
    return pair(
        "jetspec",
        model=str(folder_of(scheme, head, tied)),
        dtype=dtype,
        skip_tokenizer_init=True,
        speculative={"model": str(draft_head()), **options},
    )


def _reads_the_tables_right(engines: Pair, scheme: str, head: bool, tied: bool = False) -> None:
    """Heads draft with the numbers that the target itself computes with."""
    from vllm_specplug.vllm_worker.proposer import full_vocab_weight, vocabulary_tables

    runner = engines.runner
    model, config = runner.model, runner.model_config
    embedding, lm_head = vocabulary_tables(model, config, "jetspec")
    if scheme == "int8" and not torch.cpu._is_vnni_supported():
        return  # vLLM's products overflow there, and heads read what they compute
    stored = load_file(folder_of(scheme, head, tied) / "model.safetensors")
    table = stored["model.embed_tokens.weight"]
    expected = table if tied else dequantised(stored, "lm_head.")
    close = {"atol": 1e-4, "rtol": 1e-4} if config.dtype == torch.float32 else {
        "atol": 2e-3, "rtol": 2**-6}  # fmt: skip
    torch.testing.assert_close(full_vocab_weight(lm_head, config).float(), expected, **close)
    torch.testing.assert_close(full_vocab_weight(embedding, config).float(), table, **close)


def _is_exact(scheme: str, heads: tuple[bool, ...] = (True,)) -> None:
    params = [greedy(detokenize=False), seeded(3, detokenize=False)]
    prompts = [prompt for prompt in PROMPTS for _ in params]
    for head in heads:
        engines = engines_of(scheme, "float32", head)
        engines.compare(prompts, [p.clone() for _ in PROMPTS for p in params])
        _reads_the_tables_right(engines, scheme, head)


def _needs_four_bits() -> None:
    """vLLM loads four-bit weights on any CPU, and fails in the first step where its build has no
    products for them."""
    if not hasattr(torch.ops._C, "cpu_gemm_wna16"):
        pytest.skip("vLLM's build for this CPU has no four-bit products")


def _needs_int8_of_float32() -> None:
    """vLLM's int8 products for AMX refuse float32 inputs."""
    from vllm.model_executor.layers.utils import check_cpu_sgl_kernel

    if not check_cpu_sgl_kernel(32, 32, torch.int8):
        return
    weight = torch.ops._C.convert_weight_packed(torch.zeros(32, 32, dtype=torch.int8))
    inputs, scales = torch.zeros(1, 32), torch.ones(32)
    try:
        torch.ops._C.int8_scaled_mm_with_quant(inputs, weight, scales, None, torch.float32, True)
    except RuntimeError as refusal:
        pytest.skip(f"plain vLLM refuses: {refusal}")


def _parts_at_ties_alone(scheme: str, heads: tuple[bool, ...] = (True,)) -> None:
    if scheme != "int8":
        _needs_four_bits()
    for head in heads:
        engines = engines_of(scheme, "bfloat16", head)
        assert _uses_packed_products(engines.plain) == {False}
        assert _uses_packed_products(engines.tree) == {_is_packed(scheme)}
        engines.compare_up_to_ties(PROMPTS, 48, MARGIN)
        _reads_the_tables_right(engines, scheme, head)


def _is_packed(scheme: str) -> bool:
    if scheme == "int8":
        return has_packed_int8_products()
    return has_packed_products() and has_packed_int4_products()


def _uses_packed_products(llm: Any) -> set[bool]:
    """Whether quantised layers compute with the package's products: of all of them."""
    model = core_of(llm).model_executor.driver_worker.worker.model_runner.model
    kernels = [
        vars(owner.kernel)
        for module in model.modules()
        for owner in (getattr(module, "scheme", None), getattr(module, "quant_method", None))
        if hasattr(owner, "kernel")
    ]
    products = [kernel.get("apply_weights") or kernel.get("linear_method") for kernel in kernels]
    return {getattr(product, "__module__", None) == quantised.__name__ for product in products}


@pytest.mark.parametrize("scheme", ["w4a16", "w4a16-zeros", "int8"])
def test_a_text_does_not_depend_on_its_drafts(scheme: str) -> None:
    if not _is_packed(scheme):
        pytest.skip("vLLM's products depend on the rows of a step")
    engines = engines_of(scheme, "bfloat16", True)
    answers = []
    for budget in (0, 16):
        params = [
            make(detokenize=False, extra_args={REQUEST_BUDGET_ARG: budget})
            for make in (greedy, partial(seeded, 3))
            for _ in PROMPTS
        ]
        engines.take_counts()
        answers.append(sequences_of(generate(engines.tree, [*PROMPTS, *PROMPTS], params)))
    counts = engines.take_counts()
    assert answers[0] == answers[1]
    assert counts.accepted > 20 and counts.branching > 0, counts


@pytest.mark.parametrize("eager", [True, pytest.param(False, marks=pytest.mark.full)])
@pytest.mark.parametrize("scheme", ["gptq", "int8"])
def test_reloaded_weights_are_packed_again(scheme: str, eager: bool) -> None:
    if not _is_packed(scheme):
        pytest.skip("vLLM's own products, whose int8 ones it loses at a reload")
    old, new = (folder_of(scheme, True, seed=seed) for seed in (0, 1))
    engines = [
        make_engine(
            "jetspec",
            model=str(model),
            dtype="bfloat16",
            skip_tokenizer_init=True,
            enforce_eager=eager,
            speculative={"model": str(draft_head())},
        )
        for model in (old, new)
    ]
    params = greedy(detokenize=False)
    before = sequences_of(generate(engines[0], PROMPTS, params))
    engines[0].collective_rpc("reload_weights", kwargs={"weights_path": str(new)})
    engines[0].reset_prefix_cache()
    after, expected = (sequences_of(generate(llm, PROMPTS, params)) for llm in engines)
    assert after == expected != before


def test_int8_weights_and_inputs() -> None:
    _needs_int8_of_float32()
    _is_exact("int8", (False, True))


def test_int8_weights_and_inputs_in_bfloat16() -> None:
    if not torch.cpu._is_vnni_supported():
        pytest.skip("vLLM's int8 products overflow without VNNI")
    _parts_at_ties_alone("int8", (False, True))


def test_fp8_weights_and_inputs() -> None:
    _is_exact("fp8-channels")


@pytest.mark.parametrize("scheme", ["w4a16", "w4a16-zeros", "gptq", "awq"])
def test_four_bit_weights(scheme: str) -> None:
    _parts_at_ties_alone(scheme, (False, True) if scheme == "gptq" else (True,))


def test_a_tied_target() -> None:
    _needs_four_bits()
    engines = engines_of("gptq", "bfloat16", False, tied=True)
    engines.compare_up_to_ties(PROMPTS, 48, MARGIN)
    _reads_the_tables_right(engines, "gptq", False, tied=True)


def test_it_would_notice_missing_compaction() -> None:
    """The negative control: the margin tells rounding from a wrong cache."""
    _needs_four_bits()
    engines = engines_of("gptq", "bfloat16", False)
    lost = patch.object(engines.runner.tree_backend, "compact", lambda *args: None)
    with lost, pytest.raises(AssertionError, match="behind the best"):
        engines.compare_up_to_ties(PROMPTS, 48, MARGIN)
