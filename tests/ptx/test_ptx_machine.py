# SPDX-License-Identifier: Apache-2.0
"""The PTX machine's instructions against numpy and torch, and what it must not let pass."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ptx.ptx_machine import Machine, Timing
from tests.ptx.ptx_memory import GlobalMemory

LATE, EARLY = Timing(), Timing(eager_copies=True, eager_products=False)


def run(body: str, inputs: np.ndarray, width: int, *, threads: int = 32, shared: int = 4096,
        timing: Timing = LATE) -> np.ndarray:  # fmt: skip
    """[threads, width] words that `body` leaves in %o0 to %o<width - 1>, given the thread's own
    words of `inputs` [threads, n] in %i0 to %i<n - 1>, its number in %t and its input's address
    in %a."""
    count = inputs.shape[1]
    given = "\n".join(f"ld.global.b32 %i{i}, [%a+{4 * i}];" for i in range(count))
    taken = "\n".join(f"st.global.b32 [%b+{4 * i}], %o{i};" for i in range(width))
    ptx = f""".version 8.7
.visible .entry kernel(
    .param .u64 .ptr .global .align 1 kernel_param_0,
    .param .u64 .ptr .global .align 1 kernel_param_1
)
.reqntid {threads}
{{
    ld.param.b64 %rd0, [kernel_param_0];
    ld.param.b64 %rd1, [kernel_param_1];
    mov.u32 %t, %tid.x;
    mad.wide.u32 %a, %t, {4 * count}, %rd0;
    mad.wide.u32 %b, %t, {4 * width}, %rd1;
    {given}
    {body}
    {taken}
    ret;
}}
"""
    memory = GlobalMemory(1 << 16)
    output = np.zeros((threads, width), np.uint32)
    addresses = [memory.put(inputs.astype(inputs.dtype, copy=False)), memory.put(output)]
    Machine(ptx, memory, shared, timing).launch((1, 1, 1), addresses)
    return memory.get(addresses[1], output.shape, np.uint32)


def words(count: int, seed: int = 0, threads: int = 32) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**32, (threads, count), dtype=np.uint32)


def test_subnormal_numbers_are_flushed_where_the_instruction_says_so() -> None:
    given = np.full((32, 2), -140.0, np.float32)
    given[:, 1] = 2.0**-130
    body = """ex2.approx.ftz.f32 %o0, %i0;
    ex2.approx.f32 %o1, %i0;
    fma.rn.ftz.f32 %o2, %i1, 0f3F800000, 0f00000000;
    fma.rn.f32 %o3, %i1, 0f3F800000, 0f00000000;"""
    found = run(body, given, 4).view(np.float32)[0]
    assert found.tolist() == [0.0, 2.0**-140, 0.0, 2.0**-130]


@pytest.mark.parametrize("timing", [LATE, EARLY])
def test_small_copies_and_those_of_nothing(timing: Timing) -> None:
    given = words(4)
    body = """shl.b32 %s, %t, 4;
    mov.b32 %base, __dynamic_shmem__0;
    add.s32 %s, %s, %base;
    setp.lt.u32 %p, %t, 16;
    selp.b32 %n, 8, 0, %p;
    st.shared.b64 [%s+8], 7;
    cp.async.ca.shared.global [ %s + 0 ], [ %a + 8 ], 0x8, %n;
    @%p cp.async.ca.shared.global [ %s + 8 ], [ %a + 0 ], 0x4;
    cp.async.commit_group;
    cp.async.wait_group 0;
    ld.shared.v4.b32 {%o0, %o1, %o2, %o3}, [%s];"""
    found = run(body, given, 4, timing=timing)
    half = np.arange(32)[:, None] < 16
    assert (found[:, :2] == np.where(half, given[:, 2:4], 0)).all()
    assert (
        found[:, 2:] == np.where(half, np.stack([given[:, 0], 0 * given[:, 0]], 1), [7, 0])
    ).all()


def test_what_a_thread_did_not_load_is_poison() -> None:
    given = words(1)
    body = """setp.eq.b32 %p, %t, 3;
    @%p ld.global.b32 %o0, [%a];
    setp.eq.b32 %q, %t, 99;
    @%q ld.global.b32 %o1, [%a];"""
    found = run(body, given, 2)
    assert found[3, 0] == given[3, 0]
    assert (np.delete(found[:, 0], 3) == 0xFFFFFFFF).all() and (found[:, 1] == 0xFFFFFFFF).all()
    with pytest.raises(AssertionError, match="before anything was written"):
        run("mov.b32 %o0, %nothing;", given, 1)


# Thread t of 64 hands a word to thread 63 - t, in the other warp.
_EXCHANGE = """shl.b32 %s, %t, 2;
    mov.b32 %base, __dynamic_shmem__0;
    add.s32 %s, %s, %base;
    st.shared.b32 [%s], %i0;
    bar.sync 0;
    sub.s32 %u, 63, %t;
    shl.b32 %u, %u, 2;
    add.s32 %u, %u, %base;
    ld.shared.b32 %o0, [%u];
    bar.sync 0;
    st.shared.b32 [%s], 5;"""


def test_warps_that_do_not_wait_for_each_other_are_noticed() -> None:
    given = words(1, threads=64)
    found = run(_EXCHANGE, given, 1, threads=64)
    assert (found[:, 0] == given[::-1, 0]).all()
    first, second, third = _EXCHANGE.split("bar.sync 0;")
    with pytest.raises(AssertionError, match="reads what another wrote"):
        run(f"{first}{second}bar.sync 0;{third}", given, 1, threads=64)
    with pytest.raises(AssertionError, match="overwrites what another reads"):
        run(f"{first}bar.sync 0;{second}{third}", given, 1, threads=64)
    # One warp does so in order.
    run(_EXCHANGE.replace("bar.sync 0;", "").replace("63", "31"), given[:32], 1)


def test_warps_may_write_the_same() -> None:
    body = """and.b32 %s, %t, 31;
    shl.b32 %s, %s, 2;
    mov.b32 %base, __dynamic_shmem__0;
    add.s32 %s, %s, %base;
    st.shared.b32 [%s], {value};
    bar.sync 0;
    ld.shared.b32 %o0, [%s];"""
    given = words(1, threads=64)
    assert (run(body.replace("{value}", "9"), given, 1, threads=64) == 9).all()
    with pytest.raises(AssertionError, match="overwrites"):
        run(body.replace("{value}", "%t"), given, 1, threads=64)


# Warp 0 of 5 hands words to warp 4, between {told} and {heard}; the others do nothing.
_HANDOVER = """mov.b32 %base, __dynamic_shmem__0;
    add.s32 %m, %base, 1024;
    setp.eq.u32 %first, %t, 0;
    @%first mbarrier.init.shared.b64 [%m], 1;
    fence.mbarrier_init.release.cluster;
    bar.sync 0;
    mov.b32 %o0, 0;
    and.b32 %s, %t, 31;
    shl.b32 %s, %s, 2;
    add.s32 %s, %s, %base;
    setp.ge.u32 %last, %t, 128;
    @%last bra TAKE;
    setp.ge.u32 %idle, %t, 32;
    @%idle bra END;
    st.shared.b32 [%s], %i0;
    {told}
    bra END;
    TAKE:
    {heard}
    ld.shared.b32 %o0, [%s];
    END:"""
_ARRIVE_ALONE = "@%first mbarrier.arrive.shared.b64 %state, [%m], 1;"
# One lane tells what all lanes of its warp have done.
_ARRIVE = f"bar.warp.sync -1;\n{_ARRIVE_ALONE}"
_WAIT = """{
    LAB_WAIT:
    mbarrier.try_wait.parity.shared.b64 P1, [%m], 0, 10000000;
    @P1 bra.uni DONE;
    bra.uni LAB_WAIT;
    DONE:
    }"""


@pytest.mark.parametrize(
    ("told", "heard"), [(_ARRIVE, _WAIT), ("bar.sync 1, 64;", "bar.sync 1, 64;")]
)
def test_some_warps_meet_at_barriers_of_their_own(told: str, heard: str) -> None:
    given = words(1, threads=160)
    for timing in (LATE, Timing(reverse_warpgroups=True)):
        body = _HANDOVER.format(told=told, heard=heard)
        found = run(body, given, 1, threads=160, timing=timing)
        assert (found[128:] == given[:32]).all() and (found[:128] == 0).all()
    with pytest.raises(AssertionError, match="reads what another wrote"):
        run(_HANDOVER.format(told=_ARRIVE, heard=""), given, 1, threads=160)
    with pytest.raises(RuntimeError, match="deadlock"):
        run(_HANDOVER.format(told="", heard=heard), given, 1, threads=160)
    with pytest.raises(AssertionError, match="reads what another wrote"):
        run(_HANDOVER.format(told=_ARRIVE_ALONE, heard=_WAIT), given, 1, threads=160)


def test_an_mbarrier_is_used_by_those_who_know_it_is_there() -> None:
    body = _HANDOVER.format(told=_ARRIVE, heard=_WAIT).replace("bar.sync 0;", "")
    with pytest.raises(AssertionError, match="reads what another wrote"):
        run(body, words(1, threads=160), 1, threads=160)


def test_a_small_copy_is_known_to_others_once_it_was_waited_for() -> None:
    """To wait and then to tell is in order; the other way round it is not, whenever it lands."""
    copy, wait = (
        "cp.async.ca.shared.global [%s], [%a], 4;\ncp.async.commit_group;",
        ("cp.async.wait_group 0;"),
    )
    given = words(1, threads=160)
    body = _HANDOVER.replace("st.shared.b32 [%s], %i0;", copy)
    # Groups of copies are counted for a whole warpgroup.
    body = body.replace("setp.ge.u32 %idle, %t, 32;\n    @%idle bra END;", "")
    body = body.replace("and.b32 %s, %t, 31;", "and.b32 %s, %t, 127;")
    meet = "bar.sync 1, 160;"
    for timing in (LATE, EARLY):
        found = run(
            body.format(told=wait + "\n" + meet, heard=meet), given, 1, threads=160, timing=timing
        )
        assert (found[128:] == given[:32]).all()
        with pytest.raises(AssertionError, match="reads what a copy brings"):
            run(
                body.format(told=meet + "\n" + wait, heard=meet), given, 1, threads=160,
                timing=timing,
            )  # fmt: skip


# A warpgroup multiplies zeros: sums of 8 columns in %o0 to %o3, that begin as 1.
_SUMS = "{%o0, %o1, %o2, %o3}"
_MULTIPLY = f"wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {_SUMS}, %d, %d, 1, 1, 1, 0, 0;"
_OF_REGISTERS = _MULTIPLY.replace("%d, %d", "{%f0, %f1, %f2, %f3}, %d").replace("0, 0;", "0;")
_ONES = "\n".join(f"mov.b32 %o{i}, 0f3F800000;\nmov.b32 %f{i}, 0;" for i in range(4))
_FENCE, _COMMIT = "wgmma.fence.sync.aligned;", "wgmma.commit_group.sync.aligned;"
_AWAIT = "wgmma.wait_group.sync.aligned 0;"


def _multiply(steps: list[str], timing: Timing) -> np.ndarray:
    # Descriptors of K-major rows of 32 bytes, 256 to a group of eight, from the first byte on.
    place = (1024 >> 4) | (1 << 16) | (16 << 32) | (3 << 62)
    zero = """shl.b32 %s, %t, 4;
    mov.b32 %base, __dynamic_shmem__0;
    add.s32 %s, %s, %base;
    st.shared.v4.b32 [%s], {0, 0, 0, 0};
    fence.proxy.async.shared::cta;
    bar.sync 0;"""
    body = "\n".join([zero, _ONES, f"mov.b64 %d, {place};", *steps])
    found = run(body, words(1, threads=128), 4, threads=128, timing=timing)
    return np.ascontiguousarray(found).view(np.float32)


@pytest.mark.parametrize("timing", [LATE, EARLY])
def test_products_and_warps_share_registers_in_turns(timing: Timing) -> None:
    for multiply in (_MULTIPLY, _OF_REGISTERS):
        once = [_FENCE, multiply, multiply, _COMMIT, _AWAIT]
        again = ["add.f32 %o1, %o1, %o1;", _FENCE, multiply, _COMMIT, _AWAIT]
        assert (_multiply(once + again, timing) == [1, 2, 1, 1]).all()
        with pytest.raises(AssertionError, match=r"first product.*without a wgmma\.fence"):
            _multiply(once[1:], timing)
        # Whether the warps write a register or read it.
        for touch in ("add.f32 %o1, %o1, %o1;", "mov.b32 %x, %o2;"):
            with pytest.raises(AssertionError, match=r"touched, without a wgmma\.fence"):
                _multiply([*once, touch, *again[2:]], timing)
            # Before the wait, or with one that is of no group.
            for late in ([*once[:-1], touch, _AWAIT], [*once[:3], _AWAIT, touch, _COMMIT, _AWAIT]):
                if touch.startswith("mov") and late[-3] == _COMMIT:
                    # The new name of a sum is as little to be read.
                    late.insert(-1, "add.f32 %x, %x, %x;")
                with pytest.raises(AssertionError, match="has not waited for"):
                    _multiply(late, timing)


@pytest.mark.parametrize("timing", [LATE, EARLY])
def test_a_factor_is_kept_until_its_product_is_waited_for(timing: Timing) -> None:
    steps = [_FENCE, _OF_REGISTERS, _COMMIT, "mov.b32 %f2, 7;", _AWAIT]
    with pytest.raises(AssertionError, match="has not waited for"):
        _multiply(steps, timing)
    steps[3:] = [_AWAIT, "mov.b32 %f2, 7;", _OF_REGISTERS, _COMMIT, _AWAIT]
    with pytest.raises(AssertionError, match=r"touched, without a wgmma\.fence"):
        _multiply(steps, timing)


@pytest.mark.parametrize("timing", [LATE, EARLY])
def test_a_sum_becomes_a_factor_after_a_wait_and_a_fence(timing: Timing) -> None:
    other = _OF_REGISTERS.replace(_SUMS, "{%g0, %g1, %g2, %g3}")
    other = other.replace("{%f0, %f1, %f2, %f3}", _SUMS)
    given = "\n".join(f"mov.b32 %g{i}, 0;" for i in range(4))
    steps = [given, _FENCE, _MULTIPLY, _COMMIT, _AWAIT, _FENCE, other, _COMMIT, _AWAIT]
    assert (_multiply(steps, timing) == 1).all()
    for left_out in (4, 5):
        with pytest.raises(AssertionError, match="two kinds"):
            _multiply([*steps[:left_out], *steps[left_out + 1 :]], timing)
