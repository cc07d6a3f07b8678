# SPDX-License-Identifier: Apache-2.0
"""Structured output on trees against plain decoding; see test_grammar.py."""

from __future__ import annotations

from typing import Any

from tests.e2e.option_checks import PROMPTS, THINK_END, THINK_START, greedy, seeded
from tests.e2e.pair import Counts, Pair, pair
from tests.e2e.sessions import compare_constrained

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 3},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "age", "tags", "ok"],
    "additionalProperties": False,
}
EBNF = """
root ::= item (", " item)*
item ::= color " " number
color ::= "red" | "green" | "blue"
number ::= [1-9] [0-9]?
"""
LARK = """
start: item (", " item)*
item: COLOR " " NUMBER
COLOR: "red" | "green"
NUMBER: /[1-9][0-9]?/
"""


def constrained(how: dict[str, Any], **options: Any) -> Any:
    from vllm.sampling_params import StructuredOutputsParams

    options = {"ignore_eos": False, "max_tokens": 48, **options}
    make = seeded if "seed" in options else greedy
    seed = (options.pop("seed"),) if "seed" in options else ()
    return make(*seed, structured_outputs=StructuredOutputsParams(**how), **options)


KINDS: dict[str, dict[str, Any]] = {
    "json": {"json": SCHEMA},
    "regex": {"regex": r"[a-z ]{6,30}(yes|no)\."},
    "choice": {"choice": ["the quick brown fox", "the lazy dog", "the quick red fox"]},
    "ebnf": {"grammar": EBNF},
    "json_object": {"json_object": True},
}


def every_kind(
    engines: Pair, kinds: dict[str, dict[str, Any]], *, prunes: bool = True, **options: Any
) -> Counts:
    """All kinds, greedily and by chance, in one batch with free requests."""
    params = []
    for k, how in enumerate(kinds.values()):
        params += [
            constrained(how, **options),
            constrained(how, seed=k, **options),
            # The same drafts below another path: siblings that are both legal.
            constrained(how, presence_penalty=1.0, repetition_penalty=1.2, **options),
        ]
    params.append(greedy())
    outputs, counts = engines.compare(
        [p for p in PROMPTS for _ in params],
        [param.clone() for _ in PROMPTS for param in params],
    )
    assert (counts.pruned > 0) == prunes, counts
    assert len({o.outputs[0].text for o in outputs}) > len(kinds)
    return counts


def check_all_kinds_beside_free_requests() -> None:
    every_kind(pair(), KINDS)


def check_json_is_valid_and_trees_reach_into_it() -> None:
    import json

    schema = {
        "type": "object",
        "properties": {"tags": {"enum": ["red", "blue"]}, "ok": {"type": "boolean"}},
        "required": ["tags", "ok"],
        "additionalProperties": False,
    }
    params = [constrained({"json": schema}, seed=k, max_tokens=120) for k in range(5)]
    # No other requests in the engine: every counted tree is one of these.
    outputs, counts = pair().compare(PROMPTS[:1] * 5, params, least_accepted=10)
    complete = [o.outputs[0].text for o in outputs if o.outputs[0].finish_reason == "stop"]
    assert complete
    for text in complete:
        assert set(json.loads(text)) == {"tags", "ok"}
    assert counts.branching > 0 and counts.pruned > 0, counts


def check_guidance_backend() -> None:
    kinds = {**KINDS, "ebnf": {"grammar": LARK}}
    every_kind(pair(structured_outputs_config={"backend": "guidance"}), kinds)


def check_outlines_backend() -> None:
    kinds = {k: KINDS[k] for k in ("regex", "choice")}
    every_kind(pair(structured_outputs_config={"backend": "outlines"}), kinds)


def check_with_other_options() -> None:
    engines = pair()
    regex = {"regex": "[a-z ]*"}
    params = [
        constrained(regex, min_tokens=12),
        constrained(regex, stop=["a", "e"]),
        constrained(regex, logit_bias={81: 5.0, 300: 3.0}),
        constrained(regex, seed=3, min_p=0.1, logprobs=2),
        constrained(regex, bad_words=["the", " the"]),
        constrained(regex, seed=4, n=2),
    ]
    outputs, _ = engines.compare(
        [p for p in PROMPTS for _ in params], [p.clone() for _ in PROMPTS for p in params]
    )
    assert len(outputs[0].outputs[0].token_ids) >= 12


