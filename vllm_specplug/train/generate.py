# SPDX-License-Identifier: Apache-2.0
"""Answers of the target, generated with offline vLLM."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from vllm_specplug.rows import Conversation, LeftOut
from vllm_specplug.train.answers import Request
from vllm_specplug.train.chat import ChatTokenizer
from vllm_specplug.train.target import forward_dtype

# Upper bound of a written prompt's tokens, chat template included.
MADE_PROMPT_TOKENS = 1024
_TURN_TOKENS = 200
# Shorter and longer ones are left out.
_TURN_CHARACTERS = (12, 1500)


class VllmGenerator:
    """The target in vLLM's offline `LLM`.

    Args:
        target: model folder.
        max_prompt_tokens: longest prompt.
        max_tokens: longest answer.
        max_num_seqs: requests decoded at once.
        eager: whether to skip compilation.
        tensor_parallel_size: number of devices that share the target.
    """

    def __init__(
        self,
        target: str | Path,
        chat: ChatTokenizer,
        *,
        max_prompt_tokens: int = MADE_PROMPT_TOKENS,
        max_tokens: int = 320,
        max_num_seqs: int = 128,
        eager: bool = True,
        tensor_parallel_size: int = 1,
    ):
        # A missing file must not become a download.
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        # GiB. By default vLLM takes 92 % of a CPU's memory, and fails if less is free.
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        from vllm import LLM
        from vllm.platforms import current_platform

        self.chat, self.max_tokens = chat, max_tokens
        longest = max_prompt_tokens + max_tokens
        device = torch.device(current_platform.device_type)
        settings: dict[str, Any] = {"dtype": forward_dtype(device)}
        if current_platform.is_cpu():
            # A seeded request whose prompt is chunked ends vLLM's engine on a CPU.
            settings["enable_chunked_prefill"] = False
            settings["max_num_batched_tokens"] = max(2048, longest)
        self.llm = LLM(
            str(target),
            enforce_eager=eager,
            max_num_seqs=max_num_seqs,
            max_model_len=longest,
            tensor_parallel_size=tensor_parallel_size,
            disable_log_stats=True,
            **settings,
        )

    def __call__(self, requests: Sequence[Request]) -> list[tuple[list[int], bool]]:
        """Returns one (answer ids, finished) per request."""
        from vllm import SamplingParams

        params = [
            SamplingParams(
                temperature=r.temperature,
                max_tokens=self.max_tokens,
                seed=r.seed if r.temperature > 0 else None,
            )
            for r in requests
        ]
        outputs = self.llm.generate(
            [{"prompt_token_ids": list(r.prompt_ids)} for r in requests],  # type: ignore[arg-type]
            params,
        )
        return [
            (list(o.outputs[0].token_ids), o.outputs[0].finish_reason == "stop") for o in outputs
        ]

    def user_turns(self, count: int, seed: int) -> list[Conversation]:
        """Returns prompts that the target writes where its chat template lets a user speak.

        Unfinished turns are cut at their last sentence. Turns that are too short or too long are
        left out, so there may be fewer than `count`.
        """
        from vllm import SamplingParams

        rng = random.Random(seed)
        params = [
            SamplingParams(
                temperature=1.0, top_p=0.95, max_tokens=_TURN_TOKENS, seed=rng.getrandbits(31)
            )
            for _ in range(count)
        ]
        ids, prompts = self.chat.user_prompt_ids(), []
        inputs: Any = [{"prompt_token_ids": ids}] * count
        for output in self.llm.generate(inputs, params):
            text = output.outputs[0].text.strip()
            if output.outputs[0].finish_reason != "stop":
                text = text[: text.rfind(".") + 1]
            if _TURN_CHARACTERS[0] <= len(text) <= _TURN_CHARACTERS[1]:
                prompts.append(Conversation(({"role": "user", "content": text},), place="self"))
        return prompts


def render_all(
    prompts: Iterable[Conversation], chat: ChatTokenizer, limit: int, left_out: LeftOut
) -> Iterator[tuple[str, list[int]]]:
    """Yields (source, token ids) of the prompts of up to `limit` tokens; counts the others, and
    later turns, which depend on an answer. Answers in a prompt are left out."""
    for prompt in prompts:
        if prompt.follow_ups:
            left_out.add("later turns of a prompt", prompt.place)
        try:
            ids = chat.prompt_ids(prompt.asked())
        except ValueError as error:
            left_out.add(str(error), prompt.place)
            continue
        if len(ids) > limit:
            left_out.add(f"prompt of more than {limit} tokens", prompt.place)
        else:
            yield prompt.source, ids
