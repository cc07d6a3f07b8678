# SPDX-License-Identifier: Apache-2.0
"""From a variant's configuration to a cubin for sm_90a; needs cutlass, but no GPU and no driver."""

import os
import re
import tempfile
from dataclasses import dataclass

ARCH = "sm_90a"
# cutlass names the newest PTX version, which a driver older than it refuses to compile. The
# kernels use nothing past this one (CUDA 12.7), so it is named instead where PTX is shipped.
PTX_VERSION = "8.6"


@dataclass(frozen=True)
class Compiled:
    """A kernel as the driver takes it: machine code, and PTX for where that is refused."""

    name: str
    entry: str
    # bytes of each parameter: descriptors of 128, empty ones of 1, then those of launch_params
    param_bytes: tuple[int, ...]
    cubin: bytes
    ptx: str


def compile_config(config) -> Compiled:
    """Compiles one `ForwardConfig` or `CombineConfig`.

    Raises:
        ImportError: without cutlass (the extra `cute`).
    """
    # Without it, and without a GPU, cutlass would silently compile for another architecture.
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
    return Compiled(config.name, entry, param_bytes, cubin, ptx)
