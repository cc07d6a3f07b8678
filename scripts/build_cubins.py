# SPDX-License-Identifier: Apache-2.0
"""Compiles every variant of the CuTe kernels ahead of time; needs the extra `cute`, but no GPU.

    python scripts/build_cubins.py            # missing and stale ones
    python scripts/build_cubins.py --force    # all

They are written to kernels/src/cute/cubins and packaged from there. A machine without cubins and
cutlass uses the next kernel.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from vllm_specplug.kernels.cute import store
from vllm_specplug.kernels.cute.config import (
    CombineConfig,
    ForwardConfig,
    all_configs,
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=store.SHIPPED)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--force", action="store_true", help="also those that are up to date")
    args = parser.parse_args()
    if not store.can_compile():
        print("cutlass is not installed; pip install 'vllm-specplug[cute]'", file=sys.stderr)
        return 1
    todo = [
        config
        for config in all_configs()
        if args.force or isinstance(store.read(args.out, config.name), str)
    ]
    start = time.monotonic()
    with ProcessPoolExecutor(args.jobs) as pool:
        for name, size in pool.map(build, todo, [args.out] * len(todo)):
            print(f"{name}: {size} bytes", flush=True)
    print(f"{len(todo)} compiled in {time.monotonic() - start:.0f} s, in {args.out}")
    return 0


def build(config: ForwardConfig | CombineConfig, out: Path) -> tuple[str, int]:
    from vllm_specplug.kernels.cute.compile import compile_config

    warnings.simplefilter("ignore")
    made = compile_config(config)
    store.write(out, made)
    return made.name, len(made.cubin)


if __name__ == "__main__":
    sys.exit(main())
