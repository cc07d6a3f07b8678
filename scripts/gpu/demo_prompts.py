# SPDX-License-Identifier: Apache-2.0
"""Chats for the demo target."""

from __future__ import annotations

from collections.abc import Sequence


def demo_prompts(texts: Sequence[str]) -> tuple[str, list[list[int]]]:
    """Returns the folder of the demo target and the texts as tokenized user turns."""
    from transformers import AutoTokenizer

    from vllm_specplug.targets import prepare_target

    target = str(prepare_target("smollm2", print))
    tokenizer = AutoTokenizer.from_pretrained(target)
    return target, [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=True,
            return_dict=False,
        )
        for text in texts
    ]  # fmt: skip
