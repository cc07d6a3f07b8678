# SPDX-License-Identifier: Apache-2.0
"""Each barrier and proxy fence of Triton's attention kernel, taken out of its PTX alone.

Triton puts them where its analysis asks for them, which is in more places
than need one: those must be redundant on every path of the code, or listed here with a reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

pytest.importorskip("triton")

import torch
import triton

from tests.kernels.device_trees import DeviceTrees
from tests.ptx.ptx_machine import Timing
from tests.ptx.ptx_places import Flow, Place, places_of
from tests.ptx.triton_compiler import Compiler
from tests.ptx.triton_machine import Stepped, stepped

pytestmark = [pytest.mark.usefixtures("interpreter"), pytest.mark.xdist_group("triton_ptx")]

READ_FOR = "3.7.1"
SAID = "without a "
KERNEL = "_tree_attn_kernel"
KINDS = ("bar.sync", "fence.proxy")
# (kind, number) of places that are not missed, and why not; of Triton READ_FOR.
# A tree has a row at least, so that the part over the tree's own columns is always reached.
LISTED = {
    ("bar.sync", 4): "what is stored next lies, thread by thread, where the same thread's copies "
    "lay, which it has waited for; products that read it were waited for before the loop's barrier",
    ("bar.sync", 11): "since the last barrier, behind the tree's columns, nobody read or wrote",
}


@pytest.fixture(scope="module")
def compiler() -> Iterator[Compiler]:
    made = Compiler()
    yield made
    made.close()


def complaint(problem: DeviceTrees) -> str | None:
    try:
        problem.check(splits=1)
    except (AssertionError, RuntimeError) as error:
        return str(error)
    return None


@pytest.mark.skipif(triton.__version__ != READ_FOR, reason="places were read for another Triton")
@pytest.mark.parametrize("kind", KINDS)
def test_each_place_alone(kind: str, compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    specs = [(300, 8), (70, 20), (3, 0), (64, 5), (200, 66)]
    problem = DeviceTrees(specs, dtype=torch.bfloat16, head_dim=64, group=4)
    seen: set[str] = set()

    def see(ptx: str) -> str:
        if KERNEL in ptx:
            seen.add(ptx)
        return ptx

    with stepped(monkeypatch, compiler, 90, Timing()) as machine:
        machine.damage = see
        assert complaint(problem) is None
        (intact,) = seen
        flow = Flow(intact)
        places = [place for place in places_of(intact) if place.kind == kind]
        assert places
        for place in places:
            if flow.redundant(place):
                continue
            said = _without(machine, place, problem)
            if (kind, place.number) in LISTED:
                assert said is None
            else:
                assert said is not None, f"{place} is not missed"
                assert re.search(SAID, said), said


def _without(machine: Stepped, place: Place, problem: DeviceTrees) -> str | None:
    machine.damage = lambda ptx: place.removed(ptx) if KERNEL in ptx else ptx
    return complaint(problem)
