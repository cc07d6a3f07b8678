# SPDX-License-Identifier: Apache-2.0
"""The tables of what CuTe kernels take were written for these sources; nothing is compiled."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts import cute_resources, sass, source_digest
from vllm_specplug.kernels.cute import store
from vllm_specplug.kernels.cute.config import ForwardConfig, all_configs
from vllm_specplug.kernels.cute.store import sources

PAGE = cute_resources.PAGE.read_text()
ROOT = cute_resources.PAGE.parents[1]
AGAIN = "run: python -m scripts.cute_resources --write"


def test_the_tables_were_written_for_these_sources() -> None:
    assert source_digest.recorded(PAGE) == cute_resources.digest(sources()), AGAIN


def test_the_tables_were_written_by_the_compiler_that_is_required() -> None:
    (required,) = re.findall(
        r"nvidia-cutlass-dsl\[\w+\]==([\w.]+)", (ROOT / "pyproject.toml").read_text()
    )
    assert cute_resources.recorded(PAGE)[0] == required, AGAIN


def test_every_variant_has_its_rows() -> None:
    _, resources = cute_resources.recorded(PAGE)
    assert resources.keys() == {config.name for config in all_configs()}, AGAIN
    for config in all_configs():
        if isinstance(config, ForwardConfig):
            assert cute_resources.recorded_loop(PAGE, config), config.name
            assert bool(cute_resources.recorded_producer(PAGE, config)) == config.specialised
    asked = [config.name for config in cute_resources.on_demand_configs()]
    assert [*sass.recorded(PAGE, cute_resources.ON_DEMAND)] == asked, AGAIN


def test_nothing_recorded_spills() -> None:
    _, resources = cute_resources.recorded(PAGE)
    asked = [taken for taken, _ in cute_resources.recorded_on_demand(PAGE).values()]
    assert all(taken.stack_bytes == 0 for taken in (*resources.values(), *asked))


@pytest.mark.parametrize(
    ("line", "other", "counts"),
    [
        ("TILE_N = 64", "TILE_N = 128", True),
        ("    head_dim: int\n", "    head_dim: int = 64\n", True),
        ("# Columns of a tile", "# Columns of some tile", False),
        ('"""Tile shapes', '"""Shapes', False),
        ("        head_dim: Dh, of HEAD_DIMS.", "        head_dim: of HEAD_DIMS.", False),
    ],
)
def test_code_counts_and_comments_do_not(
    tmp_path: Path, line: str, other: str, counts: bool
) -> None:
    (source,) = (path for path in sources() if path.name == "config.py")
    text = source.read_text()
    assert text.count(line) >= 1
    changed = tmp_path / "cute" / "config.py"
    changed.parent.mkdir()
    changed.write_text(text.replace(line, other, 1))
    assert (cute_resources.digest([source]) != cute_resources.digest([changed])) == counts
    assert (store.code_of(text) != store.code_of(changed.read_text())) == counts


def test_constants_count_of_what_the_kernel_shares_with_others(tmp_path: Path) -> None:
    (source,) = (path for path in sources() if path.name == "cuda_contract.py")
    text, changed = source.read_text(), tmp_path / source.name
    changed.write_text(text + "\ndef other() -> None: ...\n")
    assert cute_resources.digest([source]) == cute_resources.digest([changed])
    assert "MAX_TREE_ROWS = 257" in text
    changed.write_text(text.replace("MAX_TREE_ROWS = 257", "MAX_TREE_ROWS = 256"))
    assert cute_resources.digest([source]) != cute_resources.digest([changed])


def test_every_source_counts() -> None:
    assert {
        "forward_sm90.py",
        "mainloop_basic.py",
        "mainloop_specialised.py",
        "cuda_contract.py",
    } <= {path.name for path in sources()}
    digests = {cute_resources.digest([*sources()][:n]) for n in range(len(sources()) + 1)}
    assert len(digests) == len(sources()) + 1
