# SPDX-License-Identifier: Apache-2.0
"""Tokenizers of words with chat templates of each kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<none>", "<s>", "</s>", "<system>", "<user>", "<assistant>", "<think>", "</think>")
VOCAB = 64
# The word of each token id; ids of special tokens are their places.
WORDS = [*SPECIAL, *(f"w{i}" for i in range(len(SPECIAL), VOCAB))]

_TURNS = (
    "{% for m in messages %}<{{ m['role'] }}> CONTENT </s> {% endfor %}"
    "{% if add_generation_prompt %}<assistant>"
    "{% if thinking is defined %} <think> </think>{% endif %}{% endif %}"
)
_MARKED = (
    "{% if m['role'] == 'assistant' %}{% generation %}CONTENT </s>{% endgeneration %}"
    "{% else %}CONTENT </s>{% endif %}"
)
_LAST_REASONING = "{{ m['content'] if loop.last else m['content'].split('</think> ')[-1] }}"
TEMPLATES = {
    "plain": _TURNS.replace("CONTENT", "{{ m['content'] }}"),
    "marked": _TURNS.replace("CONTENT </s>", _MARKED.replace("CONTENT", "{{ m['content'] }}")),
    # The mark holds the header of the turn, too.
    "marked header": "{% for m in messages %}"
    "{% if m['role'] == 'assistant' %}"
    "{% generation %}<assistant> {{ m['content'] }} </s> {% endgeneration %}"
    "{% else %}<{{ m['role'] }}> {{ m['content'] }} </s> {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}",
    # Only the last answer keeps its reasoning.
    "reasoning": _TURNS.replace("CONTENT", _LAST_REASONING),
    "marked reasoning": _TURNS.replace("CONTENT </s>", _MARKED.replace("CONTENT", _LAST_REASONING)),
    # The assistant speaks under another name than the prompt says.
    "other name": _TURNS.replace("CONTENT", "{{ m['content'] }}").replace(
        "%}<assistant>", "%}<system>"
    ),
}  # fmt: skip


def word_tokenizer(template: str | None) -> Any:
    """A tokenizer with one token per word and, of a name in `TEMPLATES`, a chat template."""
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<none>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", bos_token="<s>", unk_token="<none>"
    )
    if template is not None:
        fast.chat_template = TEMPLATES[template]
    return fast


def chat_target(folder: Path, model: Path, template: str | None) -> Path:
    """Links a model into a folder with such a tokenizer."""
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).symlink_to(file)
    word_tokenizer(template).save_pretrained(folder)
    return folder
