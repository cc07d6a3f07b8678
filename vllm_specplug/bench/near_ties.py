# SPDX-License-Identifier: Apache-2.0
"""Where two greedy answers part, and how far apart a server scores the two tokens there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from vllm_specplug.bench.chat import ChatAnswer

# bfloat16 logits between 16 and 32 are multiples of 1/8: two sums in other orders may differ by a
# few of these.
NEAR_TIE_NATS = 0.5
# Most log-probabilities that `vllm serve` returns unless told otherwise.
LISTED = 20


@dataclass(frozen=True)
class Parting:
    """The first token in which an answer differs from another one to the same prompt."""

    position: int
    """Tokens of the answers before it."""
    gap_nats: float
    """Distance of the two tokens' log-probabilities; at least that where one is not among the
    `LISTED` likeliest."""

    @property
    def is_near_tie(self) -> bool:
        """Whether rounding may decide between the two."""
        return self.gap_nats <= NEAR_TIE_NATS


def partings(
    base_url: str, model: str, pairs: Iterable[tuple[ChatAnswer, ChatAnswer]]
) -> list[Parting]:
    """Asks a server for the scores where the answers of each pair part; equal pairs and those of
    which one is the other's beginning have no such place.

    Raises:
        openai.OpenAIError: when a request fails.
    """
    from openai import OpenAI

    found = []
    with OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0, timeout=600.0) as client:
        for one, other in pairs:
            position = first_difference(one.token_ids, other.token_ids)
            if position is None:
                continue
            tokens = (one.token_ids[position], other.token_ids[position])
            scores = _scores(client, model, [*one.prompt_ids, *one.token_ids[:position]])
            least = min(scores.values())
            a, b = (scores.get(token, least) for token in tokens)
            found.append(Parting(position, abs(a - b)))
    return found


def first_difference(one: tuple[int, ...], other: tuple[int, ...]) -> int | None:
    """Index of the first token that differs; None where there is none that both have."""
    shared = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(shared) if a != b), None)


def _scores(client: Any, model: str, tokens: list[int]) -> dict[int, float]:
    """Log-probabilities of the likeliest tokens after `tokens`."""
    completion = client.completions.create(
        model=model,
        prompt=tokens,
        max_tokens=1,
        temperature=0.0,
        logprobs=LISTED,
        extra_body={"return_tokens_as_token_ids": True},
    )
    listed: dict[str, float] = completion.choices[0].logprobs.top_logprobs[0]
    return {int(name.removeprefix("token_id:")): value for name, value in listed.items()}
