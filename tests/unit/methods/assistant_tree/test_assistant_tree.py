# SPDX-License-Identifier: Apache-2.0
"""Every branch of a tree is what transformers' assistant drafts along it; what is served, and what
is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.e2e.assistants import (
    TEXT,
    WINDOW,
    logits_along,
    make_assistant,
    make_followed_target,
)
from tests.unit.dense_trees import DenseTarget
from tests.unit.drafters import load_drafter, requests_of
from tests.unit.engine_config import engine_config
from tests.unit.methods.assistant_tree import published
from tests.unit.methods.eagle3_tree.world import check_branches
from vllm_specplug.drafting.caches import TargetCacheSpec
from vllm_specplug.drafting.committed_tokens import CommittedTokens
from vllm_specplug.drafting.device_levels import read_trees
from vllm_specplug.drafting.device_requests import DeviceRequests
from vllm_specplug.methods.assistant_tree.checkpoint import load_assistant
from vllm_specplug.methods.assistant_tree.drafter import AssistantDrafter
from vllm_specplug.registry import recognise_head
from vllm_specplug.tree import DraftTree

VOCAB, HIDDEN = 300, 64
TARGET = SimpleNamespace(hidden_size=HIDDEN, vocab_size=VOCAB, sliding_window=WINDOW)
# Tokens before the anchor: fewer than the window, as many, more.
LENGTHS = [1, 5, WINDOW, WINDOW + 1, 60]
KINDS = ("sliding_attention", "full_attention")


class World:
    """An assistant, its drafter, and requests with random target states and caches."""

    def __init__(self, folder: Path, grouped: bool, on_device: bool = False) -> None:
        self.on_device = on_device
        self.module = make_assistant(folder, VOCAB, grouped)
        torch.manual_seed(1)
        self.embed = torch.randn(VOCAB, HIDDEN)
        self.tokens = [torch.randint(0, VOCAB, (n + 1,)) for n in LENGTHS]
        self.states = torch.randn(len(LENGTHS), HIDDEN)
        shapes = dict(zip(KINDS, ((2, 32), (1, 64)), strict=True))
        self.caches = [
            {kind: tuple(torch.randn(2, n, *shape).unbind()) for kind, shape in shapes.items()}
            for n in LENGTHS
        ]
        self.drafter: AssistantDrafter = load_drafter(
            AssistantDrafter, folder, None, torch.zeros(VOCAB, HIDDEN), self.embed, TARGET,
            num_nodes=16, max_depth=16, tree_width=8,
        )  # fmt: skip
        specs = self.drafter.target_cache_specs()
        made = {
            spec: DenseTarget(
                [caches[KINDS[spec.window is None]] for caches in self.caches], spec, on_device
            )
            for spec in specs
        }
        self.drafter.bind_target_caches([made[spec] for spec in specs])
        # The states of rows between the committed ones are of rejected drafts.
        rows = torch.arange(len(LENGTHS)) * 2 + 1
        states = torch.full((2 * len(LENGTHS), HIDDEN), torch.nan)
        states[rows] = self.states
        every = torch.arange(len(rows))
        self.drafter.observe(
            CommittedTokens([], rows, every, every, last_rows=rows, output_states=states)
        )

    def draft(self) -> list[DraftTree]:
        requests = requests_of(self.tokens, [16, 9, 16, 12, 16], 2)
        if not self.on_device:
            return self.drafter.propose(requests)
        given = DeviceRequests.of(requests, 16, torch.device("cpu"))
        return read_trees(self.drafter.propose_on_device(given))

    def check(self, trees: list[DraftTree], **changes: Any) -> None:
        """Every node has the score that the module gives it after its branch."""

        def scores_along(r: int, before: list[int]) -> torch.Tensor:
            branch = [int(self.tokens[r][-1]), *before]
            logits = logits_along(
                self.module, self.embed, self.states[r], self.caches[r], branch, **changes
            )
            return logits.log_softmax(-1)

        check_branches(trees, scores_along, list(range(VOCAB)))


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
def test_each_branch_equals_the_chain_along_it(
    grouped: bool, on_device: bool, tmp_path: Path
) -> None:
    world = World(tmp_path, grouped, on_device)
    assert recognise_head(tmp_path).name == "assistant_tree"
    trees = world.draft()
    assert [tree.num_nodes for tree in trees] == [16, 9, 16, 12, 16]
    assert max(tree.max_depth for tree in trees) > 2
    world.check(trees)
    # Controls: a window of one token more shows, and states of another request.
    with pytest.raises(AssertionError):
        world.check(trees, window=WINDOW + 1)
    world.states = world.states.roll(1, 0)
    with pytest.raises(AssertionError):
        world.check(trees)


def written(folder: Path, **changes: Any) -> Path:
    """An assistant in the layout of the published configs, with changed fields."""
    make_assistant(folder, VOCAB, grouped=True)
    raw = json.loads((folder / "config.json").read_text())
    text = raw["text_config"]
    if "per_layer_config" not in changes:
        del text["per_layer_config"]
    text |= TEXT
    for name, value in changes.items():
        (raw if name in raw else text)[name] = value
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def test_the_layout_of_published_configs(tmp_path: Path) -> None:
    config = load_assistant(written(tmp_path), TARGET).config
    sliding = TargetCacheSpec(2, 32, 1.0, WINDOW)
    assert [layer.cache for layer in config.layers] == [sliding] * 3 + [TargetCacheSpec(1, 64, 1.0)]
    assert [layer.rotary.kind for layer in config.layers] == ["default"] * 3 + ["proportional"]
    assert config.scored_tokens == 15


_ROPE = {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in KINDS}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "gemma5_assistant"}, "model_type = 'gemma5_assistant', legal: gemma4_assist"),
    ({"text_config": 3}, "text_config = 3, legal: an object"),
    ({"backbone_hidden_size": 32}, r"target_hidden_size = 32, legal: 64 \(the target's .*use the"),
    ({"vocab_size": 360}, "vocab_size = 360, legal: 300"),
    ({"sliding_window": 512}, f"sliding_window = 512, legal: {WINDOW}"),
    ({"layer_types": ["full_attention"] * 3}, "layer_types = .* for each of the 4 layers"),
    ({"layer_types": ["chunked_attention"] * 4}, "layer_types = .*full_attention or sliding"),
    ({"hidden_activation": "silu"}, "hidden_activation = 'silu'"),
    ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0, legal: absent or None"),
    ({"tie_word_embeddings": False}, "tie_word_embeddings = False, legal: absent or True"),
    ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention = 'all', legal: absent"),
    ({"enable_moe_block": True}, "enable_moe_block = True"),
    ({"hidden_size_per_layer_input": 8}, "hidden_size_per_layer_input = 8, legal: absent or 0"),
    ({"num_key_value_heads": 3}, "num_key_value_heads of layer 0 = 3, legal: a divisor of"),
    ({"num_global_key_value_heads": 3}, "num_key_value_heads of layer 3 = 3, legal: a divisor of"),
    ({"global_head_dim": 0}, "global_head_dim = 0"),
    ({"global_head_dim": 128}, r"misshapen layers.3.self_attn.o_proj.weight"),
    ({"per_layer_config": {"3": 5}}, "per_layer_config.3 = 5, legal: an object"),
    ({"num_hidden_layers": 10**6}, "num_hidden_layers = 1000000, legal: an integer from 1 to 64"),
    ({"rope_parameters": None}, "rope_parameters.sliding_attention = None, legal: an object"),
    (
        {"rope_parameters": _ROPE | {"full_attention": {"rope_type": "yarn", "rope_theta": 1e4}}},
        "rope_parameters.full_attention.rope_type = 'yarn', legal: default or proportional",
    ),
    (
        {"rope_parameters": _ROPE | {"full_attention": {"rope_theta": 1e-300}}},
        "'rope_theta': 1e-300.*not finite",
    ),
    ({"num_centroids": 7}, "num_centroids = 7, legal: a divisor of vocab_size = 300"),
    ({"centroid_intermediate_top_k": 61}, "centroid_intermediate_top_k = 61, .*1 to 60"),
    ({"use_ordered_embeddings": False}, "unexpected masked_embedding.centroids.weight"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_what_cannot_be_served_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        load_assistant(written(tmp_path, **changes), TARGET)


@pytest.mark.usefixtures("installed")
def test_targets_without_plain_caches_are_refused(tmp_path: Path) -> None:
    target, head = make_followed_target(tmp_path, VOCAB)
    spec = {"method": "assistant_tree", "model": str(head)}
    assert engine_config(target, spec).speculative_config.plugin_method == "assistant_tree"
    with pytest.raises(ValueError, match="'assistant_tree'.* kv_cache_dtype='fp8_e4m3'"):
        engine_config(target, spec, kv_cache_dtype="fp8_e4m3")


def test_tensors_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    file = written(tmp_path) / "model.safetensors"
    tensors = load_file(file)
    # A head may ship the embedding a second time.
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, file)
    load_assistant(tmp_path, TARGET)
    other_head = {**tensors, "lm_head.weight": tensors["lm_head.weight"] + 1}
    save_file(other_head, file)
    with pytest.raises(ValueError, match="lm_head.weight differs from the embedding"):
        load_assistant(tmp_path, TARGET)
    name = "masked_embedding.token_ordering"
    for token in (-1, 7, VOCAB):
        ordering = tensors[name].clone()
        ordering[int(ordering[0] == token)] = token
        save_file({**tensors, name: ordering}, file)
        with pytest.raises(ValueError, match="token_ordering is no permutation of the 300 tokens"):
            load_assistant(tmp_path, TARGET)
    target = SimpleNamespace(hidden_size=HIDDEN, vocab_size=VOCAB)
    with pytest.raises(ValueError, match=rf"sliding_window = {WINDOW}, legal: None \(the target's"):
        load_assistant(tmp_path, target)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 4}, "= 4 in layers of sliding_attention, legal: 2 .the target's"),
        ({"num_global_key_value_heads": 2}, "= 2 in layers of full_attention, legal: 1 .the targ"),
    ],
)
@pytest.mark.usefixtures("installed")
def test_numbers_of_kv_heads_are_the_targets(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """Also on more ranks than KV heads, whose caches would not tell."""
    target, head = make_followed_target(tmp_path, VOCAB)
    spec = {"method": "assistant_tree", "model": str(head)}
    assert engine_config(target, spec).speculative_config.plugin_method == "assistant_tree"
    make_assistant(head, VOCAB, False, hidden_size=HIDDEN, **changes)
    with pytest.raises(ValueError, match=f"num_key_value_heads {message}"):
        engine_config(target, spec)


@pytest.mark.parametrize("name", published.ALL)
def test_published_configs(name: str, tmp_path: Path) -> None:
    """With their real heads in small sizes."""
    raw = published.small(published.ALL[name])
    (tmp_path / "config.json").write_text(json.dumps(raw))
    save_file(published.tensors_of(raw), tmp_path / "model.safetensors")
    config = load_assistant(tmp_path, published.target_of(raw)).config
    heads = [(layer.cache.num_kv_heads, layer.cache.window) for layer in config.layers]
    assert recognise_head(tmp_path).name == "assistant_tree"
    assert (
        heads
        == {
            "GEMMA4_E2B": [(1, 512)] * 3 + [(1, None)],
            "GEMMA4_E4B": [(2, 512)] * 3 + [(2, None)],
            "GEMMA4_12B": [(8, 1024)] * 3 + [(1, None)],
            "GEMMA4_26B_A4B": [(8, 1024)] * 3 + [(2, None)],
            "GEMMA4_31B": [(16, 1024)] * 3 + [(4, None)],
        }[name]
    )
