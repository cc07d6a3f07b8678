# SPDX-License-Identifier: Apache-2.0
"""Trained heads on targets of each family: accepted for what they have learnt, and token-identical
to plain decoding, float32."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import trained as trained_heads
from tests.e2e.adapters import LORA, MODULES
from tests.e2e.latent import BACKEND
from tests.e2e.pair import Counts, Pair
from tests.e2e.requests import greedy
from tests.e2e.tiny import make_adapter
from tests.e2e.trained import PROMPTS, is_accepted_as_learnt, trained
from tests.e2e.vision import compare_answers, vision_engines, with_image

pytestmark = [pytest.mark.e2e, pytest.mark.own_process]


FAMILIES: list[tuple[str, str, dict[str, Any]]] = [
    # vLLM's classes of Gemma give no outputs of layers; the plugin takes them.
    ("Gemma3", "eagle3", {}),
    ("Gemma3", "eagle3", {"tree": {"enforce_eager": False}}),
    ("Gemma2", "eagle3", {}),
    ("GptOss", "eagle3", {}),
    ("Qwen3Moe", "dflash", {}),
    ("Mixtral", "dflash", {}),
    ("DeepseekV2", "eagle3", BACKEND),
    ("Mistral", "jetspec", {}),
    ("Bloom", "eagle3", {}),
    # Learned positions and biases; a block head has neither.
    ("GPT2", "jetspec", {}),
    ("OPT", "eagle3", {}),
]


IN_FULL = [pytest.param(*made, marks=pytest.mark.full) for made in FAMILIES[1:]]


@pytest.mark.parametrize(("family", "kind", "engine"), [FAMILIES[0], *IN_FULL])
def test_what_was_learnt_is_accepted(family: str, kind: str, engine: dict[str, Any]) -> None:
    is_accepted_as_learnt(family, kind, **engine)


def _images(made: Pair) -> Counts:
    from vllm.inputs import tokens_input

    inputs = [
        with_image([], prompt, i, 2 + i, 5 - i) if i % 2 else tokens_input(prompt)
        for i, prompt in enumerate(PROMPTS[:4])
    ]
    return compare_answers(made, inputs, max_tokens=40, ignore_eos=True, detokenize=False)[1]


@pytest.mark.full
def test_qwen2_5_vl() -> None:
    """Text, and text behind images."""

    def build(family: str, kind: str, head: Path) -> Pair:
        model = str(trained(family, kind).target)
        speculative = {"model": str(head), "ngram_topk": 0}
        return vision_engines(
            method=trained_heads.METHODS[kind], model=model, speculative=speculative
        )

    is_accepted_as_learnt("Qwen2_5_VL", "eagle3", compared=_images, build=build)


@pytest.mark.full
def test_adapters() -> None:
    """One head, of the base model, for requests with adapters and without in one batch."""
    from vllm.lora.request import LoRARequest

    folder = Path(tempfile.mkdtemp(prefix="specplug-adapters-"))
    target = trained("Llama", "jetspec").target
    each: list[Any] = [None]
    # As large as changes some answers: the base model's head knows little of others.
    for i, (name, size) in enumerate({"layers": 2.0, "embedding": 1.0}.items(), 1):
        made = make_adapter(folder / name, target, MODULES[name], seed=2 * i, size=size)
        each.append(LoRARequest(name, i, str(made)))

    def compared(made: Pair) -> Counts:
        params = greedy(max_tokens=40, ignore_eos=True, detokenize=False)
        prompts = [prompt for prompt in PROMPTS for _ in each]
        adapters = each * len(PROMPTS)
        expected, counts = made.compare(prompts, params, least_accepted=0, adapters=adapters)
        answers = [output.outputs[0].token_ids for output in expected]
        for i in (1, 2):
            assert answers[i :: len(each)] != answers[:: len(each)], f"adapter {i} changes nothing"
        return counts

    is_accepted_as_learnt("Llama", "jetspec", compared=compared, least=0.35, **LORA)
