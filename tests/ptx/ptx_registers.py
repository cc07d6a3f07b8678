# SPDX-License-Identifier: Apache-2.0
"""Registers that the warps of the PTX machine share with products of their warpgroup."""

from __future__ import annotations

from dataclasses import dataclass, field

# How a product takes part in a register that is not one of its sums.
FACTOR = "factor"


@dataclass
class Use:
    """The last product that a register took part in."""

    # the shape of the product whose sum it is, or FACTOR
    kind: str
    # groups of products are counted from 1; the one that is open is the next
    group: int
    # how often the warpgroup had fenced
    fences: int


@dataclass
class ProductRegisters:
    """Of one warpgroup: products run beside the warps, on the same registers.

    The rules of the PTX manual:
        a warp touches no register of a product before it has waited for the product's group;
        a product takes part in what the warps touched once they have fenced (`wgmma.fence`), and
        the first of a kernel follows a fence in any case;
        of products, only sums of one shape are in order by themselves, and factors that are read.
    """

    uses: dict[str, Use] = field(default_factory=dict)
    # touched by the warps since they fenced last
    unfenced: set[str] = field(default_factory=set)
    fences: int = 0

    def pending(self, name: str, waited: int) -> bool:
        """Whether a product of a group that nobody has waited for takes part in it."""
        use = self.uses.get(name)
        return use is not None and use.group > waited

    def in_flight(self, name: str, closed: int, waited: int) -> bool:
        """Whether it is a product's that the next wait may bring."""
        return self.pending(name, waited) and self.uses[name].group <= closed

    def touch(self, names: frozenset[str], waited: int) -> None:
        """The warps read or write these; the first `waited` groups were waited for."""
        for name in names:
            assert not self.pending(name, waited), (
                "a warp touches a register of a product that it has not waited for"
            )
        self.unfenced |= names

    def copy(self, name: str, source: str, waited: int) -> None:
        """The copy holds what the wait for the sum brings, and nothing before."""
        use = self.uses[source]
        assert use.kind != FACTOR, "a copy of a factor that is not waited for"
        assert not self.pending(name, waited), "a product that is not waited for loses a register"
        self.uses[name] = Use(use.kind, use.group, use.fences)
        self.unfenced |= {name, source}

    def fence(self) -> None:
        self.fences += 1
        self.unfenced.clear()

    def multiply(self, name: str, kind: str, group: int, waited: int) -> None:
        """A product of group number `group` takes part."""
        assert self.fences, "the first product of a warpgroup, without a wgmma.fence"
        assert name not in self.unfenced, (
            "a product meets a register that a warp has touched, without a wgmma.fence"
        )
        use = self.uses.get(name)
        assert (
            use is None or use.kind == kind or (use.group <= waited and use.fences < self.fences)
        ), "products of two kinds meet in a register, without a wait and a wgmma.fence"
        self.uses[name] = Use(kind, group, self.fences)
