# SPDX-License-Identifier: Apache-2.0
"""Each place at which the CuTe kernels synchronise, taken out of their PTX alone.

The stepped kernel must fail and say why, in all but the places that are redundant on every path of
the code, and two that are listed with a reason.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache

import pytest

pytest.importorskip("cutlass")

from tests.ptx import cute_machine
from tests.ptx.cute_machine import BF16, MachineTrees, compiled, variant
from tests.ptx.ptx_places import KINDS, Flow, places_of
from vllm_specplug.kernels import AttnFeatures
from vllm_specplug.kernels.cute.config import ForwardConfig

# What is said where one of a kind is missing.
SAID = {
    "bar.sync": "reads what another wrote, without a barrier|what a copy brings, without|"
    "what a product reads, without",
    "bar.warp.sync": "what a copy brings, without",
    "fence.proxy": "written by the other proxy, without a fence",
    "fence.mbarrier_init": "whose set-up was not fenced",
    "mbarrier.init": "nobody has set up",
    "mbarrier.arrive": "deadlock",
    "mbarrier.arrive.expect_tx": "deadlock",
    "mbarrier.try_wait": "what a box brings, without|a copy or a box brings, without",
    "cp.async.commit_group": "what a copy brings, without",
    "cp.async.wait_group": "what a copy brings, without",
    "wgmma.fence": r"without a wgmma\.fence",
    "wgmma.commit_group": "has not waited for|what a product reads, without",
    "wgmma.wait_group": "has not waited for|what a product reads, without",
}


@dataclass(frozen=True)
class Scheme:
    specialised: bool = False
    window: int = 0
    # (kind, number) of what is not missed though the flow of control alone does not tell
    listed: frozenset[tuple[str, int]] = frozenset()

    @property
    def name(self) -> str:
        return ("specialised" if self.specialised else "turns") + " windowed" * bool(self.window)

    @property
    def config(self) -> ForwardConfig:
        return ForwardConfig(
            64, "bfloat16", 2 if self.specialised else 3, 64,
            window=bool(self.window), specialised=self.specialised,
        )  # fmt: skip

    @property
    def kinds(self) -> list[str]:
        own = [] if self.specialised else ["bar.warp.sync"]
        if not self.specialised and not self.window:
            own.append("mbarrier.arrive")
        return [kind for kind in KINDS if kind not in own]


SCHEMES = [
    Scheme(),
    Scheme(specialised=True),
    # The tile into which a window begins is its part's first. Stages but one are loaded before the
    # loop, so that the loop never comes to the arrival for it. Masks are always built here: until
    # the first barrier of that, only the warp that set mbarriers up uses them.
    Scheme(window=64 * 9 + 30, listed=frozenset({("mbarrier.arrive", 1), ("bar.sync", 1)})),
]
ROWS = [
    pytest.param(
        scheme, kind, id=f"{scheme.name}: {kind}",
        marks=[pytest.mark.smoke] * (kind == "cp.async.wait_group" and not scheme.window),
    )
    for scheme in SCHEMES
    for kind in scheme.kinds
]  # fmt: skip


@cache
def problems(window: int) -> list[tuple[MachineTrees, int]]:
    """And in how many parts: a ring that turns; blocks that look for their parts, the first of
    which have no masked tile."""
    features = AttnFeatures(window=window) if window else AttnFeatures()
    return [
        (
            MachineTrees(
                [(64 * tiles + 5, 40)], dtype=BF16, head_dim=64, group=4, page=64, features=features
            ),
            splits,
        )
        for tiles, splits in ((11, 1), (5, 2))
    ]


def complaint(scheme: Scheme) -> str | None:
    """What is said of the first problem that shows something missing."""
    for trees, splits in problems(scheme.window):
        try:
            trees.check(splits=splits, specialised=scheme.specialised)
        except (AssertionError, RuntimeError) as error:
            return str(error)
    return None


@variant(64)
@pytest.mark.parametrize(("scheme", "kind"), ROWS)
def test_each_place_alone(scheme: Scheme, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    intact = cute_machine.compiled(scheme.config)
    flow = Flow(intact.ptx)
    places = [place for place in places_of(intact.ptx) if place.kind == kind]
    assert places
    stepped: list[str] = []
    for place in places:
        without = replace(intact, ptx=place.removed(intact.ptx))

        def damaged(config, without=without):
            if config != scheme.config:
                return compiled(config)
            stepped.append(without.ptx)
            return without

        monkeypatch.setattr(cute_machine, "compiled", damaged)
        said = complaint(scheme)
        assert stepped.pop() == without.ptx
        if flow.redundant(place) or (kind, place.number) in scheme.listed:
            assert said is None
        else:
            assert said is not None, f"{place} is not missed"
            assert re.search(SAID[kind], said), said
