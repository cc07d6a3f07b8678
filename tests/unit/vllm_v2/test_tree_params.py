# SPDX-License-Identifier: Apache-2.0
"""Sampling parameters on rows of random trees, against plain decoding of each branch.

Tokens are few, so that a row's ancestors, its siblings and its request's committed tokens have many
in common: a parameter that reads the wrong rows finds true tokens of other depths there.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import vllm.v1.worker.cpu.shm  # noqa: F401  stand-ins for what CPUs lack
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext

from tests.unit.vllm_v2.pretended import Recorder
from vllm_specplug.request_params import parse_penalty
from vllm_specplug.vllm_v2.penalty_processor import ContextualPenalty, draft_penalties
from vllm_specplug.vllm_v2.tree_params import put_on_trees

pytestmark = pytest.mark.usefixtures("cpu_kernels")

VOCAB, TOKENS, SLOTS, NODES = 40, 5, 32, 9
CPU = torch.device("cpu")
START, NATURAL_END, END = [1], [3, 2], [3, 4, 0]

seeds = st.integers(0, 2**32 - 1)
some = settings(max_examples=10)


@dataclass
class Request:
    """One request at some point of its answer, and the tree drafted for it."""

    prompt: list[int]
    output: list[int]
    params: Any
    token_ids: list[int]
    parents: list[int]

    @property
    def rows(self) -> int:
        return 1 + len(self.parents)

    def path(self, row: int) -> list[int]:
        """Rows from below the root to `row` in tree order; 0 is the root."""
        path: list[int] = []
        while row > 0:
            path.insert(0, row)
            row = self.parents[row - 1] + 1
        return path


def random_request(rng: np.random.Generator, params: Any) -> Request:
    num_nodes = int(rng.integers(0, NODES + 1))
    parents, token_ids = [], []
    for node in range(num_nodes):
        parent = int(rng.integers(-1, node))
        used = {t for t, p in zip(token_ids, parents, strict=True) if p == parent}
        free = [token for token in range(TOKENS) if token not in used]
        if not free:
            parent, free = node - 1, list(range(TOKENS))
        parents.append(parent)
        token_ids.append(int(rng.choice(free)))
    return Request(
        rng.integers(0, TOKENS, rng.integers(1, 8)).tolist(),
        rng.integers(0, TOKENS, rng.integers(1, 9)).tolist(),
        params,
        token_ids,
        parents,
    )


def make_sampler(requests: list[Request], processors: tuple[Any, ...] = ()) -> Any:
    """vLLM's sampler and its request states, before any request."""
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.states import RequestState

    reasoning = SimpleNamespace(
        reasoning_start_token_ids=START,
        natural_reasoning_end_token_ids=NATURAL_END,
        reasoning_end_token_ids=END,
    )
    states = RequestState(SLOTS, 64, 64, NODES, VOCAB, CPU)
    config: Any = SimpleNamespace(reasoning_config=reasoning)
    return Sampler(config, SLOTS, VOCAB, CPU, states, custom_logits_processors=processors)


def begin(sampler: Any, requests: list[Request]) -> list[int]:
    """Takes the requests up; their slots."""
    states, slots = sampler.req_states, []
    for i, request in enumerate(requests):
        tokens = [*request.prompt, *request.output]
        states.add_request(str(i), len(request.prompt), tokens, len(tokens) - 1, 40)
        slots.append(states.req_id_to_index[str(i)])
        sampler.add_request(slots[-1], request.params)
    states.apply_staged_writes()
    sampler.apply_staged_writes()
    return slots


