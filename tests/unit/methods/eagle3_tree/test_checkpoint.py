# SPDX-License-Identifier: Apache-2.0
"""EAGLE-3 checkpoints of every layout load; what is none of them is refused kindly."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.unit.methods.absurd import refused
from tests.unit.methods.eagle3_tree.heads import LAYOUTS, write_head
from tests.unit.methods.eagle3_tree.published import SMALL
from vllm_specplug.drafting.method import TargetInfo
from vllm_specplug.methods.eagle3_tree.checkpoint import (
    inspect_eagle3_head,
    load_eagle3_head,
)
from vllm_specplug.registry import get_method, recognise_head


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_loads(layout: str, tmp_path: Path) -> None:
    raw, tensors = write_head(tmp_path, layout)
    # By no other method.
    assert recognise_head(tmp_path).name == "eagle3_tree"
    head, extras = load_eagle3_head(tmp_path, SMALL)
    assert head.config == inspect_eagle3_head(tmp_path, SMALL)
    assert head.config.target_layer_ids == ((1, 3, 4))
    assert extras.lm_head is not None
    if "d2t" in tensors:
        assert extras.target_ids is not None
        assert torch.equal(extras.target_ids, tensors["d2t"] + torch.arange(12))
    else:
        assert layout == "deepspec" and extras.target_ids is None
        assert extras.embed_tokens is not None and head.config.qk_norm
    assert torch.equal(extras.lm_head, tensors["lm_head.weight"])
    for name, tensor in head.state_dict().items():
        public = name if name in tensors else name.replace("layers.0.", "midlayer.")
        assert torch.equal(tensor, tensors[public].view_as(tensor)), name


def test_tables_are_optional_where_the_targets_fit(tmp_path: Path) -> None:
    _, tensors = write_head(tmp_path, "specforge")
    del tensors["lm_head.weight"], tensors["t2d"]
    tensors["embed_tokens.weight"] = torch.randn(40, 16)
    save_file(tensors, tmp_path / "model.safetensors")
    _, extras = load_eagle3_head(tmp_path, SMALL)
    assert extras.lm_head is None
    assert extras.embed_tokens is not None


@pytest.mark.parametrize("layers", [4, 5, 6])
def test_short_targets_have_their_layers_named(layers: int, tmp_path: Path) -> None:
    write_head(tmp_path, "specforge")
    target = {**SMALL, "num_hidden_layers": layers}
    with pytest.raises(ValueError, match="counted from 0, under target_layer_ids"):
        inspect_eagle3_head(tmp_path, target)
    write_head(tmp_path, "specforge", target_layer_ids=[0, 1, 3])
    assert inspect_eagle3_head(tmp_path, target).target_layer_ids == (0, 1, 3)


def test_a_list_of_too_few_layers_is_refused(tmp_path: Path) -> None:
    write_head(tmp_path, "specforge", eagle_aux_hidden_state_layer_ids=[2, 5])
    with pytest.raises(ValueError, match="reads 3 layers.*under target_layer_ids"):
        inspect_eagle3_head(tmp_path, SMALL)


def test_biases_and_head_norms_are_read_off_the_tensors(tmp_path: Path) -> None:
    extra = {f"midlayer.self_attn.{n}_norm.weight": torch.ones(8) for n in "qk"}
    extra |= {"midlayer.self_attn.q_proj.bias": torch.randn(32)}
    extra |= {f"midlayer.self_attn.{n}_proj.bias": torch.randn(16) for n in "kv"}
    write_head(tmp_path, "specforge", extra=extra)
    head, _ = load_eagle3_head(tmp_path, SMALL)
    assert head.config.qk_norm and head.config.attention_bias
    assert not head.layers[0].self_attn.o_proj.bias.any()


@pytest.mark.parametrize(
    ("changes", "extra", "words"),
    [
        ({}, {"mask_hidden": torch.zeros(1, 48)}, ["mask_hidden", "P-EAGLE", "mask_token_id"]),
        ({"mask_token_id": 39}, {"mask_hidden": torch.zeros(1, 47)},
         ["misshapen mask_hidden", "[47]", "[48]"]),
        ({"ptd_token_id": 39}, {}, ["missing mask_hidden [48]"]),
        ({}, {"layers.1.mlp.up_proj.weight": torch.zeros(24, 16)},
         ["unexpected", "layers.1.mlp.up_proj.weight"]),
        # As the first layer's.
        ({"num_hidden_layers": 2}, {"layers.1.self_attn.q_proj.weight": torch.zeros(32, 32)},
         ["misshapen layers.1.self_attn.q_proj.weight", "[32, 32]", "[32, 16]"]),
        ({"num_hidden_layers": 2}, {"layers.1.hidden_norm.weight": torch.ones(16)},
         ["unexpected", "layers.1.hidden_norm.weight"]),
        # Model-Optimizer's, trained with Megatron.
        ({}, {"midlayer.0.mlp.up_proj.weight": torch.zeros(24, 16)}, ["unexpected"]),
        ({}, {"layers.0.hidden_norm.weight": torch.zeros(16)}, ["twice"]),
        ({}, {"midlayer.mlp.experts.0.up.weight": torch.zeros(2, 2)}, ["unexpected", "experts"]),
        ({}, {"fc.weight": torch.zeros(16, 80)}, ["5 layers", "states 3"]),
        ({}, {"fc.weight": torch.zeros(())}, ["misshapen fc.weight"]),
        ({"fc_norm": True}, {f"fc_norm.{i}.weight": torch.ones(5) for i in range(3)},
         ["misshapen fc_norm.0.weight"]),
    ],
)  # fmt: skip
def test_what_is_no_head_of_its_config_is_refused(
    changes: Any, extra: Any, words: list[str], tmp_path: Path
) -> None:
    write_head(tmp_path, "specforge", extra=extra, **changes)
    for read in (load_eagle3_head, inspect_eagle3_head):
        refused(lambda read=read: read(tmp_path, SMALL), *words)


def test_a_head_of_another_width_needs_its_own_tables(tmp_path: Path) -> None:
    write_head(tmp_path, "specforge", target_hidden_size=24)
    target = {**SMALL, "hidden_size": 24}
    refused(lambda: load_eagle3_head(tmp_path, target), "missing embed_tokens.weight [40, 16]")


def test_safetensors_beside_a_pickle_are_the_head(tmp_path: Path) -> None:
    _, tensors = write_head(tmp_path, "yuhuili")
    other = {**tensors, "fc.weight": tensors["fc.weight"] * 2}
    save_file(other, tmp_path / "pytorch_model.safetensors")
    head, _ = load_eagle3_head(tmp_path, SMALL)
    assert torch.equal(head.fc.weight, other["fc.weight"])


def test_a_parallel_head_drafts_as_deep_as_it_was_trained(tmp_path: Path) -> None:
    write_head(tmp_path / "states", "speculators_peagle")
    write_head(tmp_path / "silent", "specforge_peagle")
    options = get_method("eagle3_tree").parse_options({})

    def depth(head: str, tree_depth: int | None, nodes: int = 16) -> int:
        shared: Any = SimpleNamespace(
            model=str(tmp_path / head), num_speculative_tokens=nodes, tree_depth=tree_depth
        )
        return options.resolve("eagle3_tree", shared, TargetInfo(SMALL, 64, None)).depth

    assert [depth("states", None), depth("states", 3), depth("states", None, 4)] == [8, 3, 4]
    with pytest.raises(
        ValueError, match=r"tree_depth.*9.*trained to draft 8 tokens at once.*1\.\.8"
    ):
        depth("states", 9)
    assert [depth("silent", None), depth("silent", 9)] == [5, 9]
