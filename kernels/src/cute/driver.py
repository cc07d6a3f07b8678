# SPDX-License-Identifier: Apache-2.0
"""Loads and launches cubins through the CUDA driver (ctypes), without cutlass or a compiler.

Calls use the current context of the thread. torch makes it current before it returns a CUDA tensor.
"""

from __future__ import annotations

import ctypes
import logging
from functools import cache, lru_cache

from .launch import TensorMapSpec

logger = logging.getLogger(__name__)

# cuda.h
MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # CUfunction_attribute
TENSOR_MAP_DTYPES = {"float16": 6, "bfloat16": 9}  # CUtensorMapDataType
SWIZZLES = {32: 1, 64: 2, 128: 3}  # CUtensorMapSwizzle, by bytes
INTERLEAVE_NONE = 0
L2_PROMOTION_256B = 3
OOB_FILL_NONE = 0
TENSOR_MAP_BYTES = 128
TENSOR_MAP_ALIGN = 64


class DriverError(RuntimeError):
    """A driver call failed; the message names the call and the driver's reason."""


@cache
def _library() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DriverError(f"the CUDA driver cannot be loaded ({error})") from error


def _call(name: str, *arguments) -> None:
    library = _library()
    code = getattr(library, name)(*arguments)
    if code != 0:
        text = ctypes.c_char_p()
        library.cuGetErrorString(code, ctypes.byref(text))
        reason = text.value.decode() if text.value else "unknown"
        raise DriverError(f"{name} failed with code {code}: {reason}")


class Kernel:
    """An entry point of a loaded image, in the current context."""

    def __init__(self, image: bytes, entry: str, threads: int, shared_bytes: int) -> None:
        """Raises DriverError when the driver refuses the image, the entry or the memory."""
        self._module = ctypes.c_void_p()
        self._function = ctypes.c_void_p()
        self.threads = threads
        self.shared_bytes = shared_bytes
        _call("cuModuleLoadData", ctypes.byref(self._module), image)
        _call("cuModuleGetFunction", ctypes.byref(self._function), self._module, entry.encode())
        if shared_bytes:
            _call(
                "cuFuncSetAttribute",
                self._function,
                ctypes.c_int(MAX_DYNAMIC_SHARED_SIZE_BYTES),
                ctypes.c_int(shared_bytes),
            )

    def launch(self, grid: tuple[int, int, int], parameters: Parameters, stream: int) -> None:
        _call(
            "cuLaunchKernel",
            self._function,
            *(ctypes.c_uint(size) for size in grid),
            ctypes.c_uint(self.threads),
            ctypes.c_uint(1),
            ctypes.c_uint(1),
            ctypes.c_uint(self.shared_bytes),
            ctypes.c_void_p(stream),
            parameters.pointers,
            None,
        )


def load_first(images: tuple[bytes, ...], entry: str, threads: int, shared_bytes: int) -> Kernel:
    """Loads the first image that the driver accepts. Warns if the driver must compile PTX.

    Raises:
        DriverError: with the reason for each image.
    """
    reasons = []
    for image in images:
        try:
            kernel = Kernel(image, entry, threads, shared_bytes)
        except DriverError as error:
            reasons.append(str(error))
            continue
        if reasons:
            logger.warning("%s is compiled by the driver: %s", entry, "; then ".join(reasons))
        return kernel
    raise DriverError("; then ".join(reasons))


class Parameters:
    """Launch arguments in the form of cuLaunchKernel: an array of pointers to their bytes.

    The driver copies them during the call, so the object is reusable.
    """

    def __init__(self, param_bytes: list[int], arguments: tuple) -> None:
        """
        Args:
            param_bytes: size of each parameter; one of a single byte is empty, without argument.
            arguments: `TensorMapSpec`s, ints and floats, in order.
        """
        values = iter(arguments)
        self._holders = [self._holder(size, values) for size in param_bytes]
        assert next(values, None) is None, "more arguments than parameters"
        self.pointers = (ctypes.c_void_p * len(self._holders))(
            *(ctypes.addressof(holder) for holder in self._holders)
        )

    def set(self, index: int, value: int) -> None:
        """Sets the integer argument `index`; a negative index counts from the end."""
        self._holders[index].value = value

    @staticmethod
    def _holder(size: int, values):
        if size == 1:
            return ctypes.c_uint8(0)
        value = next(values)
        if isinstance(value, TensorMapSpec):
            assert size == TENSOR_MAP_BYTES
            return encode_tensor_map(value)
        if isinstance(value, float):
            assert size == 4
            return ctypes.c_float(value)
        return {4: ctypes.c_int32, 8: ctypes.c_int64}[size](value)


def aligned_bytes(size: int, align: int) -> ctypes.Array:
    """Returns a zeroed buffer aligned to `align`. It owns its memory."""
    room = (ctypes.c_uint8 * (size + align))()
    skip = -ctypes.addressof(room) % align
    return (ctypes.c_uint8 * size).from_buffer(room, skip)


@lru_cache(maxsize=1024)
def encode_tensor_map(spec: TensorMapSpec) -> ctypes.Array:
    """Returns the 128 bytes of a TMA descriptor. They are cached: do not write to them."""
    rank = len(spec.extents)
    encoded = aligned_bytes(TENSOR_MAP_BYTES, TENSOR_MAP_ALIGN)
    _call(
        "cuTensorMapEncodeTiled",
        encoded,
        ctypes.c_int(TENSOR_MAP_DTYPES[spec.dtype]),
        ctypes.c_uint32(rank),
        ctypes.c_void_p(spec.address),
        (ctypes.c_uint64 * rank)(*spec.extents),
        # in bytes; the first dimension is contiguous and has no entry
        (ctypes.c_uint64 * (rank - 1))(*(2 * stride for stride in spec.strides[1:])),
        (ctypes.c_uint32 * rank)(*spec.box),
        (ctypes.c_uint32 * rank)(*([1] * rank)),
        ctypes.c_int(INTERLEAVE_NONE),
        ctypes.c_int(SWIZZLES[spec.swizzle_bytes]),
        ctypes.c_int(L2_PROMOTION_256B),
        ctypes.c_int(OOB_FILL_NONE),
    )
    return encoded
