# SPDX-License-Identifier: Apache-2.0
"""The head's context is written late, whole, and before pages change hands."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from vllm_specplug.drafting.context_backlog import ContextBacklog


def _step(
    backlog: ContextBacklog, req_ids: list[str], spans: list[tuple[int, int]], base: int = 0
) -> None:
    """A step in which request i commits the tokens at the slots `spans[i]`; a token's state tells
    its slot, and `base`."""
    slots = torch.cat([torch.arange(a, b) for a, b in spans])
    owners = np.repeat(np.arange(len(spans)), [b - a for a, b in spans])
    states = (base + slots)[:, None].float().expand(-1, 4)
    backlog.add(states, slots, req_ids=req_ids, owners=owners)


class _Cache:
    """What was written last to each slot."""

    def __init__(self) -> None:
        self.values: dict[int, float] = {}
        self.writes = 0

    def write(self, states: torch.Tensor, slots: torch.Tensor) -> None:
        self.writes += 1
        self.values.update(zip(slots.tolist(), states[:, 0].tolist(), strict=True))


ROW_BYTES = 4 * 4 + 8


def _idle(rows: int = 100) -> tuple[_Cache, ContextBacklog]:
    cache = _Cache()
    backlog = ContextBacklog(cache.write, rows * ROW_BYTES)
    backlog.set_deferred(True)
    return cache, backlog


def test_what_was_put_off_is_written_for_those_that_are_drafted_for() -> None:
    cache, backlog = _idle()
    _step(backlog, ["a", "b"], [(0, 5), (20, 28)])
    _step(backlog, ["b", "a"], [(28, 29), (5, 6)])
    assert backlog.num_deferred(["a", "b", "c"]) == [6, 9, 0] and not cache.writes
    backlog.write(["b"])
    assert cache.values == {slot: float(slot) for slot in range(20, 29)}
    assert backlog.num_deferred(["a", "b"]) == [6, 0]
    backlog.write(["b"])
    assert cache.writes == 1, "nothing is written twice"


def test_tokens_of_unknown_requests_are_not_put_off() -> None:
    cache, backlog = _idle()
    backlog.add(torch.zeros(0, 4), torch.arange(0))
    assert not cache.writes, "steps without tokens leave nothing"
    backlog.add(torch.zeros(5, 4), torch.arange(5))
    assert len(cache.values) == 5


def test_what_is_put_off_survives_a_random_service() -> None:
    """Requests start, share prefixes, commit, are drafted for and end in any order; a slot that a
    draft reads always holds its own token's context."""
    rng = np.random.default_rng(0)
    cache, backlog = _idle(rows=60)
    # Blocks of four slots: the tokens in them, None where nobody may use them again.
    content: dict[int, list[float]] = {}
    running: dict[str, list[int]] = {}
    lengths: dict[str, int] = {}
    names, stamps = (f"r{n}" for n in itertools.count()), itertools.count()
    drafted = refused = shared = 0

    def slots_of(name: str) -> np.ndarray:
        slots = [4 * block + i for block in running[name] for i in range(4)]
        return np.array(slots[: lengths[name]], np.int64)

    def commit(names: list[str]) -> None:
        """One token of each request, all different."""
        slots, states = [], []
        for name in names:
            block = running[name][-1]
            slots.append(4 * block + len(content[block]))
            states.append(1000.0 + next(stamps))
            content[block].append(states[-1])
            lengths[name] += 1
        backlog.add(
            torch.tensor(states)[:, None].expand(-1, 4), torch.tensor(slots, dtype=torch.int64),
            req_ids=names, owners=np.arange(len(names)),
        )  # fmt: skip

    def add_block(name: str) -> None:
        used = {block for blocks in running.values() for block in blocks}
        block = next(b for b in rng.permutation(200).tolist() if b not in used)
        content[block] = []
        running[name].append(block)

    for _ in range(3000):
        action = rng.integers(0, 10)
        if action < 2 and len(running) < 6:
            name = next(names)
            full = [b for b, tokens in content.items() if len(tokens) == 4]
            prefix = list(rng.permutation(full)[: rng.integers(0, 3)]) if full else []
            running[name], lengths[name] = [int(b) for b in prefix], 4 * len(prefix)
            shared += bool(prefix)
            hit = slots_of(name)
            # Its own first token comes with the step that begins it.
            add_block(name)
            commit([name])
            backlog.begin(name, hit)
        elif action < 3 and running:
            name = str(rng.choice(sorted(running)))
            backlog.forget([name])
            del running[name], lengths[name]
        elif action < 8 and running:
            chosen = [name for name in running if rng.random() < 0.7]
            for name in chosen:
                if lengths[name] == 4 * len(running[name]):
                    add_block(name)
            commit(chosen)
        elif action < 9 and running:
            name = str(rng.choice(sorted(running)))
            if backlog.is_incomplete(name):
                refused += 1
                continue
            backlog.write([name])
            slots = slots_of(name).tolist()
            expected = [token for block in running[name] for token in content[block]]
            assert [cache.values[slot] for slot in slots] == expected
            drafted += 1
        else:
            backlog.set_deferred(bool(rng.integers(0, 3)))
    assert drafted > 100 and refused > 3 and shared > 50, (drafted, refused, shared)
