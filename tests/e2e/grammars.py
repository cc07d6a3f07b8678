# SPDX-License-Identifier: Apache-2.0
"""Requests with structured output."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from tests.e2e.pair import Counts, Pair
from tests.e2e.requests import PROMPTS, greedy, seeded

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
