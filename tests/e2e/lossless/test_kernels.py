# SPDX-License-Identifier: Apache-2.0
"""Plain vLLM on its V2 runner with our kernels, against V1 and vLLM's kernels interpreted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from tests.e2e.pair import assert_same_output, core_of, generate, make_engine, vllms_v1

pytest.importorskip("triton")

# Triton decides while it is imported whether its kernels are interpreted.
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.own_process(fresh=True, env={"TRITON_INTERPRET": "1"}),
]

_PROMPTS = [np.random.default_rng(i).integers(6, 350, 5 + 9 * i).tolist() for i in range(4)]
_LENGTH = {"max_tokens": 10, "ignore_eos": True}


def runner_of(llm: Any) -> str:
    """The module of an engine's model runner."""
    return type(core_of(llm).model_executor.driver_worker.worker.model_runner).__module__


@pytest.fixture(scope="module")
def v1() -> Any:
    with vllms_v1():
        made = make_engine(None, max_num_batched_tokens=24)
    assert runner_of(made) == "vllm.v1.worker.cpu_model_runner"
    return made


@pytest.fixture(scope="module")
def v2() -> Any:
    made = make_engine(None, max_num_batched_tokens=24)
    assert runner_of(made) == "vllm.v1.worker.cpu.model_runner"
    return made


@contextmanager
def interpreted_kernels() -> Iterator[list[str]]:
    """vLLM's own kernels, interpreted; yields the names of those that were launched."""
    import importlib

    from tests.kernels.interpreted_vllm import PREFIX, interpreted, our_kernels
    from vllm_specplug.seams import CPU_KERNELS

    launched: list[str] = []

    class Noted:
        def __init__(self, name: str, kernel: Any) -> None:
            self.name, self.kernel = name, kernel

        def __getitem__(self, grid: Any) -> Any:
            launched.append(self.name)
            return self.kernel[grid]

    modules = {s.target.partition(":")[0] for s in CPU_KERNELS.seams if PREFIX in s.target}
    with ExitStack() as stack:
        for path in modules:
            name = path.removeprefix(f"{PREFIX}.")
            module, copy = importlib.import_module(path), interpreted(name)
            for kernel in our_kernels(name):
                noted = Noted(kernel, getattr(copy, kernel))
                stack.enter_context(patch.object(module, kernel, noted))
        yield launched


def compare(v2: Any, sampling: list[dict[str, Any]], v1: Any = None) -> set[str]:
    """Raises unless the outputs are the same, those of V1 too if it is given; returns which kernels
    vLLM launched."""
    from vllm import SamplingParams

    params = [SamplingParams(**{**_LENGTH, **one}) for one in sampling]
    ours = generate(v2, _PROMPTS, params)
    with interpreted_kernels() as launched, np.errstate(over="ignore"):
        stock = generate(v2, _PROMPTS, params)
    for i, (a, b) in enumerate(zip(ours, stock, strict=True)):
        assert_same_output(a, b, f"request {i}, interpreted")
    if v1 is not None:
        with vllms_v1():
            expected = generate(v1, _PROMPTS, params)
        for i, (a, b) in enumerate(zip(expected, ours, strict=True)):
            assert_same_output(a, b, f"request {i}, V1")
    return set(launched)


def test_greedy(v2: Any, v1: Any) -> None:
    """Prompts in pieces, four lengths, logprobs of prompts and answers."""
    launched = compare(
        v2,
        [
            {"temperature": 0.0},
            {"temperature": 0.0, "logprobs": 3},
            {"temperature": 0.0, "prompt_logprobs": 2},
            {"temperature": 0.0, "max_tokens": 3},
        ],
        v1,
    )
    assert {
        "_prepare_prefill_inputs_kernel", "_prepare_pos_seq_lens_kernel", "_post_update_kernel",
        "_combine_sampled_and_draft_tokens_kernel", "_compute_slot_mappings_kernel",
        "_gather_block_tables_kernel", "_apply_write_kernel", "_gumbel_sample_kernel",
        "_topk_log_softmax_kernel", "_ranks_kernel", "_prompt_logprobs_token_ids_kernel",
        "_get_num_sampled_and_rejected_kernel",
    } <= launched, launched  # fmt: skip


def test_greedy_with_options(v2: Any, v1: Any) -> None:
    """What changes logits, on V1 too."""
    launched = compare(
        v2,
        [
            {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
            {"temperature": 0.0, "presence_penalty": 1.5, "logit_bias": {7: 20.0, 9: 19.0}},
            {"temperature": 0.0, "allowed_token_ids": list(range(20, 60))},
            {"temperature": 0.0, "min_tokens": 6, "ignore_eos": False,
             "logit_bias": {1: 100.0}, "stop_token_ids": [11, 12]},
        ],
        v1,
    )  # fmt: skip
    assert {"_penalties_kernel", "_bincount_kernel", "_bias_kernel"} <= launched, launched


def test_sampled(v2: Any) -> None:
    """Seeded; V1 draws other numbers."""
    launched = compare(
        v2,
        [
            {"temperature": 1.0, "seed": 5},
            {"temperature": 0.7, "seed": 6, "top_k": 20, "top_p": 0.8},
            {"temperature": 1.4, "seed": 7, "min_p": 0.05, "repetition_penalty": 1.2},
            {"temperature": 0.0},
        ],
    )
    assert {"_temperature_kernel", "_min_p_kernel"} <= launched, launched


def test_grammar_and_bad_words(v2: Any) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    tokenizer = v2.get_tokenizer()
    words = [tokenizer.decode([token]) for token in range(260, 340)]
    launched = compare(
        v2,
        [
            {"temperature": 0.0, "bad_words": words},
            {
                "temperature": 0.0,
                "structured_outputs": StructuredOutputsParams(regex="[a-c ]{8,9}"),
            },
            {"temperature": 0.9, "seed": 3, "bad_words": words},
            {"temperature": 0.0, "bad_words": words[:3]},
        ],
    )
    assert {"_bad_words_kernel", "_apply_grammar_bitmask_kernel"} <= launched, launched
