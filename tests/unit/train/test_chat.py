# SPDX-License-Identifier: Apache-2.0
"""Answers and prompts are the tokens that a server would see."""

from __future__ import annotations

import pytest

from tests.unit.train.chat_targets import TEMPLATES, WORDS, word_tokenizer
from vllm_specplug.rows import Conversation
from vllm_specplug.train.chat import ChatTokenizer, parse_template_kwargs


def words(ids: list[int]) -> str:
    return " ".join(WORDS[i] for i in ids)


def chat(*texts: str) -> Conversation:
    roles = ["user", "assistant"] * len(texts)
    return Conversation(tuple({"role": r, "content": t} for r, t in zip(roles, texts)))  # noqa: B905


def answers(template: str | None, conversation: Conversation, **kwargs) -> list[tuple[str, str]]:
    tokenizer = ChatTokenizer(word_tokenizer(template), (), kwargs)
    return [(words(p), words(a)) for p, a in tokenizer.answers(conversation)]


@pytest.mark.parametrize("template", ["plain", "marked", "marked header"])
def test_every_answer_follows_its_prompt_and_ends_its_turn(template: str) -> None:
    found = answers(template, chat("w10", "w11 w12", "w13", "w14"))
    first = "<user> w10 </s> <assistant>"
    second = f"{first} w11 w12 </s> <user> w13 </s> <assistant>"
    assert found == [(first, "w11 w12 </s>"), (second, "w14 </s>")]


def test_what_the_template_adds_after_an_answer_is_not_generated() -> None:
    tokenizer = word_tokenizer("plain")
    tokenizer.chat_template = TEMPLATES["plain"].replace("</s> {%", "</s> <s> {%")
    (pair,) = ChatTokenizer(tokenizer).answers(chat("w10", "w11"))
    assert words(pair[1]) == "w11 </s>"


@pytest.mark.parametrize("template", ["reasoning", "marked reasoning"])
def test_reasoning_of_earlier_turns_is_seen_as_when_they_were_served(template: str) -> None:
    """Each answer has its own prompt, so a template that rewrites earlier turns does no harm."""
    found = answers(
        template, chat("w10", "<think> w20 </think> w11", "w12", "<think> w21 </think> w13")
    )
    assert found[0][1] == "<think> w20 </think> w11 </s>"
    assert found[1] == (
        "<user> w10 </s> <assistant> w11 </s> <user> w12 </s> <assistant>",
        "<think> w21 </think> w13 </s>",
    )


def test_an_answer_that_does_not_follow_its_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="does not put after its prompt"):
        answers("other name", chat("w10", "w11"))


def test_template_arguments_are_used() -> None:
    tokenizer = ChatTokenizer(word_tokenizer("plain"), (), {"thinking": False})
    assert words(tokenizer.prompt_ids(chat("w10").messages)).endswith(
        "<assistant> <think> </think>"
    )
    assert parse_template_kwargs('{"thinking": false}') == {"thinking": False}
    assert parse_template_kwargs("") == {}
    for bad in ("{", "[1]"):
        with pytest.raises(ValueError, match="legal: a JSON object"):
            parse_template_kwargs(bad)


def test_messages_that_a_template_refuses_are_named() -> None:
    tokenizer = word_tokenizer("plain")
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ValueError, match="refuses .*roles must alternate"):
        ChatTokenizer(tokenizer).prompt_ids(chat("w10").messages)
    tokenizer.chat_template = "{{ 1 / 0 }}"
    with pytest.raises(ValueError, match="refuses .*division by zero"):
        ChatTokenizer(tokenizer).user_prompt_ids()


def test_a_base_model_reads_texts_and_plain_prompts() -> None:
    assert answers(None, Conversation(text="w10 w11 w12")) == [("w10", "w11 w12")]
    assert answers(None, chat("w10", "w11")) == [("w10", "w11 </s>")]
    tokenizer = ChatTokenizer(word_tokenizer(None))
    assert words(tokenizer.prompt_ids(chat("w10 w11").messages)) == "w10 w11"
    for call in (tokenizer.prompt_ids, lambda m: list(tokenizer.answers(Conversation(tuple(m))))):
        with pytest.raises(ValueError, match="has no chat template"):
            call(chat("w10", "w11", "w12", "w13").messages)


def test_a_prompt_can_end_where_the_user_would_speak() -> None:
    assert words(ChatTokenizer(word_tokenizer("plain")).user_prompt_ids()) == "<user>"


def test_a_folder_names_the_tokens_that_end_a_turn(tmp_path) -> None:
    from transformers import GenerationConfig

    word_tokenizer("plain").save_pretrained(tmp_path)
    GenerationConfig(eos_token_id=[2, 9]).save_pretrained(tmp_path)
    tokenizer = ChatTokenizer.of(tmp_path)
    assert tokenizer.end_ids == {2, 9}
    assert tokenizer.is_finished([5, 9]) and not tokenizer.is_finished([5])
    with pytest.raises(ValueError, match="no tokenizer"):
        ChatTokenizer.of(tmp_path / "nowhere")
