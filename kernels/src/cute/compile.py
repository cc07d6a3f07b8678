# SPDX-License-Identifier: Apache-2.0
"""Compiles a kernel variant to a cubin for sm_90a. Needs cutlass, but no GPU and no driver."""

import os
import re
import tempfile
from dataclasses import dataclass

ARCH = "sm_90a"
# cutlass emits the newest PTX version, which older drivers refuse. The kernels need nothing newer
# than this one (CUDA 12.7), so the shipped PTX declares it instead.
PTX_VERSION = "8.6"


@dataclass(frozen=True)
class CompiledKernel:
    """A compiled variant: a cubin, and PTX for drivers that refuse the cubin."""

    name: str
    entry: str
    # bytes of each parameter: TMA descriptors (128), empty ones (1), then those of launch_params
    param_bytes: tuple[int, ...]
    cubin: bytes
    ptx: str

    @property
    def images(self) -> tuple[bytes, bytes]:
        """What the driver loads, best first."""
        return self.cubin, self.ptx.encode()


def compile_config(config) -> CompiledKernel:
    """Compiles one `ForwardConfig` or `CombineConfig`.

    Raises:
        ImportError: without cutlass (the extra `cute`).
    """
    # Without this variable and without a GPU, cutlass silently compiles for another architecture.
    os.environ["CUTE_DSL_ARCH"] = ARCH
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_stream

    from .config import ForwardConfig

    if isinstance(config, ForwardConfig):
        from .forward_sm90 import TreeAttnForwardSm90 as Kernel
    else:
        from .combine import CombineSplits as Kernel

    with tempfile.TemporaryDirectory() as folder:
        compiled = cute.compile(
            Kernel(config),
            make_fake_stream(),
            options=f"--keep-ptx --keep-cubin --dump-dir={folder} --gpu-arch={ARCH}",
        )
        ptx = compiled.artifacts.PTX
        cubin = compiled.artifacts.CUBIN
    (entry,) = re.findall(r"\.entry (\w+)\(", ptx)
    sizes = {"u64": 8, "u32": 4, "f32": 4}
    param_bytes = tuple(
        int(count) if count else sizes[kind]
        for kind, count in re.findall(r"\.param (?:\.align \d+ )?\.(\w+) \w+(?:\[(\d+)\])?", ptx)
    )
    ptx = re.sub(r"^\.version \S+", f".version {PTX_VERSION}", ptx, flags=re.MULTILINE)
    return CompiledKernel(config.name, entry, param_bytes, cubin, ptx)
