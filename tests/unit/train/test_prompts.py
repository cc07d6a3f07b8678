# SPDX-License-Identifier: Apache-2.0
"""Prompt makers: deterministic, diverse, well-formed."""

from __future__ import annotations

import itertools
import random

import pytest

from vllm_specplug.train import prompts
from vllm_specplug.train.generate import make_prompts


@pytest.mark.parametrize("maker", [prompts.topic_prompts, prompts.self_instruct_prompts])
def test_makers_are_deterministic_and_diverse(maker):
    first, second = (list(itertools.islice(maker(random.Random(3)), 60)) for _ in range(2))
    assert first == second
    assert len({str(p) for p in first}) > 20
    assert all("{" not in p.source for p in first)


def test_every_template_slot_has_words():
    rng = random.Random(0)
    filled = ("code_tasks", "systems")
    groups = [*prompts._FAMILIES.values(), *(prompts._TEMPLATES[name] for name in filled)]
    for template in itertools.chain(*groups):
        assert "{" not in prompts.fill(template, rng)


def test_stubs_of_a_module_hold_signature_and_docstring(tmp_path):
    path = tmp_path / "m.py"
    path.write_text(
        "class A:\n"
        "    def method(self):\n"
        '        """A method that must not be taken since it needs self."""\n'
        "        return 1\n\n"
        "def add(a, b):\n"
        '    """Add two numbers and return their sum, whatever they are."""\n'
        "    return a + b\n"
    )
    (stub,) = prompts._function_stubs(path)
    assert stub.startswith("def add(a, b):")
    assert stub.rstrip().endswith('"""')
    assert "return a + b" not in stub


def test_make_prompts_uses_the_target_for_turns(tmp_path):
    asked = []

    def write_texts(requests, temperature, max_tokens, seed):
        asked.append((len(requests), temperature))
        return [f"Please tell me about subject number {i}. " * 8 for i in range(len(requests))]

    made = make_prompts({"self": 5, "topic": 3}, 0, write_texts)
    kinds = [p.source.split("/")[0] for p in made]
    assert kinds.count("topic") == 3
    assert kinds.count("self") == 5
    assert asked == [(5, 1.0)]
