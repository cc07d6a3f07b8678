# SPDX-License-Identifier: Apache-2.0
"""The benchmark behind the README's table: `python bench/speed.py --help`."""

from vllm_specplug.bench.cli import bench_app

if __name__ == "__main__":
    bench_app()
