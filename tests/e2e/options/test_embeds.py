# SPDX-License-Identifier: Apache-2.0
"""Prompts of embeddings beside prompts of tokens, against plain decoding."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.pair import assert_same_output, pair, target
from tests.e2e.requests import greedy

pytestmark = [pytest.mark.e2e, pytest.mark.own_process]

# Text that lookups find: the requests of embeddings take the places that these leave.
TEXT = [60, 61, 62, 63] * 8


def embeddings(token_ids: list[int]) -> torch.Tensor:
    """[n, H] what the text target has for these tokens."""
    weights = {}
    for path in sorted(target().glob("*.safetensors")):
        weights.update(load_file(path))
    (name,) = [name for name in weights if name.endswith("embed_tokens.weight")]
    return weights[name][torch.tensor(token_ids)].float()


def test_embeddings_are_never_looked_up() -> None:
    for method in ("ngram_tree", "jetspec", "longspec"):
        engines = pair(method, enable_prompt_embeds=True, max_num_seqs=2)
        runner, drafter = engines.runner, engines.runner.drafter.drafter
        seen: list[list[int]] = []
        propose = drafter.propose

        def noted(requests: Any, propose: Any = propose, seen: Any = seen) -> Any:
            seen.extend(ids.tolist() for ids in requests.token_ids)
            return propose(requests)

        drafter.propose = noted
        params = greedy(max_tokens=24)
        plain = engines.plain.generate({"prompt_token_ids": TEXT}, params, use_tqdm=False)
        tree = engines.tree.generate({"prompt_token_ids": TEXT}, params, use_tqdm=False)
        assert_same_output(plain[0], tree[0], f"{method}, tokens")
        assert seen, "requests of tokens are drafted for beside the option"
        seen.clear()
        # A prompt of embeddings in the same row of the batch, alone and beside a prompt of tokens.
        own = {"prompt_embeds": embeddings([100 + i for i in range(len(TEXT))])}
        for prompts in ([own], [own, {"prompt_token_ids": TEXT}], [own, own]):
            expected = engines.plain.generate(prompts, params, use_tqdm=False)
            actual = engines.tree.generate(prompts, params, use_tqdm=False)
            for i, (a, b) in enumerate(zip(expected, actual, strict=True)):
                assert list(a.outputs[0].token_ids) == list(b.outputs[0].token_ids), (method, i)
        answer = list(tree[0].outputs[0].token_ids)
        strangers = [ids for ids in seen if ids != (TEXT + answer)[: len(ids)]]
        assert not strangers, json.dumps(strangers[0])
        assert runner.tree_metrics is not None


def test_a_penalised_prompt_of_embeddings_has_no_tokens() -> None:
    engines = pair("ngram_tree", enable_prompt_embeds=True, max_num_seqs=2)
    params = greedy(max_tokens=24, extra_args={"specplug_penalty": 1.4})
    own = {"prompt_embeds": embeddings([100, 101, 102, 103])}
    expected = engines.plain.generate(own, params, use_tqdm=False)
    actual = engines.tree.generate(own, params, use_tqdm=False)
    assert list(expected[0].outputs[0].token_ids) == list(actual[0].outputs[0].token_ids)
