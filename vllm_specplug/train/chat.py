# SPDX-License-Identifier: Apache-2.0
"""Token ids of conversations and texts, as a server of the target makes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from vllm_specplug.options import parse_object
from vllm_specplug.rows import Conversation

Messages = Sequence[dict[str, str]]
TokenIds = list[int]


def parse_template_kwargs(text: str) -> dict[str, Any]:
    """Returns the arguments of a chat template from the command line.

    Raises:
        ValueError: unless it is a JSON object.
    """
    return parse_object("--chat-template-kwargs", text or "{}", '{"enable_thinking": false}')


class ChatTokenizer:
    """A target's tokenizer with its chat template; a base model may have none.

    Args:
        end_ids: tokens that end a turn.
        template_kwargs: arguments of the template, as in a request's `chat_template_kwargs`.
    """

    def __init__(
        self,
        tokenizer: Any,
        end_ids: Sequence[int] = (),
        template_kwargs: dict[str, Any] | None = None,
    ):
        self.tokenizer, self.template_kwargs = tokenizer, template_kwargs or {}
        self.end_ids = {*end_ids, *filter(None, [tokenizer.eos_token_id])}
        self.has_template = tokenizer.chat_template is not None

    @classmethod
    def of(cls, target: str | Path, template_kwargs: dict[str, Any] | None = None) -> ChatTokenizer:
        """Returns the tokenizer in a target's folder.

        Raises:
            ValueError: if there is none.
        """
        from transformers import AutoTokenizer, GenerationConfig

        try:
            tokenizer = AutoTokenizer.from_pretrained(target, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"target {str(target)!r} has no tokenizer that transformers reads ({error}); give "
                "the folder of a Hugging Face model"
            ) from error
        # Without files transformers makes a tokenizer that knows no words.
        if len(tokenizer) <= len(tokenizer.all_special_ids):
            raise ValueError(
                f"target {str(target)!r} has no files of a tokenizer; give the folder of a Hugging "
                "Face model"
            )
        try:
            ends = GenerationConfig.from_pretrained(target, local_files_only=True).eos_token_id
        except OSError:
            ends = None
        return cls(tokenizer, [ends] if isinstance(ends, int) else ends or (), template_kwargs)

    def text_ids(self, text: str) -> TokenIds:
        """Returns the ids of a raw text, with the tokens that a server adds."""
        return list(self.tokenizer(text)["input_ids"])

    def prompt_ids(self, messages: Messages) -> TokenIds:
        """Returns the ids of a prompt: the template up to where the assistant begins. Without a
        template, the text of a single user message.

        Raises:
            ValueError: for messages that the template refuses or that need one.
        """
        if self.has_template:
            return self._render(messages, add_generation_prompt=True)
        if [message["role"] for message in messages] != ["user"]:
            raise ValueError("a conversation, and the target has no chat template")
        return self.text_ids(messages[0]["content"])

    def user_prompt_ids(self) -> TokenIds:
        """Returns the ids of the chat template up to the first user's turn.

        Raises:
            ValueError: for a template that refuses a single user turn.
        """
        mark = "<<user>>"
        text = self._apply([{"role": "user", "content": mark}], tokenize=False)
        return list(self.tokenizer.encode(text.partition(mark)[0], add_special_tokens=False))

    def answers(self, conversation: Conversation) -> Iterator[tuple[TokenIds, TokenIds]]:
        """Yields the ids of the prompt and of the answer of every assistant's message.

        The tokens of an answer are what its message adds to the prompt. A template's
        `{% generation %}` marks are not read: they come from one rendering of the whole
        conversation, whose earlier turns may differ from those that the target saw, and they may
        hold tokens of the prompt. All tokens of a raw text but the first are an answer.

        Raises:
            ValueError: for messages that the template refuses, or whose answer it does not add at
                the end of the prompt.
        """
        messages = conversation.messages
        if conversation.text:
            ids = self.text_ids(conversation.text)
            yield ids[:1], ids[1:]
        elif not self.has_template:
            yield self._completion(messages)
        else:
            for at, message in enumerate(messages):
                if message["role"] == "assistant":
                    prompt = self.prompt_ids(messages[:at])
                    whole = self._render(messages[: at + 1])
                    if whole[: len(prompt)] != prompt:
                        raise ValueError("an answer that the chat template does not put after its "
                                         "prompt")  # fmt: skip
                    yield prompt, self._to_the_end(whole[len(prompt) :])

    def is_finished(self, answer: Sequence[int]) -> bool:
        """Whether an answer ends a turn."""
        return bool(answer) and answer[-1] in self.end_ids

    def _completion(self, messages: Messages) -> tuple[TokenIds, TokenIds]:
        if [message["role"] for message in messages] != ["user", "assistant"]:
            raise ValueError("a conversation, and the target has no chat template")
        prompt = self.text_ids(messages[0]["content"])
        answer = self.tokenizer.encode(messages[1]["content"], add_special_tokens=False)
        end = self.tokenizer.eos_token_id
        return prompt, [*answer, *([] if end is None else [end])]

    def _to_the_end(self, answer: TokenIds) -> TokenIds:
        """Returns an answer up to the token that ends the turn: the target generates no more."""
        ends = [at for at, token in enumerate(answer) if token in self.end_ids]
        return answer[: ends[-1] + 1] if ends else answer

    def _render(self, messages: Messages, add_generation_prompt: bool = False) -> TokenIds:
        return list(
            self._apply(messages, add_generation_prompt=add_generation_prompt, return_dict=False)
        )

    def _apply(self, messages: Messages, **options: Any) -> Any:
        try:
            return self.tokenizer.apply_chat_template(
                list(messages), **options, **self.template_kwargs
            )
        except Exception as error:  # A template is a program, which may raise any error.
            raise ValueError(f"messages that the chat template refuses ({error})") from error
