# SPDX-License-Identifier: Apache-2.0
"""Pruning and masks of trees under a toy grammar, against each path walked alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging import version
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.structured_output import StructuredOutputManager

from tests.unit.tree.candidates import paths_of, trees
from vllm_specplug.engine import install
from vllm_specplug.tree.draft_tree import PARENTS_ATTRIBUTE

VOCABULARY = 12
MAX_SUM = 14
END = 11
"""Ends the toy grammar's text; in reasoning it ends that."""
ENDS = (2, 7)
"""Tokens that may not end reasoning; known to vLLM from 0.33 on."""
IS_033 = version.parse(vllm.__version__) >= version.parse("0.33")


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    install()
    install()  # wrapping twice must not walk twice


class ToyGrammar:
    """Texts of tokens whose sum stays below a bound; logs nothing, counts its moves."""

    def __init__(self) -> None:
        self.text: list[int] = []
        self.rejected = 0

    def allows(self, token: int) -> bool:
        return not self.is_terminated() and (token == END or sum(self.text) + token <= MAX_SUM)

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        kept: list[int] = []
        for token in tokens:
            if not self.allows(token):
                break
            self.text.append(token)
            kept.append(token)
        del self.text[len(self.text) - len(kept) :]
        return kept

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        for token in tokens:
            if not self.allows(token):
                self.rejected += 1
                return False
            self.text.append(token)
        return True

    def rollback(self, count: int) -> None:
        assert 0 < count <= len(self.text)
        del self.text[len(self.text) - count :]

    def is_terminated(self) -> bool:
        return END in self.text

    def fill_bitmask(self, bitmask: torch.Tensor, row: int) -> None:
        bitmask[row] = sum(1 << token for token in range(VOCABULARY) if self.allows(token))


def make_request(req_id: str, committed: list[int]) -> Any:
    grammar = ToyGrammar()
    grammar.text += committed
    state = SimpleNamespace(grammar=grammar)
    if IS_033:
        state.masked_reasoning_end_ids = ENDS if req_id == "reasons" else ()
    return SimpleNamespace(
        request_id=req_id,
        use_structured_output=True,
        is_prefill_chunk=False,
        is_finished=lambda: False,
        spec_token_ids=[],
        structured_output_request=state,
    )


def make_manager(reasons: bool = False) -> Any:
    manager = object.__new__(StructuredOutputManager)
    manager.enable_in_reasoning = True
    manager.vllm_config = SimpleNamespace(
        num_speculative_tokens=24,
        scheduler_config=SimpleNamespace(max_num_seqs=4),
        model_config=SimpleNamespace(is_diffusion=False),
    )
    manager.fill_bitmask_parallel_threshold = 128
    manager.backend = SimpleNamespace(
        allocate_token_bitmask=lambda rows: torch.full((rows, 1), 12345, dtype=torch.int32)
    )
    manager._grammar_bitmask = None
    manager._full_mask = torch.tensor(-1, dtype=torch.int32)
    if reasons:
        # Reasoning goes on until token 9.
        def bounds(request: Any, tokens: Any, spec_tokens_committed: bool = False) -> Any:
            start = list(tokens).index(9) + 1 if 9 in tokens else len(tokens) + 1
            return SimpleNamespace(grammar_start=start, constraint_start=start).__dict__.values()

        manager._get_constraint_bounds = bounds
    return manager


def rows_as_read(mask: Any, num_rows: list[int]) -> list[int]:
    """The rows that vLLM's runners read of a mask, given how many rows each request has."""
    if not IS_033:
        assert len(mask) == sum(num_rows)
        return mask[:, 0].tolist()
    stride = len(mask) // len(num_rows)
    return [row for i, n in enumerate(num_rows) for row in mask[i * stride :, 0].tolist()[:n]]


def drafts_of(drafted: dict[str, list[int]], **parents: list[int]) -> Any:
    """What a runner hands over: tokens of each request, and the parents of those with trees."""
    tokens = [list(ids) for ids in drafted.values()]
    drafts = SimpleNamespace(req_ids=list(drafted), draft_token_ids=tokens)
    if parents:
        setattr(drafts, PARENTS_ATTRIBUTE, parents)
    return drafts


def make_scheduler(manager: Any, requests: list[Any]) -> Any:
    scheduler = object.__new__(Scheduler)
    scheduler.structured_output_manager = manager
    scheduler.requests = {request.request_id: request for request in requests}
    return scheduler


