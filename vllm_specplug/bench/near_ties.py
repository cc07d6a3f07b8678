# SPDX-License-Identifier: Apache-2.0
"""The first difference of two greedy answers, and how a server scores the two tokens there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from vllm_specplug.bench.chat import ChatAnswer

# bfloat16 logits between 16 and 32 are multiples of 1/8. Sums in another order may differ by a few
# of these.
NEAR_TIE_NATS = 0.5
# Maximum number of log-probabilities that `vllm serve` returns by default.
LISTED = 20


@dataclass(frozen=True)
class Parting:
    """The first difference between two answers to the same prompt."""

    position: int
    """Index of the different tokens."""
    gap_nats: float
    """Difference of their log-probabilities; a lower bound if one is not among the `LISTED`
    likeliest tokens."""

    @property
    def is_near_tie(self) -> bool:
        """Whether rounding may decide between the two tokens."""
        return self.gap_nats <= NEAR_TIE_NATS


def partings(
    base_url: str, model: str, pairs: Iterable[tuple[ChatAnswer, ChatAnswer]]
) -> list[Parting]:
    """Returns the first differences of pairs of answers, scored by a server. Pairs have none if one
    answer is equal to the other or its beginning.

    Raises:
        openai.OpenAIError: if a request fails.
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
    """Returns the index of the first different token; None if one is the other's beginning."""
    shared = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(shared) if a != b), None)


def _scores(client: Any, model: str, tokens: list[int]) -> dict[int, float]:
    """Returns the log-probabilities of the likeliest tokens after `tokens`."""
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