def check_drafted_by_a_head_and_ngrams() -> None:
    regex = {"regex": "((red|blue) (cat|dog) ){3,12}"}
    params = [
        constrained(regex, max_tokens=80),
        constrained(regex, seed=1, temperature=0.3, max_tokens=80),
        greedy(),
    ]
    engines = pair("jetspec", speculative={"ngram_topk": 4})
    engines.compare(
        [p for p in PROMPTS for _ in params], [p.clone() for _ in PROMPTS for p in params]
    )


def check_grammar_that_starts_inside_a_tree() -> None:
    engines = pair(reasoning_parser="deepseek_r1")
    prompts = [[*p, THINK_START] for p in PROMPTS]
    params = [
        constrained(how, thinking_token_budget=budget, seed=budget)
        for how in (KINDS["choice"], KINDS["json"], KINDS["regex"])
        for budget in (1, 4, 9)
    ]
    # Thinking that ends by itself, at a place that chance decides.
    params += [constrained(KINDS["ebnf"], seed=k, logit_bias={THINK_END: 4.0}) for k in range(4)]
    params.append(greedy())
    outputs, counts = engines.compare(
        [p for p in prompts for _ in params], [p.clone() for _ in prompts for p in params]
    )
    assert counts.pruned > 0
    answered = [o for o in outputs if THINK_END in o.outputs[0].token_ids[:-4]]
    assert len(answered) > len(prompts)


def check_tool_calls() -> None:
    """The grammar behind automatic tool choice: free text until a trigger, then a schema."""
    import json

    tag = {
        "structures": [
            {
                "begin": "<tool_call>",
                "schema": {
                    "type": "object",
                    "properties": {"ok": {"type": "boolean"}, "to": {"enum": ["red", "blue"]}},
                    "required": ["ok", "to"],
                    "additionalProperties": False,
                },
                "end": "</tool_call>",
            }
        ],
        "triggers": ["<tool_call>"],
    }
    how = {"structural_tag": json.dumps(tag)}
    params = [constrained(how, seed=k, logit_bias={4: 5.0}, max_tokens=64) for k in range(3)]
    outputs, counts = pair().compare(
        [p for p in PROMPTS for _ in params], [p.clone() for _ in PROMPTS for p in params]
    )
    assert counts.pruned > 0
    assert any(4 in o.outputs[0].token_ids for o in outputs)


def check_prefix_cache_and_preemption() -> None:
    engines = pair(num_gpu_blocks_override=9, enable_prefix_caching=True)
    params = [
        constrained({"regex": "[a-z ]{60,90}"}, max_tokens=70),
        constrained({"json": SCHEMA}, max_tokens=70),
        greedy(max_tokens=70),
    ]
    prompts = [[*p, *range(50, 70)] for p in PROMPTS for _ in params]
    for _ in range(2):
        engines.compare(prompts, [p.clone() for _ in PROMPTS for p in params])


def check_masks_along_a_line_would_not_do() -> None:
    """The negative control: with vLLM's own masks these comparisons fail."""
    import pytest
    from vllm.v1.structured_output import StructuredOutputManager

    # An engine of its own: what it is left with is nobody's business.
    engines = pair(speculative={"num_speculative_tokens": 12, "tree_budget": 12})
    ours = StructuredOutputManager.grammar_bitmask
    StructuredOutputManager.grammar_bitmask = ours.__wrapped__
    try:
        with pytest.raises((AssertionError, RuntimeError)):
            every_kind(engines, KINDS)
    finally:
        StructuredOutputManager.grammar_bitmask = ours


def check_drafts_whose_parents_got_lost() -> None:
    """vLLM then walks the flat list and fills its own masks, which no branching tree may use."""
    from vllm.v1.core.sched.scheduler import Scheduler

    engines = pair()
    ours = Scheduler.update_draft_token_ids
    Scheduler.update_draft_token_ids = ours.__wrapped__
    try:
        every_kind(engines, KINDS, prunes=False)
    finally:
        Scheduler.update_draft_token_ids = ours


def check_a_grammar_outlives_the_turn_that_asked_for_it() -> None:
    """vLLM follows the grammar of a session's first turn to its end."""
    compare_constrained(pair())
