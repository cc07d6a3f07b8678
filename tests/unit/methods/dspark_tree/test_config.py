# SPDX-License-Identifier: Apache-2.0
"""DSpark configs mean what their trainers meant, wherever the values stand, or are refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.methods.block import published
from tests.unit.methods.block.published import changed, tiny
from vllm_specplug.methods.dspark_tree.config import DSparkConfig

DEEPSPEC = published.DEEPSPEC_DSPARK_QWEN3_4B
FORMATS = [
    "DEEPSPEC_DSPARK_QWEN3_4B", "SPECFORGE_DSPARK_CAUSAL", "SPECULATORS_DSPARK",
    "SPECULATORS_DSPARK_GATED", "DEEPSPEC_DSPARK_RNN", "SPECFORGE_DOMINO_QWEN35_4B",
    "SPECFORGE_DOMINO_QWEN36_27B",
]  # fmt: skip


def read(raw: dict[str, Any]) -> DSparkConfig:
    return DSparkConfig.from_dict(raw, num_target_layers=4)


@pytest.mark.parametrize("name", FORMATS)
def test_a_config_written_here_reads_back(name: str) -> None:
    config = read(tiny(getattr(published, name)))
    assert config.markov_rank == 6 and read(config.to_dict()) == config


@pytest.mark.parametrize("architectures", [None, [], ["DFlashDraftModel"], ["Qwen3DSparkModel"]])
@pytest.mark.parametrize(
    "stated",
    [{}, {"dspark_config": {"projector_type": "dspark"}},
     {"markov_rank": None, "dspark_config": {"markov_rank": 6}}],
)  # fmt: skip
def test_flat_heads_with_a_markov_head_draft_from_the_anchor(
    architectures: list[str] | None, stated: dict[str, Any]
) -> None:
    raw = changed(tiny(DEEPSPEC, architectures=architectures), **stated)
    assert read(raw).sample_from_anchor
    flag = {"sample_from_anchor": False}
    for said in (flag, {"dflash_config": flag}, {"dspark_config": flag}):
        assert not read(changed(raw, **said)).sample_from_anchor, said


def test_the_container_of_dspark_is_read_whole() -> None:
    raw = tiny(DEEPSPEC)
    names = ("target_layer_ids", "mask_token_id", "block_size")
    own = {name: raw.pop(name) for name in names} | {"sample_from_anchor": False}
    block = read(changed(raw, dspark_config=own))
    assert (block.target_layer_ids, block.mask_token_id, block.block_size) == ((1, 3), 29, 5)
    assert not block.sample_from_anchor


@pytest.mark.parametrize(
    ("key", "values"),
    [("mask_token_id", (29, 28)), ("target_layer_ids", ([1, 3], [0, 1])), ("markov_rank", (6, 7))],
)
def test_containers_that_disagree_are_refused(key: str, values: tuple[Any, Any]) -> None:
    raw = tiny(DEEPSPEC)
    del raw[key]
    both = changed(raw, dflash_config={key: values[0]}, dspark_config={key: values[0]})
    read(both)
    with pytest.raises(ValueError, match=rf"draft head config: dspark_config\.{key} = "):
        read(changed(both, dspark_config={key: values[1]}))


@pytest.mark.parametrize("value", [3, "x", ["markov_rank"]])
def test_a_container_that_is_none_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="draft head config: dspark_config = .* an object"):
        read({**tiny(DEEPSPEC), "dspark_config": value})


@pytest.mark.parametrize("place", ["top", "dspark_config"])
def test_layers_by_the_name_that_vllm_reads(place: str) -> None:
    raw = tiny(DEEPSPEC)
    del raw["target_layer_ids"]
    stated = {"dspark_target_layer_ids": [0, 3]}
    raw = changed(raw, **(stated if place == "top" else {place: stated}))
    assert read(raw).target_layer_ids == (0, 3)


@pytest.mark.parametrize(
    ("name", "same", "other"),
    [("dspark_target_layer_ids", [1, 3], [2, 3]),
     ("eagle_aux_hidden_state_layer_ids", [2, 4], [1, 3])],
)  # fmt: skip
def test_layers_stated_twice_must_agree(name: str, same: list[int], other: list[int]) -> None:
    assert read(tiny(DEEPSPEC, **{name: same})).target_layer_ids == (1, 3)
    with pytest.raises(ValueError, match=rf"{name} = .*target_layer_ids"):
        read(tiny(DEEPSPEC, **{name: other}))


def test_the_name_that_vllm_gives_heads_of_speculators() -> None:
    raw = tiny(published.SPECULATORS_DSPARK)
    assert read({**raw, "architectures": ["Qwen3DSparkModel"]}) == read(raw)