def masks_of(
    tokens: list[int],
    parents: list[int] | None,
    committed: list[int],
    slots: int,
    *,
    ahead: bool,
    reasons: bool = False,
) -> tuple[Any, list[int]]:
    """Masks [1 + slots] of a request's drafts, and the scheduler's list of them.

    Scheduled ahead of drafting, a request has `slots` places whatever was drafted.
    """
    request = make_request("reasons" if reasons else "tree", committed)
    name, grammar = request.request_id, request.structured_output_request.grammar
    manager = make_manager(reasons)
    scheduler = make_scheduler(manager, [request])
    drafts = drafts_of({name: tokens}, **({} if parents is None else {name: parents}))
    if ahead:
        output = SimpleNamespace(scheduled_spec_decode_tokens={name: [-1] * slots})
        scheduler.update_draft_token_ids_in_output(drafts, output)
        scheduled = output.scheduled_spec_decode_tokens[name]
    else:
        scheduler.update_draft_token_ids(drafts)
        assert parents is None or request.spec_token_ids == tokens
        # The scheduler may cut the drafts.
        scheduled = request.spec_token_ids[:slots]
    assert grammar.text == committed
    mask = manager.grammar_bitmask(
        scheduler.requests, [name], {name: scheduled} if scheduled else {}
    )
    assert grammar.text == committed and grammar.rejected == 0
    return rows_as_read(mask, [1 + len(scheduled)]), scheduled


@settings(max_examples=300)
@given(
    tree=trees(20, VOCABULARY),
    committed=st.lists(st.integers(0, 3), max_size=3),
    slots=st.integers(0, 24),
    ahead=st.booleans(),
    reasons=st.booleans(),
    unused=st.lists(st.integers(0, 19), max_size=3),
)
def test_masks_are_those_of_each_path_and_forbidden_drafts_cannot_be_reached(
    tree, committed, slots, ahead, reasons, unused
) -> None:
    tokens, parents = tree.token_ids.tolist(), tree.parent_indices.tolist()
    # Nodes that the device gave up; what hangs below them is lost.
    parents = [-2 if node in unused else parent for node, parent in enumerate(parents)]
    paths = list(map(list, paths_of(tree)))
    slots = max(slots, 1) if ahead else slots
    mask, scheduled = masks_of(tokens, parents, committed, slots, ahead=ahead, reasons=reasons)
    nodes = min(len(tokens), slots)
    assert scheduled == tokens[:nodes] + [-1] * (slots - nodes if ahead else 0)

    def grammar_at(path: list[int]) -> ToyGrammar | None:
        """The grammar behind a path; None where it reads nothing yet."""
        if reasons and 9 not in path:
            return None
        alone = ToyGrammar()
        alone.text = [*committed, *(path[path.index(9) + 1 :] if reasons else path)]
        return alone

    def row(path: list[int]) -> int:
        alone, expected = grammar_at(path), torch.tensor([-1], dtype=torch.int32)
        if alone is None:
            expected -= sum(1 << token for token in ENDS) if IS_033 else 0
        elif not alone.is_terminated():
            alone.fill_bitmask(expected, 0)
        return int(expected[0])

    assert mask[0] == row([])
    reachable = {-1}
    for node in range(nodes):
        if parents[node] not in reachable:
            continue
        above = grammar_at(paths[node][:-1])
        if above is None or above.validate_tokens([tokens[node]]):
            reachable.add(node)
            assert mask[1 + node] == row(paths[node]), node
        elif not above.is_terminated():
            # The row above never samples it.
            assert not mask[1 + parents[node]] >> tokens[node] & 1


def test_a_tree_outlives_steps_that_leave_its_request_out() -> None:
    """Its drafts wait in the scheduler while others, drafted without parents, take the budget."""
    waits, runs = make_request("waits", []), make_request("runs", [])
    manager = make_manager()
    scheduler = make_scheduler(manager, [waits, runs])
    tokens, parents = [5, 6, 8, 8], [-1, -1, 0, 1]
    scheduler.update_draft_token_ids(drafts_of({"waits": tokens}, waits=parents))
    at_once = manager.grammar_bitmask(scheduler.requests, ["waits"], {"waits": tokens}).tolist()

    scheduler.update_draft_token_ids(drafts_of({"runs": [3]}))
    assert waits.spec_token_ids == tokens
    later = manager.grammar_bitmask(scheduler.requests, ["waits"], {"waits": tokens}).tolist()
    assert later == at_once


def test_a_chain_of_the_same_tokens_is_not_taken_for_the_tree_before_it() -> None:
    request = make_request("both", [])
    manager = make_manager()
    scheduler = make_scheduler(manager, [request])
    masks = []
    for parents in ({}, {"both": [-1, -1]}, {}):
        scheduler.update_draft_token_ids(drafts_of({"both": [5, 6]}, **parents))
        mask = manager.grammar_bitmask(scheduler.requests, ["both"], {"both": [5, 6]})
        masks.append(mask.tolist())
    as_chain, as_tree, again = masks
    assert again == as_chain != as_tree
