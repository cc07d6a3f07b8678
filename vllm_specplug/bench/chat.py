# SPDX-License-Identifier: Apache-2.0
"""Streamed and timed chat requests of the OpenAI client."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ChatAnswer:
    """A streamed answer and its times."""

    text: str
    num_tokens: int
    """Tokens of the answer, as counted by the server."""
    ttft_s: float
    """Seconds to the first text."""
    total_s: float
    """Seconds to the end of the stream."""
    prompt_ids: tuple[int, ...] = ()
    """Tokens of the prompt with its chat template."""
    token_ids: tuple[int, ...] = ()
    """Tokens of the answer."""

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token after the first; None for an answer of one token."""
        if self.num_tokens < 2:
            return None
        return (self.total_s - self.ttft_s) / (self.num_tokens - 1)


@dataclass(frozen=True)
class LoadResult:
    """Answers to a list of prompts, and their total wall time."""

    answers: tuple[ChatAnswer, ...]
    wall_s: float

    @property
    def num_tokens(self) -> int:
        """Output tokens of all answers."""
        return sum(answer.num_tokens for answer in self.answers)

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second of wall time."""
        return self.num_tokens / self.wall_s

    @property
    def median_ttft_ms(self) -> float:
        """Median time to the first token, milliseconds."""
        return 1e3 * statistics.median(answer.ttft_s for answer in self.answers)

    @property
    def median_tpot_ms(self) -> float | None:
        """Median time per output token after the first, milliseconds."""
        times = [answer.tpot_s for answer in self.answers if answer.tpot_s is not None]
        return 1e3 * statistics.median(times) if times else None

    @classmethod
    def join(cls, parts: Sequence[LoadResult]) -> LoadResult:
        """Returns consecutive runs as one."""
        answers = tuple(answer for part in parts for answer in part.answers)
        return cls(answers, sum(part.wall_s for part in parts))


async def _stream(client: Any, model: str, prompt: str, max_tokens: int) -> ChatAnswer:
    start = time.perf_counter()
    first: float | None = None
    pieces: list[str] = []
    prompt_ids: tuple[int, ...] = ()
    token_ids: list[int] = []
    num_tokens = 0
    stream = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": prompt}],
        max_tokens=max_tokens,
        temperature=0.0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"return_token_ids": True},
    )
    async for chunk in stream:
        if chunk.usage is not None:
            num_tokens = chunk.usage.completion_tokens
        prompt_ids = prompt_ids or tuple(getattr(chunk, "prompt_token_ids", None) or ())
        if chunk.choices:
            token_ids += getattr(chunk.choices[0], "token_ids", None) or ()
        if chunk.choices and chunk.choices[0].delta.content:
            if first is None:
                first = time.perf_counter()
            pieces.append(chunk.choices[0].delta.content)
    end = time.perf_counter()
    return ChatAnswer(
        "".join(pieces), num_tokens, (first or end) - start, end - start, prompt_ids,
        tuple(token_ids),
    )  # fmt: skip


async def _run(
    base_url: str,
    model: str,
    prompts: Sequence[str],
    concurrency: int,
    max_tokens: int,
) -> LoadResult:
    from openai import AsyncOpenAI

    gate = asyncio.Semaphore(concurrency)
    async with AsyncOpenAI(
        base_url=f"{base_url}/v1", api_key="none", max_retries=0, timeout=600.0
    ) as client:

        async def one(prompt: str) -> ChatAnswer:
            async with gate:
                return await _stream(client, model, prompt, max_tokens)

        start = time.perf_counter()
        answers = await asyncio.gather(*(one(prompt) for prompt in prompts))
        return LoadResult(tuple(answers), time.perf_counter() - start)


def run_chats(
    base_url: str,
    model: str,
    prompts: Sequence[str],
    *,
    concurrency: int,
    max_tokens: int,
) -> LoadResult:
    """Sends every prompt as a greedy chat, at most `concurrency` at once.

    Args:
        base_url: root of the server, without "/v1".

    Raises:
        openai.OpenAIError: if a request fails.
    """
    return asyncio.run(_run(base_url, model, prompts, concurrency, max_tokens))
