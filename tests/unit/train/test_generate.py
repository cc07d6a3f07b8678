# SPDX-License-Identifier: Apache-2.0
"""The engine that answers prompts is asked for no more memory than it needs."""

from __future__ import annotations

import os
from typing import Any

import pytest
import vllm

from vllm_specplug.train.generate import VllmGenerator
from vllm_specplug.train.prompts import Prompt


class Engine:
    """Notes what vLLM would read of the environment."""

    def __init__(self, target: str, **options: Any) -> None:
        self.kv_cache_gib = os.environ.get("VLLM_CPU_KVCACHE_SPACE")

    def get_tokenizer(self) -> None:
        return None


@pytest.mark.parametrize(("given", "used"), [(None, "1"), ("6", "6")])
def test_the_kv_cache_has_a_size_unless_the_user_gave_one(
    monkeypatch: pytest.MonkeyPatch, given: str | None, used: str
) -> None:
    # Set first, so that what the generator sets is taken back as well.
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", given or "")
    if given is None:
        del os.environ["VLLM_CPU_KVCACHE_SPACE"]
    monkeypatch.setattr(vllm, "LLM", Engine)
    assert VllmGenerator("somewhere").llm.kv_cache_gib == used  # type: ignore[attr-defined]


class Tokenizer:
    """A chat template of words, one token per character."""

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> str:
        return "".join(f"<{m['role']}> {m['content']} </{m['role']}>" for m in messages)

    def encode(self, text: str, add_special_tokens: bool) -> str:
        return text


@pytest.mark.parametrize(
    ("messages", "rendered"),
    [((), "<user> "), (({"role": "system", "content": "s"},), "<system> s </system><user> ")],
)
def test_a_prompt_can_end_where_the_user_would_speak(
    messages: tuple[dict[str, str], ...], rendered: str
) -> None:
    generator = VllmGenerator.__new__(VllmGenerator)
    generator.tokenizer = Tokenizer()  # type: ignore[assignment]
    prompt = Prompt("self", messages, opens_user_turn=True)
    assert "".join(generator.render(prompt)) == rendered  # type: ignore[arg-type]
