# SPDX-License-Identifier: Apache-2.0
"""Tree attention whose context is another kernel's work, in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.kernels.device_trees import DeviceTrees
from tests.kernels.flash_attention import EMPTY, Attention

pytest.importorskip("triton")

from vllm_specplug.kernels import AttnFeatures, tree_attn_flash

pytestmark = pytest.mark.usefixtures("interpreter")


def run(
    problem: DeviceTrees, monkeypatch: pytest.MonkeyPatch, attention: Any,
    features: AttnFeatures | None = None,
) -> torch.Tensor:  # fmt: skip
    """Output of trees side by side, which follow rows of another request."""
    monkeypatch.setattr(tree_attn_flash, "context_attention", lambda head_dim, capped: attention)
    meta = problem.metadata()
    order = torch.cat(
        [torch.arange(s, s + n) for s, n in zip(problem.starts, problem.rows, strict=True)]
    )
    query = torch.cat([problem.asked[:3], problem.asked[order]])
    starts = torch.tensor([0, *problem.rows]).cumsum(0).int() + 3
    meta.plan[0] = torch.arange(len(problem.rows)).int()
    meta.plan[1] = starts[:-1]
    meta.block_table = problem.block_table[1:].contiguous()
    meta.query_starts = starts
    output = torch.full(query.shape, 7.0)
    tree_attn_flash.tree_attn_flash(
        query, problem.key_cache, problem.value_cache, output, meta, problem.scale,
        features=features or problem.features, **problem.tail,
    )  # fmt: skip
    assert (output[:3] == 7.0).all(), "a row of no tree was written"
    return output[3:].double()


@pytest.mark.parametrize("empty", EMPTY)
@pytest.mark.parametrize(
    "options",
    [
        {"group": 3, "head_dim": 24},
        {"dense": True, "mask": "full"},
        {"dense": True, "mask": "causal", "kv_heads": 2},
    ],
    ids=["tree", "full", "causal"],
)
def test_context_and_tree_make_one_softmax(monkeypatch, empty: str, options: dict[str, Any]):
    problem = DeviceTrees([(40, 20), (0, 9), (17, 0), (300, 66)], **options)
    attention = Attention(empty)
    output = run(problem, monkeypatch, attention)
    assert (output - torch.cat(problem.expected())).abs().max() < 1e-5
    assert attention.calls == 1


SINKS = torch.tensor([1.5, -2.0, 90.0, -90.0])
# Features, and whether FlashAttention reads the context.
FEATURES = {
    "soft cap": (AttnFeatures(soft_cap=0.7), True),
    "sinks": (AttnFeatures(sinks=SINKS), True),
    "soft cap and sinks": (AttnFeatures(soft_cap=0.7, sinks=SINKS), True),
    "window": (AttnFeatures(window=20, sinks=SINKS), False),
    "alibi": (AttnFeatures(alibi_slopes=torch.tensor([0.1, 0.2, 0.3, 0.4])), False),
    "cache": (AttnFeatures(key_scales=torch.tensor(0.4), value_scales=torch.tensor(0.3)), False),
}


@pytest.mark.parametrize("name", FEATURES)
def test_features_are_served_by_whom_can(monkeypatch, name: str):
    features, asked = FEATURES[name]
    problem = DeviceTrees([(40, 20), (0, 9), (33, 0)], group=4, features=features)
    attention = Attention("FA2")
    output = run(problem, monkeypatch, attention)
    assert (output - torch.cat(problem.expected())).abs().max() < 1e-5
    assert attention.calls == int(asked)


@pytest.mark.parametrize("change", [{"soft_cap": 0.0}, {"sinks": None}])
def test_a_feature_left_out_is_noticed(monkeypatch, change: dict[str, Any]):
    features = FEATURES["soft cap and sinks"][0]
    problem = DeviceTrees([(40, 20), (0, 9)], group=4, features=features)
    output = run(problem, monkeypatch, Attention(), replace(features, **change))
    assert (output - torch.cat(problem.expected())).abs().max() > 1e-2


def test_a_lost_log_sum_exp_is_noticed(monkeypatch):
    """The control: the context counts as much as its softmax sum says."""
    problem = DeviceTrees([(40, 20)])
    attention = Attention()

    def base_two(**arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = attention(**arguments)
        return out, lse * 1.4427

    output = run(problem, monkeypatch, base_two)
    assert (output - torch.cat(problem.expected())).abs().max() > 1e-2


def test_trees_apart_are_left_to_triton_alone(monkeypatch):
    problem = DeviceTrees([(40, 5), (3, 2)])
    monkeypatch.setattr(tree_attn_flash, "context_attention", None)
    problem.check(kernel=tree_attn_flash.tree_attn_flash)


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        ((100, torch.bfloat16, 16), "head_dim 100"),
        ((512, torch.bfloat16, 16), "head_dim 512"),
        ((64, torch.float32, 16), "float32"),
        ((64, torch.float16, 8), "pages of 8"),
        ((64, torch.float16, 48), None),
    ],
)
def test_what_it_does_not_take(shape: tuple[Any, ...], why: str | None):
    problem = tree_attn_flash.unsupported_reason(*shape)
    assert problem is None if why is None else why in str(problem)


def test_layers_of_one_shape_share_a_schedule(monkeypatch):
    problem = DeviceTrees([(40, 20), (0, 9)])
    asked: list[dict[str, Any]] = []

    def scheduler(**arguments: Any) -> torch.Tensor:
        asked.append(arguments)
        return torch.tensor(len(asked))

    monkeypatch.setattr(tree_attn_flash, "context_scheduler", lambda head_dim, capped: scheduler)
    meta = problem.metadata()
    meta.query_starts = torch.tensor([0, *problem.rows]).cumsum(0).int()
    query, narrow = problem.asked, problem.asked[:, : problem.asked.shape[1] // 2]

    def schedule(rows: torch.Tensor, capped: bool = False) -> int:
        made = tree_attn_flash._schedule(rows, problem.key_cache, meta, capped, 0)
        assert made is not None
        return int(made)

    assert [schedule(query), schedule(query), schedule(narrow), schedule(query, True)] == [
        1,
        1,
        2,
        3,
    ]
    assert asked[0]["cache_seqlens"].tolist() == [40, 0] and asked[0]["max_seqlen_q"] == 21
    monkeypatch.setattr(tree_attn_flash, "context_scheduler", lambda head_dim, capped: None)
    assert tree_attn_flash._schedule(query, problem.key_cache, meta, False, 0) is None
