# SPDX-License-Identifier: Apache-2.0
"""Published DFlash2 formats mean what their trainers meant: every branch is a walk of the selector.

No published weights were read: these heads have published configs and tensor names.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.methods.absurd import refused
from tests.unit.methods.block import published
from tests.unit.methods.block.published import changed, tiny
from tests.unit.methods.block.published_heads import ANCHOR, PublishedHead
from tests.unit.methods.block.reference import selector_scores
from tests.unit.tree.candidates import paths_of
from vllm_specplug.methods.dflash2_tree.config import DFlash2Config
from vllm_specplug.registry import get_method, recognise_head

FORMATS = [
    "ZLAB_DFLASH2_QWEN38_27B",
    "INCO_DFLASH2_GLM53_FLASH",
    "MUSE_DFLASH2_GLIMMER_30B",
    "SPECULATORS_DFLASH2",
]
TOP_K = 7
ZLAB = tiny(published.ZLAB_DFLASH2_QWEN38_27B)


def logits_of(head: PublishedHead, windows: list[int | None] | None) -> torch.Tensor:
    """The block's scores [D, V], scaled and capped as the config says."""
    own = head.raw.get("dflash_config", {})
    logits = head.logits(first=1, causal=False, windows=windows) * own.get("output_multiplier", 1)
    cap = own.get("final_logit_softcapping")
    return logits if cap is None else cap * (logits / cap).tanh()


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(
    ("name", "changes"),
    # A window that is shorter than the context masks some of it.
    [*((name, {}) for name in FORMATS), (FORMATS[0], {"sliding_window": 6})],
)
def test_each_branch_is_a_walk_of_the_selector(
    name: str,
    changes: dict[str, Any],
    compiled: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    head = PublishedHead(tmp_path / "head", tiny(getattr(published, name), **changes))
    assert recognise_head(head.folder).name == "dflash2_tree"
    drafter, requests = head.drafter(get_method("dflash2_tree"))
    if not compiled:
        monkeypatch.setattr(drafter.local_tree, "weights", None)
    (tree,) = drafter.propose(requests)
    tree.validate()
    assert tree.num_nodes == 24 and tree.max_depth > 1
    windows = list(drafter.config.layer_windows)
    hidden = head.hidden(first=1, causal=False, windows=windows)
    logits = logits_of(head, windows)
    assert len(logits) == requests.depths[0] == 4

    def log_probs(branch: list[int]) -> dict[int, float]:
        """Of the candidates, whose sum is the block's probability of all of them."""
        scores = selector_scores(logits, hidden, head.tensors, TOP_K, branch)
        total = math.log(sum(math.exp(score) for score in scores.values()))
        mass = float(logits[len(branch) - 1].log_softmax(-1).topk(TOP_K).values.logsumexp(-1))
        return {token: score - total + mass for token, score in scores.items()}

    paths = paths_of(tree)
    for branch, score in paths.items():
        path = [ANCHOR, *branch]
        expected = sum(log_probs(path[:i])[path[i]] for i in range(1, len(path)))
        assert score == pytest.approx(expected, abs=1e-4), path
    # Best-first over depth, predecessor and candidate: no better node was left out.
    for branch, score in {(): 0.0, **paths}.items():
        if len(branch) == 4:
            continue
        children = log_probs([ANCHOR, *branch])
        for token in sorted(children, key=lambda t: -children[t])[: requests.width]:
            log_prob = children[token]
            assert log_prob < 1e-6
            is_child = (*branch, token) in paths
            assert is_child or score + log_prob <= min(paths.values()) + 1e-4


@pytest.mark.parametrize("compiled", [True, False])
def test_a_node_has_at_most_the_selectors_candidates(
    compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = PublishedHead(tmp_path / "head", ZLAB)
    drafter, requests = head.drafter(get_method("dflash2_tree"))
    requests = replace(requests, width=12)
    requests.budgets[0], requests.depths[0] = 24, 1
    if not compiled:
        monkeypatch.setattr(drafter.local_tree, "weights", None)
    (tree,) = drafter.propose(requests)
    likeliest = head.logits(first=1, causal=False, windows=[2048, 2048])[0].topk(TOP_K).indices
    assert set(tree.token_ids.tolist()) == set(likeliest.tolist()) and tree.num_nodes == TOP_K


def test_the_scale_of_inputs_is_that_of_other_embeddings(tmp_path: Path) -> None:
    plain = PublishedHead(tmp_path / "plain", ZLAB)
    scaled = PublishedHead(tmp_path / "scaled", changed(ZLAB, dflash_config={
        "input_embedding_scale": 2.5,
    }))  # fmt: skip
    plain.embed *= 2.5
    method, trees = get_method("dflash2_tree"), []
    for head in (plain, scaled):
        drafter, requests = head.drafter(method)
        trees.append(drafter.propose(requests)[0])
    assert trees[0].token_ids.tolist() == trees[1].token_ids.tolist()
    assert trees[0].scores == pytest.approx(trees[1].scores, abs=1e-4)


def test_values_of_the_head_are_those_in_its_container() -> None:
    raw = published.ZLAB_DFLASH2_QWEN38_27B
    config = DFlash2Config.from_dict(raw, num_target_layers=64)
    # Beside the container these are values of the target's config.
    beside = changed(raw, final_logit_softcapping=30.0)
    assert DFlash2Config.from_dict(beside, num_target_layers=64) == config
    raw = changed(raw, dflash_config={"selector_top_k": 129})
    refused(lambda: DFlash2Config.from_dict(raw), "selector_top_k = 129", "1 to 128")
    scaled = published.MUSE_DFLASH2_GLIMMER_30B
    config = DFlash2Config.from_dict(scaled, num_target_layers=52)
    assert DFlash2Config.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"conv_kernel_size": 6}, ["conv_kernel_size = 6", "1 to 5"]),
        ({"conv_group_size": 3}, ["conv_group_size = 3", "a divisor of hidden_size = 16"]),
        ({"selector_rank": "6"}, ["selector_rank = '6'", "an integer"]),
        ({"selector_top_k": 31}, ["selector_top_k = 31", "1 to 30"]),
        ({"output_multiplier": 0}, ["output_multiplier = 0", "a positive number"]),
        ({"input_embedding_scale": "2"}, ["input_embedding_scale = '2'", "a positive number"]),
        ({"final_logit_softcapping": -1}, ["final_logit_softcapping = -1", "0 or a positive"]),
        ({"projector_type": "lilicorr"}, ["projector_type = 'lilicorr'", "'dflash2'"]),
        ({"attention_mode": "mla"}, ["attention_mode = 'mla'", "'gqa'"]),
        ({"attention_sink_bias": True}, ["attention_sink_bias"]),
    ],
)  # fmt: skip
def test_illegal_values_are_named(changes: dict[str, Any], words: list[str]) -> None:
    raw = changed(ZLAB, dflash_config=changes)
    refused(lambda: DFlash2Config.from_dict(raw, num_target_layers=4), "draft head config", *words)


def test_other_methods_name_this_one(tmp_path: Path) -> None:
    head = PublishedHead(tmp_path / "head", ZLAB)
    for changes in ({}, {"architectures": ["DFlashDraftModel"]}):
        (head.folder / "config.json").write_text(json.dumps(changed(ZLAB, **changes)))
        assert recognise_head(head.folder).name == "dflash2_tree"
        with pytest.raises(ValueError, match="method dflash2_tree"):
            head.drafter(get_method("ddtree"))
