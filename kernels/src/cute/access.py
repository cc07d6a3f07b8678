# SPDX-License-Identifier: Apache-2.0
"""Typed views of global memory at a raw address."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from .launch_params import SCALAR_DTYPES

ELEMENT_BYTES = 2


def element_type(name: str):
    types = (cutlass.Float32, cutlass.BFloat16, cutlass.Float16)
    return dict(zip(SCALAR_DTYPES, types, strict=True))[name]


@cute.jit
def global_array(element: cutlass.Constexpr, address: Int64, count: cutlass.Constexpr):
    """Returns a tensor of `count` elements at `address`, aligned to their total size."""
    align = cutlass.const_expr(count * element.width // 8)
    pointer = cute.make_ptr(element, address, cute.AddressSpace.gmem, assumed_align=align)
    return cute.make_tensor(pointer, cute.make_layout(count))


@cute.jit
def int32_at(address: Int64, index: Int32) -> Int32:
    """Loads element `index` of an int32 array in global memory."""
    return global_array(Int32, address + Int64(index) * 4, 1)[0]


@cute.jit
def scalar_at(address: Int64, index: Int32, dtype: Int32) -> Float32:
    """Loads element `index` of an array whose dtype is `SCALAR_DTYPES[dtype]`."""
    value = Float32(0.0)
    for i in cutlass.range_constexpr(len(SCALAR_DTYPES)):
        element = element_type(SCALAR_DTYPES[i])
        if dtype == i:
            element_address = address + Int64(index) * (element.width // 8)
            value = global_array(element, element_address, 1)[0].to(Float32)
    return value
