# SPDX-License-Identifier: Apache-2.0
"""Products with packed weights: right for every shape, and the same in any company."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conftest import use_isa
from tests.kernels.paged import num_threads
from vllm_specplug.kernels.extension import ISAS, allowed_isas, supported_isas
from vllm_specplug.kernels.packed_linear import (
    PackedInt8,
    can_pack,
    has_packed_int8_products,
    pack_int4,
    pack_int8,
    pack_linear,
    packed_int4_linear,
    packed_int8_linear,
    packed_isa,
    packed_linear,
    packs_target,
)


def _skip_below(isa: str) -> None:
    if isa not in allowed_isas():
        pytest.skip(f"this CPU has no {isa}")


@pytest.fixture(params=["avx2", "avx512", "avx512_bf16"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """The instruction set of the products."""
    _skip_below(request.param)
    use_isa(request.param)
    assert packed_isa() == request.param
    yield request.param
    use_isa(None)


def _skip_without_int8() -> None:
    _skip_below("avx512")
    if not torch.ops.specplug.has_int8_products():
        pytest.skip("this CPU has no avx512_vnni")


@pytest.fixture
def int8_products() -> None:
    _skip_without_int8()


# Blocks of rows change at 3, 6, 12, 14, 64 and 96, the cache's part of them ends at 126 or 512.
ROWS = (*range(1, 8), *range(12, 17), 24, 28, 29, 64, 95, 96, 97, 125, 126, 127, 128, 511, 513)


def _case(columns: int, depth: int, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(columns * depth + rows)
    weight = (torch.randn(columns, depth) / depth**0.5).bfloat16()
    return weight, torch.randn(rows, depth).bfloat16(), torch.randn(columns).bfloat16()


def _assert_rounded_once(found: torch.Tensor, exact: torch.Tensor, lost: float = 1e-5) -> None:
    """Raises unless it differs by at most half a unit in the last place of bfloat16 and what
    float32 sums have lost on the way."""
    error = (found.double() - exact).abs()
    assert bool((error <= exact.abs() * 2.0**-8 * 1.01 + lost).all()), float(error.max())


@pytest.mark.parametrize("columns", [32, 33, 48, 63, 64, 96, 130, 576])
def test_equals_exact_products_rounded_once(isa: str, columns: int) -> None:
    for depth in (2, 4, 6, 10, 64, 150):
        weight, x, bias = _case(columns, depth, ROWS[-1])
        packed, exact = pack_linear(weight), x.double() @ weight.double().T
        for rows in ROWS:
            _assert_rounded_once(packed_linear(x[:rows], packed, columns), exact[:rows])
            found = packed_linear(x[:rows], packed, columns, bias)
            _assert_rounded_once(found, exact[:rows] + bias.double())


@pytest.mark.parametrize("depth", [768, 770, 1536, 2308])
def test_rows_longer_than_a_piece(isa: str, depth: int) -> None:
    weight, x, bias = _case(80, depth, 513)
    packed, exact = pack_linear(weight), x.double() @ weight.double().T + bias.double()
    whole = packed_linear(x, packed, 80, bias)
    _assert_rounded_once(whole, exact)
    # Rows a multiple of a page apart.
    apart = torch.zeros(513, -(-depth // 2048) * 2048, dtype=torch.bfloat16)
    apart[:, :depth] = x
    for rows in (1, 2, 3, 8, 14, 15, 28, 33, 64, 65, 96, 513):
        assert torch.equal(packed_linear(x[:rows], packed, 80, bias), whole[:rows])
        assert torch.equal(packed_linear(apart[:rows, :depth], packed, 80, bias), whole[:rows])


@pytest.mark.parametrize("name", ["avx2", "avx512", "avx512_bf16"])
@given(
    columns=st.integers(32, 100),
    pairs=st.integers(1, 450),
    exponents=st.sampled_from((1, 15, 16, 17, 40, 250)),
    seed=st.integers(0, 1 << 16),
)
@settings(max_examples=60, deadline=None)
def test_weights_are_kept_bit_for_bit(
    name: str, columns: int, pairs: int, exponents: int, seed: int
) -> None:
    """Blocks with few exponents, which are compressed, and with many, which are not."""
    _skip_below(name)
    use_isa(name)
    generator = torch.Generator().manual_seed(seed)
    shape = (columns, 2 * pairs)
    # Exponents of their own for every 100 columns of depth.
    bases = torch.randint(1, 255 - exponents, (-(-2 * pairs // 100),), generator=generator)
    exponent = bases.repeat_interleave(100)[: 2 * pairs] + torch.randint(
        0, exponents, shape, generator=generator
    )
    sign, mantissa = (torch.randint(0, n, shape, generator=generator) for n in (2, 128))
    bits = sign << 15 | exponent << 7 | mantissa
    bits[torch.rand(shape, generator=generator) < 0.01] = 0
    weight = (bits - (bits >> 15 << 16)).to(torch.int16).view(torch.bfloat16)
    packed = pack_linear(weight)
    # A row with a single 1 finds a column of the weight.
    ones = torch.eye(2 * pairs, dtype=torch.bfloat16)
    assert torch.equal(packed_linear(ones, packed, columns), weight.T)
    use_isa(None)


def test_weights_of_models_take_three_quarters() -> None:
    """And those without a common exponent what they took."""
    _skip_below("avx512")
    weight = (torch.randn(640, 1536) * 0.04).bfloat16()
    assert 0.75 < pack_linear(weight).nbytes / weight.nbytes < 0.77
    bits = torch.randint(-(1 << 15), 1 << 15, (640, 1536), dtype=torch.int16)
    assert 1.0 < pack_linear(bits.view(torch.bfloat16)).nbytes / weight.nbytes < 1.02


def _int8_case(
    columns: int, depth: int, rows: int
) -> tuple[PackedInt8, torch.Tensor, torch.Tensor]:
    """A packed weight, rows, and their exact products after both are rounded to int8."""
    torch.manual_seed(columns * depth + rows)
    rounded = torch.randint(-127, 128, (columns, depth), dtype=torch.int8)
    scales = torch.rand(columns) + 0.01
    magnitudes = torch.logspace(-3, 3, rows)[torch.randperm(rows)]
    x = (torch.randn(rows, depth) * magnitudes[:, None]).bfloat16()
    x[3] = 0
    row_scales = x.float().abs().amax(dim=1, keepdim=True) / 127
    inverse = torch.where(row_scales > 0, 1 / row_scales, 0.0)
    of_rows = (x.float() * inverse).round().clamp(-127, 127)
    exact = of_rows.double() @ rounded.double().T * scales.double() * row_scales.double()
    return pack_int8(rounded, scales), x, exact


@pytest.mark.parametrize("columns", [1, 31, 32, 33, 64, 130])
@pytest.mark.parametrize("depth", [1, 3, 4, 15, 16, 17, 64, 576])
def test_int8_products_are_exact_but_for_one_rounding(
    int8_products: None, columns: int, depth: int
) -> None:
    packed, x, exact = _int8_case(columns, depth, ROWS[-1])
    bias = torch.randn(columns).bfloat16()
    for rows in ROWS:
        found, lost = packed_int8_linear(x[:rows], packed), 1e-6 * float(exact[:rows].abs().max())
        _assert_rounded_once(found, exact[:rows], lost)
        assert not found[3:4].any()
        found = packed_int8_linear(x[:rows], packed, bias)
        _assert_rounded_once(found, exact[:rows] + bias.double(), 1e-4 + lost)


def test_int8_extremes_do_not_saturate(int8_products: None) -> None:
    """All products of one sign, over more than 16 bits of them."""
    for value in (-127, 127):
        packed = pack_int8(torch.full((40, 4096), value, dtype=torch.int8), torch.ones(40))
        x = torch.ones(3, 4096).bfloat16()
        assert torch.equal(
            packed_int8_linear(x, packed), torch.full((3, 40), 4096.0 * value).bfloat16()
        )
        assert torch.equal(
            packed_int8_linear(-x, packed), torch.full((3, 40), -4096.0 * value).bfloat16()
        )


def test_a_weight_that_does_not_lie_together(isa: str) -> None:
    weight, x, _ = _case(40, 16, 12)
    apart = pack_linear(weight.T.contiguous().T)
    assert torch.equal(packed_linear(x, apart, 40), packed_linear(x, pack_linear(weight), 40))


# -- weights of 4 bits ---------------------------------------------------------------------

INT4_ISAS = pytest.mark.parametrize("isa", ["avx512", "avx512_bf16"], indirect=True)
# Blocks of rows change at 3, 7, 8, 13 and 15; more rows are split evenly, in parts of 512.
INT4_ROWS = (0, 1, 2, 3, 6, 7, 8, 12, 13, 14, 15, 29, 40, 130, 515)


def _int4_case(
    columns: int, depth: int, group_size: int, has_zeros: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Codes, scales, zero points, and the weight in float64."""
    torch.manual_seed(columns * depth)
    shape = (columns, depth // group_size)
    codes = torch.randint(0, 16, (columns, depth), dtype=torch.uint8)
    scales = (torch.rand(shape) / depth**0.5).bfloat16()
    zeros = torch.randint(-8, 8, shape).bfloat16() if has_zeros else None
    shift = 8.0 if zeros is None else 8.0 + zeros.double().repeat_interleave(group_size, 1)
    return codes, scales, zeros, (codes - shift) * scales.double().repeat_interleave(group_size, 1)


@INT4_ISAS
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize(
    ("columns", "depth", "group_size"),
    [(32, 32, 32), (33, 64, 8), (100, 576, 32), (64, 1024, 128), (130, 96, 96), (16, 48, 24)],
)
def test_int4_products_are_exact_but_for_one_rounding(
    isa: str, columns: int, depth: int, group_size: int, has_zeros: bool
) -> None:
    codes, scales, zeros, weight = _int4_case(columns, depth, group_size, has_zeros)
    packed, bias = pack_int4(codes, scales, zeros), torch.randn(columns).bfloat16()
    x = torch.randn(INT4_ROWS[-1], depth).bfloat16()
    exact = x.double() @ weight.T
    for rows in INT4_ROWS:
        _assert_rounded_once(packed_int4_linear(x[:rows], packed), exact[:rows], 3e-5)
        found = packed_int4_linear(x[:rows], packed, bias)
        _assert_rounded_once(found, exact[:rows] + bias.double(), 3e-5)


@INT4_ISAS
@pytest.mark.parametrize("has_zeros", [False, True])
def test_unit_vectors_read_an_int4_weight(isa: str, has_zeros: bool) -> None:
    codes, scales, zeros, weight = _int4_case(100, 576, 32, has_zeros)
    packed = pack_int4(codes, scales, zeros)
    found = packed_int4_linear(torch.eye(576, dtype=torch.bfloat16), packed)
    assert torch.equal(found, weight.T.float().bfloat16())


@INT4_ISAS
def test_what_does_not_fit_int4_products_is_refused(isa: str) -> None:
    codes, scales, zeros, _ = _int4_case(64, 64, 32, True)
    packed, x = pack_int4(codes, scales, zeros), torch.randn(2, 64).bfloat16()
    for wrong, message in (
        ((codes.int(), scales, zeros), "codes must be"),
        ((codes, scales.float(), zeros), "scales contiguous bfloat16"),
        ((codes, scales, zeros[:, :1].contiguous()), "zeros must be"),  # type: ignore[index]
        ((codes[:, :24].contiguous(), scales, zeros), "multiple of 8"),
        ((codes, scales.repeat(1, 2)[:, :3].contiguous(), None), "divide K"),
    ):
        with pytest.raises(RuntimeError, match=message):
            pack_int4(*wrong)
    with pytest.raises(RuntimeError, match="x must be bfloat16"):
        packed_int4_linear(x.float(), packed)
    with pytest.raises(RuntimeError, match=r"made of a weight \[64, 32\]"):
        packed_int4_linear(x[:, :32], packed)
    with pytest.raises(RuntimeError, match="bias must be"):
        packed_int4_linear(x, packed, torch.zeros(60).bfloat16())
    use_isa("avx2")
    with pytest.raises(RuntimeError, match="AVX-512"):
        packed_int4_linear(x, packed)


# -- rows of every kind of product ---------------------------------------------------------

# A form of the weight, and an instruction set.
KINDS = [
    ("bf16", "avx2"),
    ("int8", "avx512"),
    *itertools.product(("bf16", "int4", "int4 with zeros"), ("avx512", "avx512_bf16")),
]


@pytest.fixture(params=KINDS, ids=" ".join)
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    form, isa = request.param
    _skip_below(isa)
    if form == "int8":
        _skip_without_int8()
    use_isa(isa)
    yield form
    use_isa(None)


def product(kind: str, columns: int, depth: int) -> Callable[[torch.Tensor], torch.Tensor]:
    torch.manual_seed(columns * depth)
    if kind == "int8":
        rounded = torch.randint(-127, 128, (columns, depth), dtype=torch.int8)
        int8 = pack_int8(rounded, torch.rand(columns) + 0.01)
        return lambda x: packed_int8_linear(x, int8)
    if kind.startswith("int4"):
        codes = torch.randint(0, 16, (columns, depth), dtype=torch.uint8)
        scales = torch.rand(columns, depth // 8).bfloat16()
        zeros = torch.randint(-8, 8, scales.shape).bfloat16() if "zeros" in kind else None
        int4 = pack_int4(codes, scales, zeros)
        return lambda x: packed_int4_linear(x, int4)
    packed = pack_linear((torch.randn(columns, depth) / depth**0.5).bfloat16())
    return lambda x: packed_linear(x, packed, columns)


@given(columns=st.integers(32, 200), n=st.integers(1, 90), rows=st.integers(1, 140), data=st.data())
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_row_is_the_same_in_any_company(
    kind: str, columns: int, n: int, rows: int, data: st.DataObject
) -> None:
    depth = {"int8": 1, "bf16": 2}.get(kind, 8) * n
    run, x = product(kind, columns, depth), torch.randn(rows, depth).bfloat16()
    first = data.draw(st.integers(0, rows - 1))
    last = data.draw(st.integers(first + 1, rows))
    assert torch.equal(run(x[first:last]), run(x)[first:last])


def test_rows_lie_anywhere_and_threads_change_nothing(kind: str) -> None:
    run, x = product(kind, 300, 192), torch.randn(60, 192).bfloat16()
    together = run(x)
    assert run(x[:0]).shape == (0, 300)
    assert torch.equal(run(x.view(4, 15, 192)), together.view(4, 15, 300))
    assert torch.equal(run(x.T.contiguous().T), together)
    # Rows that are not a line apart from each other, and rows a page apart.
    for stride in (200, 2048):
        apart = torch.zeros(60, stride, dtype=torch.bfloat16)
        apart[:, :192] = x
        assert torch.equal(run(apart[:, :192]), together)
    for threads in (2, 3, 5):
        with num_threads(threads):
            assert torch.equal(run(x), together)


def test_infinities_and_nan_stay_in_their_row(kind: str) -> None:
    run, x = product(kind, 64, 64), torch.randn(20, 64).bfloat16()
    clean = run(x)
    x[3, 5], x[17, 0] = float("nan"), float("inf")
    found = run(x)
    others = [row for row in range(20) if row not in (3, 17)]
    assert torch.equal(found[others], clean[others])
    # Rows are rounded to int8 by their largest number.
    assert kind == "int8" or (found[3].isnan().all() and not found[17].isfinite().any())


# -- choices, and what is refused -----------------------------------------------------------


def test_compiled_as_eager(isa: str) -> None:
    weight, x, bias = _case(96, 64, 9)
    packed = pack_linear(weight)

    def layer(x: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
        return packed_linear(x * 2, packed, 96, bias) + 1

    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for rows in (9, 4, 1):
        assert torch.equal(compiled(x[:rows], packed), layer(x[:rows], packed))


def test_what_does_not_fit_is_refused(isa: str) -> None:
    weight, x, bias = _case(64, 32, 4)
    packed = pack_linear(weight)
    with pytest.raises(RuntimeError, match="x must be bfloat16"):
        packed_linear(x.float(), packed, 64)
    for rows, columns, shape in ((x[:, :30], 64, "64, 30"), (x, 65, "65, 32"), (x, 32, "32, 32")):
        with pytest.raises(RuntimeError, match=rf"made of a weight \[{shape}\]"):
            packed_linear(rows, packed, columns)
    with pytest.raises(RuntimeError, match="bias must be"):
        packed_linear(x, packed, 64, bias[:60])
    with pytest.raises(RuntimeError, match="weight must be"):
        pack_linear(weight[:, :31])
    for other in (weight.float(), weight[:31], weight[:, :31], weight[None], weight[0]):
        assert not can_pack(other)
    assert can_pack(weight)


def test_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "vllm_specplug.kernels.packed_linear."
    for allowed, packed, automatic, asked in (
        (("plain",), None, False, False),
        (("plain", "avx2"), "avx2", True, True),
        (("plain", "avx2", "avx512"), "avx512", True, True),
        (("plain", "avx2", "avx512", "avx512_bf16"), "avx512_bf16", True, True),
        # Nothing here beats oneDNN's products with AMX.
        (("plain", "avx2", "avx512", "avx512_bf16", "amx"), "avx512_bf16", False, True),
    ):
        monkeypatch.setattr(module + "allowed_isas", lambda allowed=allowed: allowed)
        monkeypatch.setattr(module + "packed_isa", lambda packed=packed: packed)
        assert packs_target("auto") is automatic
        assert packs_target("packed") is asked
        assert packs_target("vllm") is False
        for has_vnni in (False, True):
            monkeypatch.setattr(module + "_has_int8_products", lambda has_vnni=has_vnni: has_vnni)
            assert has_packed_int8_products() is (automatic and has_vnni)


def test_the_limit_of_instruction_sets_holds_for_products() -> None:
    try:
        for name in supported_isas():
            use_isa(name)
            expected = {"plain": None, "amx": "avx512_bf16"}.get(name, name)
            assert packed_isa() == expected
            assert name not in ("plain", "avx2") or not has_packed_int8_products()
            assert allowed_isas() == ISAS[: ISAS.index(name) + 1]
    finally:
        use_isa(None)
