# SPDX-License-Identifier: Apache-2.0
"""Tensor parallel ranks together attend the target's caches as one rank does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.dense_trees import DenseTarget
from vllm_specplug.drafting.abilities import TargetCaches
from vllm_specplug.drafting.caches import TargetCacheSpec
from vllm_specplug.vllm_worker.memory import rank_caches
from vllm_specplug.vllm_worker.memory.rank_caches import RankTargetCache, bind_target_caches

DIM, LENGTHS = 8, [9, 4]
OWNERS = torch.tensor([0, 0, 0, 1, 1])


class OwnBeam(TargetCaches):
    """A drafter of another package, which chooses rows by its own values."""


class Ranks:
    """All ranks in this process. An all-gather first collects the part of each rank, and then
    returns what is collected."""

    def __init__(self, num_ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_ranks, self.rank = num_ranks, 0
        self.parts: list[torch.Tensor] = []
        self.order = list(range(num_ranks))
        prefix = "get_tensor_model_parallel"
        monkeypatch.setattr(rank_caches, f"{prefix}_rank", lambda: self.rank)
        monkeypatch.setattr(rank_caches, f"{prefix}_world_size", lambda: num_ranks)
        monkeypatch.setattr(rank_caches, "tensor_model_parallel_all_gather", self.gather)

    def gather(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        assert part.is_contiguous()
        if len(self.parts) < self.num_ranks:
            self.parts.append(part)
            return torch.cat([part] * self.num_ranks, dim)
        return torch.cat([self.parts[rank] for rank in self.order], dim)

    def attend(
        self, caches: list[tuple[torch.Tensor, torch.Tensor]], query: torch.Tensor
    ) -> list[torch.Tensor]:
        """The output on each rank. vLLM gives neighbouring ranks a copy of one KV head if there
        are fewer KV heads than ranks."""
        kv_heads = caches[0][0].shape[1]
        copies, own = max(1, self.num_ranks // kv_heads), max(1, kv_heads // self.num_ranks)
        attends = []
        for rank in range(self.num_ranks):
            self.rank, first = rank, rank // copies * own
            parts = [(k[:, first : first + own], v[:, first : first + own]) for k, v in caches]
            attends.append(attention(RankTargetCache(dense(parts))))
        for attend in attends:
            attend(query)
        return [attend(query) for attend in attends]


def dense(caches: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    spec = TargetCacheSpec(caches[0][0].shape[1], DIM, DIM**-0.5)
    return DenseTarget(caches, spec, on_device=False)


def attention(cache: Any) -> Any:
    requests: Any = SimpleNamespace(req_indices=[0, 1])
    return cache.level_attention(requests, torch.tensor(LENGTHS), OWNERS)


def made(heads: int, kv_heads: int) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], torch.Tensor]:
    torch.manual_seed(1)
    caches = [(torch.randn(n, kv_heads, DIM), torch.randn(n, kv_heads, DIM)) for n in LENGTHS]
    return caches, torch.randn(len(OWNERS), heads, DIM)


# Parts of several KV heads, of one, of copies that divide the query heads of one, and of copies
# that compute the same query heads.
@pytest.mark.parametrize(
    ("heads", "kv_heads", "num_ranks"),
    [(8, 4, 2), (9, 3, 3), (8, 2, 4), (2, 1, 2), (6, 2, 4), (4, 1, 8), (3, 1, 2)],
)
def test_every_rank_gets_all_heads(
    heads: int, kv_heads: int, num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches, query = made(heads, kv_heads)
    ranks = Ranks(num_ranks, monkeypatch)
    outputs = ranks.attend(caches, query)
    expected = attention(dense(caches))(query)
    for output in outputs:
        torch.testing.assert_close(output, expected)
        assert torch.equal(output, outputs[0])
    # One all-gather per call, of no more than a rank's share if that divides the heads.
    assert len(ranks.parts) == num_ranks
    if heads % num_ranks == 0:
        assert {part.shape[1] for part in ranks.parts} == {heads // num_ranks}


def test_heads_in_another_order_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    caches, query = made(8, 4)
    ranks = Ranks(2, monkeypatch)
    ranks.order = [1, 0]
    with pytest.raises(AssertionError):
        torch.testing.assert_close(ranks.attend(caches, query)[0], attention(dense(caches))(query))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_layers_of_one_kind_keep_one_cache(num_ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`first_rank` is set only with several ranks."""
    Ranks(num_ranks, monkeypatch)
    specs = [TargetCacheSpec(2, DIM, 1.0, window) for window in (None, 16)]
    bound: list[Any] = []
    drafter: Any = SimpleNamespace(
        target_cache_specs=lambda: [specs[0], specs[0], specs[1]],
        bind_target_caches=bound.extend, first_rank=None, follows_first_rank=True,
    )  # fmt: skip
    caches: dict[TargetCacheSpec, Any] = {spec: SimpleNamespace(spec=spec) for spec in specs}
    bind_target_caches(drafter, caches)
    assert bound[0] is bound[1] and bound[0] is not bound[2]
    own = [getattr(cache, "own", cache).spec for cache in bound]
    assert own == drafter.target_cache_specs()
    assert (drafter.first_rank is not None) == (num_ranks > 1)
    assert (bound[0] is caches[specs[0]]) == (num_ranks == 1)


def test_drafters_whose_rows_differ_between_ranks_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Ranks(2, monkeypatch)
    with pytest.raises(ValueError, match="tensor_parallel_size=2 cannot be used with OwnBeam"):
        bind_target_caches(OwnBeam(), {})
