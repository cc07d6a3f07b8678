# SPDX-License-Identifier: Apache-2.0
"""Structured output on trees against plain decoding."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest

from tests.e2e.oracle import OracleDrafter
from tests.e2e.pair import Counts, Pair, both_schedulers, scheduled, watch_preemptions
from tests.e2e.requests import PROMPTS, THINK_END, THINK_START, greedy, seeded
from vllm_specplug.vllm_v2.runner import TreeRunnerMixin

pytestmark = [pytest.mark.e2e, pytest.mark.own_process]

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


@contextmanager
def masked_drafts(made: Pair) -> Iterator[list[int]]:
    """Tokens of the nodes that a grammar forbids below the path to their parent; grows."""
    runner, found = made.runner, []
    worker = runner.structured_outputs_worker
    stock = worker.apply_grammar_bitmask

    def noted(logits: Any, input_batch: Any, req_ids: list[str], bitmask: Any) -> None:
        stock(logits, input_batch, req_ids, bitmask)
        starts = input_batch.cu_num_logits_np.tolist()
        for i, req_id in enumerate(input_batch.req_ids):
            tree = runner.speculator.trees.get(req_id)
            if req_id in req_ids and tree is not None:
                tree = tree.prefix(starts[i + 1] - starts[i] - 1)
                rows = starts[i] + 1 + tree.parent_indices
                forbidden = logits[rows, tree.token_ids].isneginf().numpy()
                found.extend(tree.token_ids[forbidden].tolist())

    with patch.object(worker, "apply_grammar_bitmask", noted):
        yield found


def compare(made: Pair, prompts: list[list[int]], params: list[Any]) -> tuple[list[Any], Counts]:
    """Every prompt with every one of `params`, in one batch; a grammar forbids some drafts."""
    with masked_drafts(made) as masked:
        outputs, counts = made.compare(
            [p for p in prompts for _ in params], [one.clone() for _ in prompts for one in params]
        )
    assert masked, "no draft was against a grammar"
    assert (counts.stale > 0) == made.is_ahead, counts
    return outputs, counts


def every_kind(made: Pair, kinds: dict[str, dict[str, Any]], **options: Any) -> Counts:
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
    outputs, counts = compare(made, PROMPTS, params)
    assert len({o.outputs[0].text for o in outputs}) > len(kinds)
    return counts


def test_all_kinds_beside_free_requests() -> None:
    for made in both_schedulers():
        every_kind(made, KINDS)


@contextmanager
def decoys_from_answers() -> Iterator[None]:
    """Drafts hold tokens of the answer at other depths: a mask of a wrong row allows them."""
    with patch.object(OracleDrafter, "decoys_from_answer", True):
        yield


def lengths() -> list[Any]:
    """Texts of a certain length: the end is where a chain of all nodes would not have it."""
    return [
        constrained({"regex": "[a-z ]{14,16}"}), constrained({"regex": "[a-z ]{14,16}"}, seed=4),
        constrained({"regex": "[a-z ]{6}(yes|no) [0-9]{3}"}),
    ]  # fmt: skip


def test_grammars_reach_into_trees() -> None:
    """No other requests: every counted tree has a grammar."""
    for made in both_schedulers():
        with decoys_from_answers():
            _, counts = compare(made, PROMPTS, lengths())
        assert counts.branching > 5 and counts.skipping > 0 and counts.accepted > 10, counts


def test_masks_along_a_line_would_not_do() -> None:
    """The negative control: where the runner keeps the parents, vLLM fills its own masks."""
    for made in both_schedulers():
        with (
            decoys_from_answers(),
            patch.object(TreeRunnerMixin, "_note_grammars", lambda *_: None),
            pytest.raises(AssertionError, match="differs"),
        ):
            compare(made, PROMPTS, lengths())


def test_guidance_backend() -> None:
    kinds = {**KINDS, "ebnf": {"grammar": LARK}}
    every_kind(scheduled(True, structured_outputs_config={"backend": "guidance"}), kinds)


def test_outlines_backend() -> None:
    kinds = {k: KINDS[k] for k in ("regex", "choice")}
    every_kind(scheduled(False, structured_outputs_config={"backend": "outlines"}), kinds)


def test_with_other_options() -> None:
    regex = {"regex": "[a-z ]*"}
    params = [
        constrained(regex, min_tokens=12),
        constrained(regex, stop=["a", "e"]),
        constrained(regex, logit_bias={81: 5.0, 300: 3.0}),
        constrained(regex, seed=3, min_p=0.1, logprobs=2),
        constrained(regex, bad_words=["the", " the"], repetition_penalty=1.3),
        constrained(regex, seed=4, n=2),
    ]
    for made in both_schedulers():
        outputs, _ = compare(made, PROMPTS, params)
        assert len(outputs[0].outputs[0].token_ids) >= 12


def test_drafted_by_a_head_and_ngrams() -> None:
    regex = {"regex": "((red|blue) (cat|dog) ){3,12}"}
    params = [
        constrained(regex, max_tokens=80),
        constrained(regex, seed=1, temperature=0.3, max_tokens=80),
        greedy(),
    ]
    compare(scheduled(True, "jetspec", speculative={"ngram_topk": 4}), PROMPTS, params)


def test_grammar_that_starts_inside_a_tree() -> None:
    prompts = [[*p, THINK_START] for p in PROMPTS]
    params = [
        constrained(how, thinking_token_budget=budget, seed=budget)
        for how in (KINDS["choice"], KINDS["json"], KINDS["regex"])
        for budget in (1, 4, 9)
    ]
    # Thinking that ends by itself, at a place that chance decides.
    params += [constrained(KINDS["ebnf"], seed=k, logit_bias={THINK_END: 4.0}) for k in range(4)]
    params.append(greedy())
    for made in both_schedulers(reasoning_parser="deepseek_r1"):
        outputs, _ = compare(made, prompts, params)
        answered = [o for o in outputs if THINK_END in o.outputs[0].token_ids[:-4]]
        assert len(answered) > len(prompts)


def test_tool_calls() -> None:
    """The grammar behind automatic tool choice: free text until a trigger, then a schema."""
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
    for made in both_schedulers():
        outputs, _ = compare(made, PROMPTS, params)
        assert any(4 in o.outputs[0].token_ids for o in outputs)


def test_prefix_cache_and_preemption() -> None:
    params = [
        constrained({"regex": "[a-z ]{60,90}"}, max_tokens=70),
        constrained({"json": SCHEMA}, max_tokens=70),
        greedy(max_tokens=70),
    ]
    prompts = [[*p, *range(50, 70)] for p in PROMPTS]
    for made in both_schedulers(num_gpu_blocks_override=9, enable_prefix_caching=True):
        preempted = watch_preemptions(made.tree)
        for _ in range(2):
            compare(made, prompts, params)
        assert preempted
