# SPDX-License-Identifier: Apache-2.0
"""Answers of the target, generated with offline vLLM."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_specplug.train import prompts as makers
from vllm_specplug.train.answers import Request
from vllm_specplug.train.prompts import Prompt

MAX_PROMPT_TOKENS = 1024
# Kinds of prompts that need no target.
MAKERS: dict[str, Callable[[random.Random], Iterator[Prompt]]] = {
    "topic": makers.topic_prompts,
    "code": makers.code_prompts,
    "puzzle": makers.puzzle_prompts,
    "translation": makers.translation_prompts,
}
KINDS = (*MAKERS, "document", "article_document", "self")


class VllmGenerator:
    """The target in vLLM's offline `LLM`.

    Args:
        target: model folder.
        max_tokens: longest answer.
        max_num_seqs: requests decoded at once.
        eager: whether to skip compilation.
    """

    def __init__(
        self,
        target: str | Path,
        *,
        max_tokens: int = 320,
        max_num_seqs: int = 128,
        eager: bool = True,
    ):
        # A missing file must not become a download.
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        # GiB. By default vLLM takes 92 % of a CPU's memory, and fails if less is free.
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        from vllm import LLM

        self.max_tokens = max_tokens
        longest = MAX_PROMPT_TOKENS + max_tokens
        self.llm = LLM(
            str(target),
            dtype="bfloat16",
            enforce_eager=eager,
            max_num_seqs=max_num_seqs,
            max_model_len=longest,
            max_num_batched_tokens=max(2048, longest),
            # On a CPU a seeded request whose prompt is chunked ends vLLM's engine.
            enable_chunked_prefill=False,
            disable_log_stats=True,
        )
        self.tokenizer = self.llm.get_tokenizer()

    def render(self, prompt: Prompt) -> list[int]:
        """Token ids as serving makes them: the chat template with its default system message."""
        tokenizer: Any = self.tokenizer
        messages = list(prompt.messages)
        if not prompt.opens_user_turn:
            return list(
                tokenizer.apply_chat_template(
                    messages, add_generation_prompt=True, return_dict=False
                )
            )
        mark = "<<user>>"
        text = tokenizer.apply_chat_template(
            [*messages, {"role": "user", "content": mark}], tokenize=False
        )
        return list(tokenizer.encode(text.partition(mark)[0], add_special_tokens=False))

    def render_all(self, prompts: Sequence[Prompt]) -> Iterator[tuple[str, list[int]]]:
        """Yields (source, token ids) of the prompts that are not too long."""
        for prompt in prompts:
            ids = self.render(prompt)
            if len(ids) <= MAX_PROMPT_TOKENS:
                yield prompt.source, ids

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
            [{"prompt_token_ids": self.render(p)} for p in prompts],  # type: ignore[arg-type]
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


def make_prompts(
    counts: Mapping[str, int],
    files: Sequence[str | Path],
    seed: int,
    write_texts: Callable[[Sequence[Prompt], float, int, int], list[str]],
) -> list[Prompt]:
    """Returns the prompts of a plan: every row of `files`, and `counts[kind]` new ones per kind.

    Args:
        write_texts: called with prompts, temperature, most tokens and seed, lets the target write
            user turns (`self`) and documents (`article_document`).

    Raises:
        ValueError: for an unknown kind.
    """
    unknown = sorted(set(counts) - set(KINDS))
    if unknown:
        raise ValueError(f"prompt kinds {unknown}, legal: {', '.join(KINDS)}; correct the name")
    prompts = [prompt for path in files for prompt in makers.read_prompt_file(path)]
    for offset, kind in enumerate(KINDS):
        count, rng = counts.get(kind, 0), random.Random(seed * 101 + offset)
        if count <= 0:
            continue
        if kind in MAKERS:
            prompts += itertools.islice(MAKERS[kind](rng), count)
        elif kind == "document":
            texts = makers.document_texts(rng)
            prompts += itertools.islice(makers.document_prompts(texts, rng), count)
        elif kind == "article_document":
            requests = list(itertools.islice(makers.article_prompts(rng), count))
            written = write_texts(requests, 0.9, 400, rng.getrandbits(31))
            usable = (text for text in written if len(text) >= 200)
            prompts += makers.document_prompts(usable, rng)
        else:
            requests = list(itertools.islice(makers.self_instruct_prompts(rng), count))
            turns = write_texts(requests, 1.0, 200, rng.getrandbits(31))
            prompts += [Prompt.user("self", turn) for turn in turns if 12 <= len(turn) <= 1500]
    return prompts