def sample(
    sampler: Any, slots: list[int], requests: list[Request], rows: list[list[int]], logits: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the sampler draws and from what, of the given rows of each request's tree; positions
    follow depth."""
    counts = [len(one) for one in rows]
    idx_mapping = torch.tensor(slots, dtype=torch.int32)
    positions, input_ids = [], []
    for request, chosen in zip(requests, rows, strict=True):
        total = len(request.prompt) + len(request.output)
        for row in chosen:
            positions.append(total - 1 + len(request.path(row)))
            input_ids.append(request.token_ids[row - 1] if row else request.output[-1])
    return sampler.sample(
        logits,
        idx_mapping.repeat_interleave(torch.tensor(counts)),
        idx_mapping,
        idx_mapping.numpy(),
        torch.tensor(positions),
        torch.tensor(input_ids, dtype=torch.int32),
        torch.cat([torch.arange(n, dtype=torch.int32) for n in counts]),
        np.array([np.max(one) + 1 for one in np.split(positions, np.cumsum(counts)[:-1])]),
    )


def step_parents(requests: list[Request]) -> Any:
    parent_rows, depths, first = [], [], 0
    for request in requests:
        parent_rows += [-1, *(first + 1 + parent for parent in request.parents)]
        depths += [len(request.path(row)) for row in range(request.rows)]
        first += request.rows
    return SimpleNamespace(
        parent_rows=torch.tensor(parent_rows, dtype=torch.int32),
        depths=torch.tensor(depths, dtype=torch.int32),
        rows=SimpleNamespace(max_request_rows=max(request.rows for request in requests)),
    )


def all_rows(requests: list[Request]) -> list[list[int]]:
    return [list(range(request.rows)) for request in requests]


def drawn(sampler: Any, requests: list[Request], logits: torch.Tensor) -> Any:
    """Of all rows of requests that the sampler takes up now."""
    return sample(sampler, begin(sampler, requests), requests, all_rows(requests), logits.clone())


def as_trees(requests: list[Request], logits: torch.Tensor, longest: int = NODES) -> Any:
    sampler = make_sampler(requests)
    put_on_trees(sampler, SimpleNamespace(trees=step_parents(requests)), longest)
    return drawn(sampler, requests, logits)


def plainly(requests: list[Request], logits: torch.Tensor, read: Any = None) -> Any:
    """What plain decoding draws in every row: its path is emitted, and it has no drafts."""
    alone = []
    for request in requests:
        for row in range(request.rows):
            path = [request.token_ids[r - 1] for r in request.path(row)]
            alone.append(Request(request.prompt, [*request.output, *path], request.params, [], []))
    if read is None:
        return drawn(make_sampler(alone), alone, logits)
    reader = Reader(read)
    sampler = make_sampler(alone, (reader,))
    reader.states = sampler.req_states
    return drawn(sampler, alone, logits)


def batch(seed: int, **options: Any) -> tuple[list[Request], torch.Tensor]:
    """Requests, half of them with the options, and logits of their rows."""
    from vllm import SamplingParams

    rng = np.random.default_rng(seed)
    bad_words = options.pop("bad_words", None)
    requests = []
    for i in range(int(rng.integers(1, 4))):
        has = i == 0 or rng.random() < 0.5
        params = SamplingParams(
            **({"temperature": 1.0, "seed": i, **options} if has else {"temperature": 0.0})
        )
        if has and bad_words is not None:
            params._bad_words_token_ids = [
                rng.integers(0, TOKENS, rng.integers(1, 5)).tolist() for _ in range(bad_words)
            ]
        requests.append(random_request(rng, params))
    rows = sum(request.rows for request in requests)
    # Drafted tokens are likely, and some are masked already.
    logits = torch.from_numpy(rng.normal(0, 2, (rows, VOCAB))).float()
    logits[:, :TOKENS] += 3
    logits[torch.from_numpy(rng.random((rows, VOCAB)) < 0.05)] = float("-inf")
    return requests, logits


OPTIONS: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.4},
    "frequency": {"frequency_penalty": 0.7},
    "presence": {"presence_penalty": -0.9},
    "penalties": {"repetition_penalty": 0.8, "frequency_penalty": -0.3, "presence_penalty": 0.4},
    "bad_words": {"bad_words": 6},
    "thinking": {"thinking_token_budget": 2},
    "thinking_at_once": {"thinking_token_budget": 0},
    "together": {"repetition_penalty": 1.2, "bad_words": 3, "thinking_token_budget": 1,
                 "logit_bias": {2: 1.5}, "min_tokens": 9, "stop_token_ids": [3, 4],
                 "allowed_token_ids": list(range(30)), "min_p": 0.02, "top_k": 12, "top_p": 0.9},
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
@some
@given(seed=seeds)
def test_a_row_is_sampled_as_in_plain_decoding(name: str, seed: int) -> None:
    requests, logits = batch(seed, **OPTIONS[name])
    tokens, processed = as_trees(requests, logits)
    expected_tokens, expected = plainly(requests, logits)
    assert torch.equal(processed, expected)
    assert torch.equal(tokens, expected_tokens)


@some
@given(seeds)
def test_a_step_without_drafts_is_vllms(seed: int) -> None:
    requests, _ = batch(seed, **OPTIONS["together"])
    for request in requests:
        request.token_ids, request.parents = [], []
    logits = torch.randn(len(requests), VOCAB)
    sampler = make_sampler(requests)
    put_on_trees(sampler, SimpleNamespace(trees=None), NODES)
    found, expected = drawn(sampler, requests, logits), plainly(requests, logits)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


@some
@given(seeds)
def test_rows_that_are_no_nodes_harm_no_others(seed: int) -> None:
    requests, logits = batch(seed, **OPTIONS["together"])
    expected, _ = as_trees(requests, logits)
    parents = step_parents(requests)
    has_child = set(parents.parent_rows.tolist())
    leaves = [
        r for r, p in enumerate(parents.parent_rows.tolist()) if p >= 0 and r not in has_child
    ]
    parents.parent_rows[leaves] = -2
    parents.depths[leaves] = 77
    sampler = make_sampler(requests)
    put_on_trees(sampler, SimpleNamespace(trees=parents), NODES)
    found, _ = drawn(sampler, requests, logits)
    others = [row for row in range(len(found)) if row not in leaves]
    assert torch.equal(found[others], expected[others])


def test_words_of_any_length_are_taken() -> None:
    """What a client may send at most: many words, and one as long as all others together."""
    requests, logits = batch(3, bad_words=1)
    rng = np.random.default_rng(0)
    words = [rng.integers(0, TOKENS, 1).tolist() for _ in range(120)]
    words.append(rng.integers(0, TOKENS, 900).tolist())
    requests[0].params._bad_words_token_ids = words
    assert torch.equal(as_trees(requests, logits)[1], plainly(requests, logits)[1])


class Reader:
    """A processor of somebody's own, for requests with a seed of 0: a function of what it reads.

    Args:
        read: a number of the row from its context, its slot, the batch index and request states.
    """

    def __init__(self, read: Any) -> None:
        self.read = read
        self.is_on = np.zeros(SLOTS, dtype=bool)
        self.states: Any = None

    def add_request(self, slot: int, params: Any) -> bool:
        self.is_on[slot] = params.seed == 0
        return bool(self.is_on[slot])

    def apply_staged_writes(self) -> None:
        pass

    def apply(self, logits: torch.Tensor, ctx: Any) -> torch.Tensor:
        logits = logits.clone()
        for row, slot in enumerate(ctx.expanded_idx_mapping.tolist()):
            if self.is_on[slot]:
                index = ctx.idx_mapping.tolist().index(slot)
                shift = self.read(self.states, ctx, row, slot, index)
                logits[row] += torch.sin(torch.arange(VOCAB) + 7.0 * shift)
        return logits


def _text(states: Any, slot: int) -> list[int]:
    return states.all_token_ids.gpu[slot, : int(states.total_len.gpu[slot])].tolist()


READERS: dict[str, Any] = {
    "text": lambda states, ctx, row, slot, index: hash(tuple(_text(states, slot))) % 1009,
    "length": lambda states, ctx, row, slot, index: int(states.total_len.gpu[slot]),
    "input": lambda states, ctx, row, slot, index: int(ctx.input_ids[row]),
    "position": lambda states, ctx, row, slot, index: int(ctx.pos[row]),
    "bound": lambda states, ctx, row, slot, index: int(ctx.seq_lens_upper_bound_np[index]),
    # Rows above the row, as a processor that knows vLLM's own drafts reads them.
    "rows_above": lambda states, ctx, row, slot, index: (
        sum(ctx.input_ids[row - int(ctx.expanded_local_pos[row]) : row + 1].tolist())
        + sum(_text(states, slot)[:-1])
    ),
}  # fmt: skip


def read_in_trees(requests: list[Request], logits: torch.Tensor, read: Any) -> Any:
    """Samples of all rows with such a processor, and its request states."""
    reader = Reader(read)
    sampler = make_sampler(requests, (reader,))
    reader.states = sampler.req_states
    put_on_trees(sampler, SimpleNamespace(trees=step_parents(requests)), NODES)
    return drawn(sampler, requests, logits), reader.states


def reading(seed: int) -> tuple[list[Request], torch.Tensor]:
    return batch(seed, repetition_penalty=1.3)


@pytest.mark.parametrize("name", READERS)
@settings(max_examples=4)
@given(seed=seeds)
def test_processors_of_others_see_what_plain_decoding_shows_them(name: str, seed: int) -> None:
    requests, logits = reading(seed)
    (_, processed), states = read_in_trees(requests, logits, READERS[name])
    assert torch.equal(processed, plainly(requests, logits, READERS[name])[1])
    for i, request in enumerate(requests):
        assert _text(states, states.req_id_to_index[str(i)]) == [*request.prompt, *request.output]


def test_a_processor_that_fails_leaves_the_tokens_as_they_were() -> None:
    def fail(*_: Any) -> int:
        raise RuntimeError("broken")

    requests, logits = reading(1)
    reader = Reader(fail)
    sampler = make_sampler(requests, (reader,))
    put_on_trees(sampler, SimpleNamespace(trees=step_parents(requests)), NODES)
    slots = begin(sampler, requests)
    lengths = sampler.req_states.total_len.gpu.clone()
    with pytest.raises(RuntimeError, match="broken"):
        sample(sampler, slots, requests, all_rows(requests), logits)
    assert torch.equal(sampler.req_states.total_len.gpu, lengths)


def contextual(seed: int) -> tuple[list[Request], torch.Tensor]:
    """Windows inside the output, into the prompt and past its begin; likely and unlikely tokens."""
    requests, logits = batch(seed)
    for i, request in enumerate(requests):
        window, theta = [(3, 1.5), (11, 0.6), (1024, 1.3)][(seed + i) % 3]
        if i != 1:
            request.params.extra_args = {
                "specplug_penalty": theta, "specplug_penalty_window": window
            }  # fmt: skip
    return requests, logits - 3 * (seed % 2)


def penalised(requests: list[Request], logits: torch.Tensor, in_trees: bool = True) -> torch.Tensor:
    sampler = make_sampler(requests)
    sampler.logits_processors.append(ContextualPenalty(None, sampler.req_states))
    if in_trees:
        put_on_trees(sampler, SimpleNamespace(trees=step_parents(requests)), NODES)
    return drawn(sampler, requests, logits)[1]


def expected_penalised(requests: list[Request], logits: torch.Tensor) -> torch.Tensor:
    """Token by token, from the definition."""
    rows, logits, first = [], logits.clone(), 0
    for request in requests:
        penalty = parse_penalty(request.params.extra_args)
        for row in range(request.rows):
            path = [request.token_ids[r - 1] for r in request.path(row)]
            one = logits[first + row]
            if penalty is not None:
                window, theta = penalty
                for token in {*[*request.prompt, *request.output, *path][-window:]}:
                    if token < VOCAB:
                        one[token] = one[token] / theta if one[token] > 0 else one[token] * theta
            rows.append(one)
        first += request.rows
    return torch.stack(rows)


@pytest.mark.parametrize("has_drafts", [True, False])
@some
@given(seed=seeds)
def test_the_contextual_penalty_reads_each_rows_path(has_drafts: bool, seed: int) -> None:
    requests, logits = contextual(seed)
    if not has_drafts:
        for request in requests:
            request.token_ids, request.parents = [], []
        logits = logits[: len(requests)]
    found = penalised(requests, logits, in_trees=has_drafts)
    assert torch.equal(found, expected_penalised(requests, logits))


def test_tokens_without_a_logit_are_not_penalised() -> None:
    """A tokenizer may know more tokens than there are logits, and token 0 is one like others."""
    for newest in (0, 5, VOCAB - 1):
        requests, logits = contextual(2)
        requests = requests[:1]
        requests[0].prompt, requests[0].output = [0, 3, 50], [60, newest]
        requests[0].token_ids, requests[0].parents = [], []
        found = penalised(requests, logits[:1], in_trees=False)
        assert torch.equal(found, expected_penalised(requests, logits[:1]))


def test_drafts_see_the_penalty_of_the_next_sample() -> None:
    requests, logits = contextual(3)
    for request in requests:
        request.token_ids, request.parents = [], []
    logits = logits[: len(requests)]
    expected = expected_penalised(requests, logits)
    sampler = make_sampler(requests)
    slots = torch.tensor(begin(sampler, requests))
    asked = [parse_penalty(request.params.extra_args) for request in requests]
    penalties = draft_penalties(asked, sampler.req_states, slots, 64)
    assert penalties is not None
    penalties.apply(logits[:, None], 0, None)
    assert torch.equal(logits, expected)
    assert draft_penalties([None], sampler.req_states, slots[:1], 64) is None


def on_pretended_device(state: Any) -> None:
    """Moves what a processor keeps on the device to one whose tensors have no values."""
    for name, value in vars(state).items():
        if isinstance(value, torch.Tensor):
            setattr(state, name, value.to("meta"))
        elif hasattr(value, "gpu"):
            value.gpu = value.gpu.to("meta")


# Operations of one parameter beside the stock kernel's, each of which is a launch on a GPU. Less is
# better; more needs a reason.
LAUNCHES = {"TreePenalties": 60, "TreeBadWords": 90, "TreeThinkingBudget": 95}


@pytest.mark.parametrize("name", OPTIONS)
def test_nothing_is_read_on_the_host_and_launches_are_few(name: str) -> None:
    """On tensors without values, whoever asks for one fails."""
    requests, logits = batch(1, **OPTIONS[name])
    sampler = make_sampler(requests)
    parents = step_parents(requests)
    parents.parent_rows, parents.depths = parents.parent_rows.to("meta"), parents.depths.to("meta")
    put_on_trees(sampler, SimpleNamespace(trees=parents), 16)
    slots = np.array(begin(sampler, requests), dtype=np.int32)
    counts = torch.tensor([request.rows for request in requests])
    on_pretended_device(sampler.req_states)
    ctx = LogitsContext(
        expanded_idx_mapping=torch.from_numpy(slots).repeat_interleave(counts).to("meta"),
        idx_mapping=torch.from_numpy(slots).to("meta"),
        idx_mapping_np=slots,
        expanded_local_pos=torch.empty(len(logits), dtype=torch.int32, device="meta"),
        input_ids=torch.empty(len(logits), dtype=torch.int32, device="meta"),
        pos=torch.empty(len(logits), dtype=torch.int64, device="meta"),
        seq_lens_upper_bound_np=slots,
    )
    changed = 0
    for processor in (*sampler.logits_processors, sampler.thinking_budget_state):
        if not hasattr(processor, "is_used") or not processor.is_used(slots):
            continue
        on_pretended_device(processor.stock)
        # vLLM's kernels run where there are values.
        processor.stock.apply = lambda logits, ctx: logits
        if hasattr(processor, "longest"):
            processor.longest[:] = 2  # words of three tokens; each one more has its own operations
        given = logits.to("meta")
        with Recorder() as recorder:
            result = processor.apply(given, ctx)
        assert result is not None and result.is_meta
        most = LAUNCHES[type(processor).__name__]
        assert 0 < recorder.operations <= most, recorder.operations
        changed += 1
    assert changed
