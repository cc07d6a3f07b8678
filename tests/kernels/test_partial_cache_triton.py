# SPDX-License-Identifier: Apache-2.0
"""Partial caches in Triton's interpreter against the readable version in torch, over pages whose
free slots hold NaN and block tables that lead nowhere past a context."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")
pytest.importorskip("vllm")

from triton.runtime.interpreter import InterpretedFunction

from scripts.gpu import partial_cache_reference as partial_cache
from vllm_specplug.drafting.device_requests import TokenHistory
from vllm_specplug.kernels import partial_cache_triton
from vllm_specplug.kernels.kv_compact_triton import LayerCaches
from vllm_specplug.vllm_worker.memory import device_partial_cache
from vllm_specplug.vllm_worker.memory.device_partial_cache import DevicePartialCache

pytestmark = pytest.mark.usefixtures("interpreter")


PAGE = 16
KERNELS = ("score_keys", "gather_chosen", "append_to_tail", "count_tokens")


class Pages:
    """Paged caches of some layers, and contexts in them."""

    def __init__(
        self, lens: list[int], *, layers: int = 1, group: int = 2, heads: int = 2, dim: int = 40,
        dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        draw = torch.Generator().manual_seed(len(lens) + dim)

        def numbers(*shape: int) -> torch.Tensor:
            # Without ties: what is chosen of equal scores is up to the top-k.
            return torch.randn(shape, generator=draw).to(dtype)

        columns = -(-max(lens) // PAGE)
        blocks = len(lens) * columns
        self.lens = torch.tensor(lens)
        self.query = numbers(len(lens) + 1, group * heads, dim)
        # As vLLM keeps them: heads before the tokens of a page.
        self.caches = [numbers(blocks, heads, PAGE, 2 * dim) for _ in range(layers)]
        self.pages = [cache.transpose(1, 2) for cache in self.caches]
        order = torch.randperm(blocks, generator=draw).view(len(lens), columns)
        self.table = torch.full((len(lens), columns), 2**30, dtype=torch.int32)
        used = torch.zeros(blocks, PAGE, dtype=torch.bool)
        for r, length in enumerate(lens):
            at = torch.arange(length)
            used[order[r, at // PAGE], at % PAGE] = True
            count = -(-length // PAGE)
            self.table[r, :count] = order[r, :count].int()
        for pages in self.pages:
            pages[~used] = float("nan")


def history_of(lens: list[int], slack: int, names: str) -> TokenHistory:
    """Of requests whose bounds are `slack` tokens away."""
    least, most = [n - slack for n in lens], [n + slack for n in lens]
    none = torch.zeros(1)
    return TokenHistory(none, none, list(names), most, [True] * len(lens), least, most)


@contextmanager
def readable_kernels() -> Iterator[None]:
    """Pools take in by the readable versions."""

    def gather(positions: Any, pages: Any, pool: Any, columns: Any, lens: Any, *rest: Any,
               **options: Any) -> None:  # fmt: skip
        partial_cache.gather_chosen(positions, pages, pool, columns, *rest, **options)

    def append_to_tail(layers: LayerCaches, *rest: Any, **options: Any) -> None:
        pairs = list(zip(layers.keys, layers.values, strict=True))
        partial_cache.append_to_tail(pairs, *rest, **options)

    replaced: dict[str, Callable[..., Any]] = {
        "score_keys": partial_cache.score_keys, "gather_chosen": gather,
        "append_to_tail": append_to_tail, "count_tokens": partial_cache.count_tokens,
    }  # fmt: skip
    with patch.multiple(partial_cache_triton, **{f"{n}_triton": f for n, f in replaced.items()}):
        yield


def drafts(made: Pages, lens: list[list[int]], *, layers: list[int] | None = None) -> list[Any]:
    """What a pool holds after each draft of requests "a", "b", ... whose contexts are `lens`,
    behind a request without a partial cache."""
    pool = DevicePartialCache(made.caches, 44, 4, 4)
    queries, held = made.query.clone(), []
    for step in lens:
        table, lens_of = made.table[[0, *range(len(step))[::-1]]], [30, *step]
        history = history_of(lens_of, 1, "zabcd"[: len(lens_of)])
        moves = pool.advance(history, torch.tensor(lens_of), range(1, len(lens_of)), table)
        for layer in range(len(made.caches)) if layers is None else layers:
            pool.choose(layer, moves, queries, torch.tensor(lens_of), table)
        held.append([pages.clone() for pages in (*pool.pages, pool.covered, pool.tails)])
        queries = queries.roll(1, -1)
    return held


# Chosen for one after the other, then grown, chosen again at once, and with one more.
LENS = [[60, 61], [62, 61], [62, 64], [99, 70], [101, 103], [103, 104, 80]]


SHAPES: list[dict[str, Any]] = [
    {"layers": 2},
    {"group": 3, "heads": 1, "dim": 64, "dtype": torch.float16},
    {"group": 1, "heads": 3, "dim": 16, "dtype": torch.bfloat16},
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("most_scores", [1 << 23, 1], ids=["at once", "one by one"])
def test_a_pool_holds_what_the_readable_one_holds(
    most_scores: int, shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_partial_cache, "_MAX_SCORES", most_scores)
    made = Pages([110, 111, 112], **shape)
    found = drafts(made, LENS)
    with readable_kernels():
        wanted = drafts(made, LENS)
    for step, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert all(torch.equal(*pair) for pair in zip(one, other, strict=True)), step
    assert any(not torch.equal(*pair) for pair in zip(found[2], found[1], strict=True))


@pytest.mark.parametrize("name", KERNELS)
def test_what_a_kernel_leaves_out_is_noticed(name: str) -> None:
    """The controls: scores of zeros, nothing written, tails that do not move."""
    made = Pages([110, 111, 112], layers=2)
    wanted = drafts(made, LENS[:3])

    def nothing(*args: Any, **options: Any) -> torch.Tensor | None:
        if name == "score_keys":
            return torch.zeros(args[2].shape[1], 2, 128)
        if name == "count_tokens":
            columns, lens, covered, tails = args
            covered[columns[2]], tails[columns[2]] = lens[columns[0]], options["budget"] - 1
        return None

    with patch.object(partial_cache_triton, f"{name}_triton", nothing):
        found = drafts(made, LENS[:3])
    assert not all(
        torch.equal(*pair)
        for steps in zip(found, wanted, strict=True)
        for pair in zip(*steps, strict=True)
    )


class Launches(TorchDispatchMode):
    """Counts operations of torch, views left out, and launches of Triton's."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.kernels = 0
        self.is_paused = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.operations += not (self.is_paused or func.is_view)
        return func(*args, **(kwargs or {}))

    def launch(self, run: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        self.kernels += 1
        self.is_paused = True
        try:
            run(*args, **kwargs)
        finally:
            self.is_paused = False


@pytest.mark.parametrize("requests", [1, 4])
@pytest.mark.parametrize("layers", [1, 3])
def test_launches_do_not_grow_with_requests(requests: int, layers: int) -> None:
    made = Pages([110] * 4, layers=layers)
    pool = DevicePartialCache(made.caches, 44, 4, 4)
    stock = InterpretedFunction.run
    counted = []
    for length in (60, 61, 64):
        lens = torch.tensor([length] * requests)
        history = history_of(lens.tolist(), 0, "abcd"[:requests])
        launches = Launches()
        with (
            launches,
            patch.object(
                InterpretedFunction, "run", lambda *a, _l=launches, **k: _l.launch(stock, *a, **k)
            ),
        ):
            moves = pool.advance(history, lens, range(requests), made.table)
            for layer in range(layers):
                pool.choose(layer, moves, made.query, lens, made.table)
        counted.append((launches.kernels, launches.operations))
    # Tokens are counted, and each layer is scored and gathered, with memory for the scores and a
    # top-k between; then all layers take in what is new.
    (chosen, operations), *grown = counted
    assert chosen == 1 + 2 * layers and operations <= 1 + 2 * layers, counted
    assert grown == [(2, grown[0][1])] * 2 and grown[0][1] <= 1, counted


def test_parts_are_as_large_as_they_may_be() -> None:
    most = [100, 10, 10, 10, 500, 10]
    with patch.object(device_partial_cache, "_MAX_SCORES", 400):
        parts = device_partial_cache._parts(most, 2)
    assert parts == [(0, 2), (2, 4), (4, 5), (5, 6)]
    assert np.concatenate([np.arange(*part) for part in parts]).tolist() == list(range(6))
