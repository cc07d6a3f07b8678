# SPDX-License-Identifier: Apache-2.0
"""Builds the CPU kernels; everything declarative is in pyproject.toml.

Kernel sources lie in kernels/src and install as `vllm_specplug.kernels`. The extension uses
torch's stable ABI, so the torch of the build need not be the torch of the run (2.11 or newer).
It is optional: without a compiler or torch at build time the package installs and the readable
torch code of kernels/src/reference.py serves instead.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

SOURCES = sorted(str(p) for p in Path("csrc/cpu").glob("*.cpp"))
HEADERS = sorted(str(p) for p in [*Path("csrc/cpu").glob("*.h"), *Path("csrc/cpu").glob("*.inl")])


class ParallelBuild(build_ext):
    """Compiles the sources of an extension at once; setuptools does it one after the other."""

    def build_extension(self, ext: Extension) -> None:
        one_by_one = self.compiler.compile

        def compile_all(sources: list[str], **options: Any) -> list[str]:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                made = pool.map(lambda source: one_by_one([source], **options), sources)
                return [name for names in made for name in names]

        self.compiler.compile = compile_all
        try:
            super().build_extension(ext)
        finally:
            self.compiler.compile = one_by_one


def cpu_extension() -> list[Extension]:
    """The CPU kernel library, or nothing when the torch headers are out of reach."""
    torch = importlib.util.find_spec("torch")
    if torch is None or not torch.submodule_search_locations:
        print(
            "vllm-specplug: torch is not importable in the build environment, so the C++ kernels "
            "are left out; install with --no-build-isolation to build them",
            file=sys.stderr,
        )
        return []
    root = Path(torch.submodule_search_locations[0])
    return [
        Extension(
            "vllm_specplug.kernels._cpu",
            SOURCES,
            depends=HEADERS,
            include_dirs=[str(root / "include")],
            library_dirs=[str(root / "lib")],
            libraries=["torch_cpu"],
            define_macros=[("TORCH_TARGET_VERSION", "0x020b000000000000")],
            extra_compile_args=["-std=c++17", "-O3", "-fvisibility=hidden", "-g0"],
            # It calls nothing of Python, so one wheel serves all Python versions.
            py_limited_api=True,
            optional=True,
        )
    ]


setup(
    packages=[
        *find_packages(include=["vllm_specplug", "vllm_specplug.*"]),
        "vllm_specplug.kernels",
        "vllm_specplug.kernels.cute",
    ],
    package_dir={
        "vllm_specplug.kernels": "kernels/src",
        "vllm_specplug.kernels.cute": "kernels/src/cute",
    },
    # made by scripts/build_cubins.py, if at all
    package_data={"vllm_specplug.kernels.cute": ["cubins/*"]},
    ext_modules=cpu_extension(),
    cmdclass={"build_ext": ParallelBuild},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
