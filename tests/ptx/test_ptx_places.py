# SPDX-License-Identifier: Apache-2.0
"""Which places of small programs are redundant, and which are not."""

from __future__ import annotations

import pytest

from tests.ptx.ptx_places import Flow, kind_of, places_of

STORE, LOAD = "st.shared.b32 [%s], %v;", "ld.shared.b32 %v, [%s];"
COPY = "cp.async.ca.shared.global [%s], [%a], 4;"
COMMIT, ARRIVE = "cp.async.commit_group;", "mbarrier.arrive.shared.b64 %x, [%m], 1;"
INIT = "mbarrier.init.shared.b64 [%m], 1;"
BAR, FENCE = "bar.sync 0;", "fence.proxy.async.shared::cta;"
MULTIPLY = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%c0}, %d, %d, 1, 1, 1, 0, 0;"
PRODUCT_WAIT = "wgmma.wait_group.sync.aligned 0;"


def waits(keep: int) -> str:
    return f"cp.async.wait_group {keep};"


def flow(*lines: str) -> tuple[str, Flow]:
    body = "\n".join(lines)
    ptx = f".visible .entry kernel(\n)\n.reqntid 128\n{{\n{body}\nret;\n}}\n"
    return ptx, Flow(ptx)


def redundant(kind: str, *lines: str) -> list[int]:
    ptx, found = flow(*lines)
    return [p.number for p in places_of(ptx) if p.kind == kind and found.redundant(p)]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([STORE, BAR, LOAD, BAR, STORE], []),
        ([STORE, BAR, BAR, LOAD], [0, 1]),
        ([LOAD, BAR, LOAD], [0]),
        ([STORE, BAR], [0]),
        # What arrived is told as well as what was stored; and reads by products end with the wait.
        ([BAR, waits(0), BAR, LOAD], [0]),
        ([BAR, PRODUCT_WAIT, BAR, COPY], [0]),
        ([BAR, PRODUCT_WAIT, BAR, LOAD], [0, 1]),
        # Others than meet at the next one may be told in between.
        ([STORE, BAR, ARRIVE, BAR, LOAD], [1]),
        ([STORE, BAR, "bar.sync 1, 64;", LOAD], []),
        ([INIT, BAR, ARRIVE], []),
        # All fence behind it, or only some.
        ([STORE, BAR, FENCE, BAR, MULTIPLY], [0]),
        ([STORE, BAR, "@%p bra OVER;", FENCE, "OVER:", BAR, MULTIPLY], []),
        # Another path, and one that comes back.
        ([STORE, BAR, "@%p bra OVER;", BAR, "OVER:", LOAD], [1]),
        ([STORE, "@%p bra OVER;", BAR, "OVER:", BAR, LOAD], [0]),
        ([STORE, BAR, "@%p bra OVER;", STORE, "OVER:", BAR, LOAD], []),
        (["AGAIN:", LOAD, BAR, STORE, "@%p bra AGAIN;"], []),
        (["AGAIN:", LOAD, BAR, STORE, BAR, "@%p bra AGAIN;"], []),
        (["AGAIN:", LOAD, BAR, BAR, STORE, BAR, "@%p bra AGAIN;"], [0, 1]),
    ],
)  # fmt: skip
def test_barriers(lines: list[str], expected: list[int]) -> None:
    assert redundant("bar.sync", *lines) == expected


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([COPY, COMMIT, COPY, COMMIT, waits(0)], [0]),
        ([COPY, COMMIT, COPY, COMMIT, waits(1)], []),
        ([COPY, COMMIT, "@%p bra OVER;", COMMIT, "OVER:", waits(0)], []),
        ([COPY, COMMIT, waits(0), COMMIT, waits(0)], []),
    ],
)
def test_commits(lines: list[str], expected: list[int]) -> None:
    assert redundant("cp.async.commit_group", *lines) == expected


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([STORE, FENCE, BAR, MULTIPLY], []),
        ([STORE, FENCE, BAR, FENCE, MULTIPLY], [0, 1]),
        ([STORE, FENCE, BAR, STORE, FENCE, MULTIPLY], [0]),
        ([STORE, FENCE, "@%p bra OVER;", STORE, FENCE, "OVER:", MULTIPLY], []),
        # Warps may have ways of their own.
        ([STORE, FENCE, "bar.sync 1, 64;", FENCE, MULTIPLY], []),
    ],
)
def test_fences(lines: list[str], expected: list[int]) -> None:
    assert redundant("fence.proxy", *lines) == expected


def test_other_places_are_never_redundant() -> None:
    lines = [INIT, INIT, PRODUCT_WAIT, PRODUCT_WAIT, waits(0), waits(0)]
    ptx, found = flow(*lines)
    assert len(places_of(ptx)) == 6 and not any(map(found.redundant, places_of(ptx)))


def test_a_place_is_taken_out_alone() -> None:
    ptx, _ = flow(STORE, f"@%p {INIT}", BAR, LOAD, BAR)
    init, first, second = places_of(ptx)
    assert (init.kind, second.number) == ("mbarrier.init", 1)
    assert init.removed(ptx).count("@%p") == 0 and init.removed(ptx).count(BAR) == 2
    left = second.removed(ptx)
    assert left.index(STORE) < left.index(BAR) < left.index(LOAD) and left.count(BAR) == 1
    assert first.removed(ptx) != left
    wait = "{\nLAB_WAIT:\nmbarrier.try_wait.parity.shared.b64 P1, [%m], 0, 1;\n@P1 bra.uni DONE;\n"
    ptx, _ = flow(wait + "bra.uni LAB_WAIT;\nDONE:\n}", BAR)
    assert [place.kind for place in places_of(ptx)] == ["mbarrier.try_wait", "bar.sync"]
    assert "LAB_WAIT;" not in places_of(ptx)[0].removed(ptx)


def test_names_of_kinds() -> None:
    assert kind_of("mbarrier.arrive.expect_tx.shared.b64") == "mbarrier.arrive.expect_tx"
    assert kind_of("bar.warp.sync") == "bar.warp.sync" and kind_of("wgmma.mma_async") is None
    assert kind_of("cp.async.bulk.tensor.4d.shared::cta.global.tile.mbarrier::complete_tx") is None
