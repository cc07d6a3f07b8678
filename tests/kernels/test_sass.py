# SPDX-License-Identifier: Apache-2.0
"""Loops in listings of machine code, and what an iteration costs."""

from __future__ import annotations

import pytest

from scripts import sass

# A warpgroup's tile of 64 x 64 and head size 64, with ways around copies and around the products.
LISTING = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_0:
        /*0010*/                   IADD3 R2, R2, 0x1, RZ ;
        /*0020*/               @P0 BRA `(.L_x_0) ;
.L_x_1:
        /*0030*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R8+URZ], R3 ;
        /*0040*/              @!P0 BRA `(.L_x_9) ;
        /*0050*/               @P1 BRA `(.L_x_2) ;
        /*0060*/                   LDGSTS.E.BYPASS.128 [R42], desc[UR48][R4.64], !P6 ;
        /*0070*/                   LDGSTS.E.BYPASS.128 [R43], desc[UR48][R4.64], !P6 ;
.L_x_2:
        /*0080*/               @P2 BRA `(.L_x_3) ;
{scores}
        /*0100*/                   MUFU.EX2 R5, R5 ;
        /*0110*/                   FFMA R6, R6, R7, R8 ;
        /*0120*/                   IMAD.MOV.U32 R6, RZ, RZ, R7 ;
        /*0130*/                   FMNMX R6, R6, R7, !PT ;
{outputs}
.L_x_3:
        /*0200*/                   BRA.DIV UR8, `(.L_x_9) ;
        /*0210*/              @!P3 BRA `(.L_x_1) ;
        /*0220*/                   EXIT ;
.L_x_9:
        /*0230*/                   BRA `(.L_x_9) ;
""".format(
    scores="        /*0090*/                   HGMMA.64x64x16.F32.BF16 R88, gdesc[UR8], R88 ;\n"
    * 4,
    outputs="        /*0140*/              HGMMA.64x64x16.F32.BF16 R24, R32, gdesc[UR8], R24 ;\n"
    * 4,
)


def loop(listing: str, float32: bool = False) -> sass.Loop:
    return sass._inner_loop(*sass.parse(listing), float32)


def test_the_shortest_way_that_makes_all_products() -> None:
    found = loop(LISTING)
    # the wait and three branches, eight products, four others, two branches at the end
    assert found == sass.Loop(
        issued=18, float_cycles=2, alu_cycles=2, special_cycles=8, memory=1, tensor_cycles=256,
        products=131072,
    )  # fmt: skip
    cells = found.row(64, 64, 64, 4)
    assert cells == ["64 x 64", "18 / 2 / 2 / 8 / 1", "18", "256", "4.0", "4.0"]
    assert found.row(192, 64, 64, 12)[2:] == ["54", "768", "12.0", "4.0"]
    with pytest.raises(AssertionError, match="one tile"):
        found.row(64, 128, 64, 4)


def waits(listing: str) -> sass.Waits:
    code, labels = sass.parse(listing)
    return sass._waits(sass._shortest(code, labels, *sass._first_loop(code, labels)))


def test_where_an_iteration_waits() -> None:
    assert waits(LISTING) == sass.Waits(products=0, copies=0, block=0)
    more = """
        /*0131*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0132*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0133*/                   LDGDEPBAR ;
        /*0134*/                   DEPBAR.LE SB0, 0x1 ;
        /*0135*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0136*/              @!P3 BRA `(.L_x_5) ;
        /*0137*/                   DEPBAR.LE SB0, 0x0 ;
.L_x_5:
        /*0138*/                   FMNMX R6, R6, R7, !PT ;
"""
    place = "        /*0130*/                   FMNMX R6, R6, R7, !PT ;\n"
    assert place in LISTING
    # What a branch may leave out does not count.
    assert waits(LISTING.replace(place, more[1:])) == sass.Waits(2, 1, 1)


def test_no_loop_of_products_is_an_error() -> None:
    with pytest.raises(AssertionError, match="no loop"):
        loop(LISTING.replace("HGMMA", "FFMA"))


# One tile of 8 x 8 and head size 16 by eight warps: eight products of a lane.
OF_LANES = LISTING.replace(
    """        /*0110*/                   FFMA R6, R6, R7, R8 ;
""",
    "",
).replace("HGMMA", "FFMA")


def test_products_of_lanes() -> None:
    found = loop(OF_LANES, float32=True)
    assert found == sass.Loop(
        issued=17, float_cycles=9, alu_cycles=2, special_cycles=8, memory=1, tensor_cycles=0,
        products=256,
    )  # fmt: skip
    assert found.row(8, 8, 16, 8) == ["8 x 8", "17 / 9 / 2 / 8 / 1", "34", "0", "4.2", "34.0"]
    for columns in (2, 16):
        with pytest.raises(AssertionError, match="one tile"):
            found.row(8, columns, 16, 8)


def test_lanes_are_not_counted_beside_matrices_and_the_other_way_round() -> None:
    assert loop(LISTING, float32=True).products == sass.WARP
    with pytest.raises(AssertionError, match="no loop"):
        loop(LISTING.replace("FFMA", "FADD"), float32=True)


def test_what_a_table_says_is_read_again() -> None:
    rows = {"a": loop(LISTING).row(64, 64, 64, 4), "b": loop(LISTING).row(192, 64, 64, 12)}
    page = sass.replaced("x\n<!-- t -->\nold\n<!-- /t -->\ny", "t", sass.table(rows))
    assert sass.recorded(page, "t") == rows and page.startswith("x\n") and page.endswith("\ny")
    then = rows["a"]
    more, less = [*then], [*then]
    more[2], less[2] = "30", "17"
    for now, same, other in ((then, 0, 0), (less, 1, 0), (more, 1, 1), (rows["b"], 1, 1)):
        assert bool(sass.difference(now, then, same_compiler=True)) == same
        assert bool(sass.difference(now, then, same_compiler=False)) == other
