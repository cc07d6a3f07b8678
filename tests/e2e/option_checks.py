# SPDX-License-Identifier: Apache-2.0
"""Sampling and output options on trees against plain decoding; see test_options.py."""

from __future__ import annotations

from typing import Any

from tests.e2e.pair import Counts, Pair, core_of, generate, pair

PROMPTS = [[7, 40, 41], [60, 61, 62, 63], [100, 9], [270, 280, 290, 11, 12]]
CUSTOM = ["tests.e2e.processors:ForceTokenAt", "tests.e2e.processors:AlternateHalves"]
EOS = 1
THINK_START, THINK_END = 2, 3


def greedy(**options: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(**{"temperature": 0.0, "max_tokens": 32, "ignore_eos": True, **options})


def seeded(seed: int, **options: Any) -> Any:
    return greedy(**{"temperature": 0.9, "seed": seed, **options})


def each_prompt(engines: Pair, *params: Any) -> tuple[list[Any], Counts]:
    """Every prompt with every one of `params`, in one batch."""
    return engines.compare(
        [p for p in PROMPTS for _ in params], [param.clone() for _ in PROMPTS for param in params]
    )


def check_min_p() -> None:
    outputs, _ = each_prompt(pair(), *(seeded(i, min_p=p) for i, p in enumerate((0.05, 0.4, 0.9))))
    # Had min_p no effect the samples would be those without it.
    without, _ = each_prompt(pair(), *(seeded(i) for i in range(3)))
    assert any(
        a.outputs[0].token_ids != b.outputs[0].token_ids
        for a, b in zip(outputs, without, strict=True)
    )


def check_logit_bias() -> None:
    outputs, _ = each_prompt(
        pair(), greedy(logit_bias={50: 100.0}), greedy(logit_bias={81: -100.0, 11: -100.0}),
        seeded(3, logit_bias={60: 5.0}), greedy(),
    )  # fmt: skip
    assert set(outputs[0].outputs[0].token_ids) == {50}
    assert not {81, 11} & set(outputs[1].outputs[0].token_ids)


def check_custom_processors() -> None:
    engines = pair(logits_processors=CUSTOM)
    outputs, _ = each_prompt(
        engines, greedy(extra_args={"alternate": True}), greedy(),
        seeded(5, extra_args={"alternate": True}, presence_penalty=1.0),
    )  # fmt: skip
    ids = outputs[0].outputs[0].token_ids
    assert all((a + b) % 2 for a, b in zip(ids, ids[1:], strict=False))


def check_end_of_text_at_every_offset() -> None:
    engines = pair(logits_processors=CUSTOM)
    params = [greedy(ignore_eos=False, extra_args={"force": [k, EOS]}) for k in range(24)]
    outputs, _ = engines.compare([PROMPTS[0]] * len(params), params)
    for k, output in enumerate(outputs):
        assert len(output.outputs[0].token_ids) <= k + 1


def check_stop_token_at_every_offset() -> None:
    engines = pair()
    full, _ = engines.compare(PROMPTS, greedy())
    for output in full:
        ids = list(output.outputs[0].token_ids)
        params = [greedy(stop_token_ids=[token]) for token in ids[:24]]
        outputs, _ = engines.compare([output.prompt_token_ids] * len(params), params)
        for token, stopped in zip(ids, outputs, strict=False):
            expected = ids[: ids.index(token) + 1]
            assert list(stopped.outputs[0].token_ids) == expected
            assert stopped.outputs[0].finish_reason == "stop"


def check_stop_string_at_every_offset() -> None:
    engines = pair()
    full, _ = engines.compare(PROMPTS[:2], greedy())
    for output in full:
        text = output.outputs[0].text
        params = [
            greedy(stop=[text[k : k + 1 + k % 3]], include_stop_str_in_output=k % 2 == 0)
            for k in range(0, min(len(text), 40), 2)
        ]
        outputs, _ = engines.compare([output.prompt_token_ids] * len(params), params)
        assert {o.outputs[0].finish_reason for o in outputs} == {"stop"}


def check_length_at_every_offset() -> None:
    params = [greedy(max_tokens=k) for k in range(1, 25)]
    outputs, _ = pair().compare([PROMPTS[1]] * len(params), params)
    assert [len(o.outputs[0].token_ids) for o in outputs] == list(range(1, 25))


def check_min_tokens_at_every_offset() -> None:
    engines = pair()
    full, _ = engines.compare(PROMPTS[:1], greedy())
    stop = [full[0].outputs[0].token_ids[0]]
    params = [greedy(stop_token_ids=stop, min_tokens=k) for k in range(20)]
    outputs, _ = engines.compare([PROMPTS[0]] * len(params), params)
    assert all(len(o.outputs[0].token_ids) >= k for k, o in enumerate(outputs))


def check_penalties_and_words() -> None:
    engines = pair()
    full, _ = engines.compare(PROMPTS[:1], greedy())
    first = full[0].outputs[0].token_ids
    allowed = list(range(6, 300, 3))
    outputs, _ = each_prompt(
        engines,
        greedy(repetition_penalty=1.4),
        greedy(presence_penalty=1.2, frequency_penalty=0.7),
        greedy(allowed_token_ids=allowed),
        greedy(bad_words=[" the", "red"]),
        seeded(1, top_k=5, repetition_penalty=1.2),
        seeded(2, top_p=0.7, frequency_penalty=0.5),
        greedy(allowed_token_ids=[t for t in allowed if t != first[1]], min_tokens=5),
    )
    assert set(outputs[2].outputs[0].token_ids) <= set(allowed)


def check_seeds_and_several_samples() -> None:
    outputs, _ = each_prompt(
        pair(), seeded(1, n=3), seeded(2, n=2, top_p=0.8), greedy(), seeded(9, logprobs=2)
    )
    assert len({tuple(c.token_ids) for c in outputs[0].outputs}) > 1


def check_logprobs() -> None:
    outputs, _ = each_prompt(
        pair(),
        greedy(logprobs=3),
        greedy(logprobs=0),
        greedy(prompt_logprobs=4),
        seeded(4, logprobs=2, prompt_logprobs=1, presence_penalty=0.5),
        greedy(logprobs=2, logit_bias={33: 4.0}),
    )
    assert len(outputs[0].outputs[0].logprobs) == 32
    assert len(outputs[2].prompt_logprobs) == len(PROMPTS[0])


def check_all_logprobs() -> None:
    outputs, _ = pair(max_logprobs=-1).compare(PROMPTS, greedy(logprobs=-1, max_tokens=12))
    vocabulary = core_of(pair().plain).vllm_config.model_config.get_vocab_size()
    assert len(outputs[0].outputs[0].logprobs[0]) == vocabulary


def check_thinking_budget() -> None:
    engines = pair(
        reasoning_config={"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"}
    )
    thinking = [[*p, THINK_START] for p in PROMPTS]
    params = [greedy(thinking_token_budget=budget) for budget in (0, 1, 3, 7, 12, 20)]
    params.append(greedy())
    params.append(seeded(4, thinking_token_budget=5))
    prompts = [p for p in thinking for _ in params]
    outputs, _ = engines.compare(prompts, [p.clone() for _ in thinking for p in params])
    for i, output in enumerate(outputs):
        budget = params[i % len(params)].thinking_token_budget
        if budget is not None:
            assert THINK_END in output.outputs[0].token_ids[: budget + 2], (i, budget)
    # Thinking that starts in the output: forced in, and then counted.
    starts = [greedy(thinking_token_budget=k, logit_bias={THINK_START: 8.0}) for k in range(1, 6)]
    engines.compare([PROMPTS[1]] * len(starts), starts)


def check_thinking_budget_of_several_tokens() -> None:
    engines = pair(
        reasoning_config={"reasoning_start_str": "<think>", "reasoning_end_str": " ok</think>"}
    )
    thinking = [[*p, THINK_START] for p in PROMPTS]
    params = [greedy(thinking_token_budget=budget) for budget in (0, 2, 5, 9, 14)]
    prompts = [p for p in thinking for _ in params]
    engines.compare(prompts, [p.clone() for _ in thinking for p in params])


def check_thinking_budgets_end_with_their_request() -> None:
    engines = pair(
        reasoning_config={"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"}
    )
    thinking = [[*p, THINK_START] for p in PROMPTS]
    (alone,) = generate(engines.plain, thinking[1:2], greedy())
    # The first request ends, and the second one moves into its slot.
    params = [greedy(thinking_token_budget=16, max_tokens=4), greedy()]
    _, moved = generate(engines.tree, thinking[:2], params)
    assert moved.outputs[0].token_ids == alone.outputs[0].token_ids


def check_everything_at_once() -> None:
    engines = pair(logits_processors=CUSTOM)
    for method in (engines, pair("jetspec", logits_processors=CUSTOM)):
        each_prompt(
            method,
            greedy(),
            greedy(logit_bias={44: 3.0}, presence_penalty=0.6),
            seeded(7, min_p=0.2, repetition_penalty=1.1),
            greedy(extra_args={"alternate": True}, logprobs=1),
            seeded(8, min_tokens=9, stop_token_ids=[81, 11, 340]),
            greedy(bad_words=["cat", " over"], frequency_penalty=0.9),
        )


def check_drafted_by_ngrams_alone() -> None:
    engines = pair("ngram_tree")
    prompt = [40, 41, 42, 43, 44, 45] * 4
    engines.compare(
        [prompt, prompt[2:]],
        [greedy(logit_bias={81: 6.0}, max_tokens=48), greedy(min_tokens=20, max_tokens=48)],
        branching=False,
    )
