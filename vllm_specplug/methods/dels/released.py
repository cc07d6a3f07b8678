# SPDX-License-Identifier: Apache-2.0
"""Reads released NumPy archives as untrusted input.

An archive can unpack to more than its own size. The reader allocates at most `MAX_COUNTS_BYTES`.
"""

from __future__ import annotations

import io
import math
import zipfile
from pathlib import Path

import numpy as np
import torch

# A vocabulary of 2^24 tokens.
MAX_COUNTS_BYTES = 8 << 24


def load_counts_archive(path: Path) -> torch.Tensor:
    """Returns the array `counts` of an `.npz` file, compressed or not.

    Raises:
        ValueError, KeyError, BadZipFile: for a file that is no archive, has no such array, or
            unpacks to more than `MAX_COUNTS_BYTES`.
    """
    with zipfile.ZipFile(path) as archive:
        entry = archive.getinfo("counts.npy")
        if entry.file_size > MAX_COUNTS_BYTES:
            raise ValueError(
                f"it unpacks to {entry.file_size} bytes, legal: at most {MAX_COUNTS_BYTES}"
            )
        data = archive.read(entry)
    stream = io.BytesIO(data)
    version = np.lib.format.read_magic(stream)
    read_header = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }.get(version)
    if read_header is None:
        raise ValueError(f"its array has format {version}")
    shape, fortran, dtype = read_header(stream)
    count = math.prod(shape)
    if fortran or dtype.hasobject or count < 0 or count * dtype.itemsize > MAX_COUNTS_BYTES:
        raise ValueError(
            f"its array is {dtype} {list(shape)}, legal: integers of at most {MAX_COUNTS_BYTES} "
            "bytes"
        )
    array = np.frombuffer(data, dtype, count, stream.tell()).reshape(shape)
    return torch.from_numpy(array.copy())
