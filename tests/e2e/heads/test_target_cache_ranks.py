# SPDX-License-Identifier: Apache-2.0
"""Heads that read the target's caches, on two ranks that have half of its KV heads each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.e2e.assistants import HIDDEN, make_assistant, make_followed_target
from tests.e2e.families import SIZES
from tests.e2e.harness import EngineResult, assert_drafted, run_engine
from tests.e2e.tiny import make_other_target
from tests.e2e.tiny_engine import tiny_engine
from vllm_specplug.methods.longspec.checkpoint import save_longspec_head
from vllm_specplug.methods.longspec.config import LongSpecConfig
from vllm_specplug.methods.longspec.head import LongSpecHead
from vllm_specplug.methods.longspec.train.objective import init_longspec_from_target
from vllm_specplug.train.target import TargetWeights

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("target_cache_ranks")]

VOCAB = 40
_COMMON = {"max_tokens": 40, "ignore_eos": True, "detokenize": False}
PROMPTS = [[(7 * i * i + 3 * i + n) % 30 + 5 for i in range(n)] for n in (4, 15, 33, 70)]
CALLS = [
    {"prompts": PROMPTS, "params": {**_COMMON, "temperature": 0.0}},
    {"prompts": PROMPTS, "params": {**_COMMON, "temperature": 0.8, "seed": 7}},
]


@torch.no_grad()
def _copied(folder: Path) -> tuple[Path, Path]:
    """A target of one layer, and a LongSpec layer that computes the same but for the keys of the
    drafted tokens, which are in no cache."""
    target = make_other_target(
        folder / "target", "Llama", VOCAB, hidden_size=64, intermediate_size=128, head_dim=32,
        num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=512, tie_word_embeddings=False,
    )  # fmt: skip
    weights = TargetWeights(target)
    head = LongSpecHead(LongSpecConfig.for_target(weights.config, window_size=32))
    init_longspec_from_target(head, weights)
    head.self_attn.o_proj.weight.zero_()
    save_longspec_head(folder / "head", head, dtype=torch.float32)
    return target, folder / "head"


@torch.no_grad()
def _copied_assistant(folder: Path) -> tuple[Path, Path]:
    """As `_copied`, for Gemma 4 and an assistant."""
    sizes = SIZES["Gemma4Text"] | {
        "num_hidden_layers": 1, "layer_types": ["full_attention"], "num_kv_shared_layers": 0,
        "per_layer_config": {0: {"head_dim": 64, "num_key_value_heads": 2}},
        "hidden_size_per_layer_input": 0, "sharp": 1.0,
    }  # fmt: skip
    target = make_other_target(folder / "target", "Gemma4Text", VOCAB, **sizes)
    make_assistant(
        folder / "head", VOCAB, grouped=False, hidden_size=HIDDEN, num_hidden_layers=1,
        intermediate_size=sizes["intermediate_size"], num_attention_heads=2,
        num_global_key_value_heads=2, num_kv_shared_layers=1, layer_types=["full_attention"],
    )  # fmt: skip
    file = folder / "head" / "model.safetensors"
    theirs, own = load_file(target / "model.safetensors"), load_file(file)
    own |= {name: theirs[name].clone() for name in own if name in theirs}
    own["pre_projection.weight"].zero_()[:, :HIDDEN] = torch.eye(HIDDEN)
    save_file(own, file, metadata={"format": "pt"})
    return target, folder / "head"


def _followed(folder: Path) -> tuple[Path, Path]:
    """Layers of two KV heads, and of one, of which both ranks have a copy."""
    return make_followed_target(folder, VOCAB)


@pytest.mark.parametrize(
    ("method", "make"),
    [
        ("longspec", _copied),
        pytest.param("assistant_tree", _copied_assistant, marks=pytest.mark.full),
        pytest.param("assistant_tree", _followed, marks=pytest.mark.full),
    ],
)
def test_two_ranks_draft_as_one(
    method: str, make: Callable[[Path], tuple[Path, Path]], tmp_path: Path
) -> None:
    """The control: heads in another order are as lossless, and accepted less often."""
    target, head = make(tmp_path)
    engine = {**tiny_engine(target), "num_gpu_blocks_override": 128}
    speculative = {
        "method": method, "model": str(head), "num_speculative_tokens": 12, "tree_budget": 12,
        "ngram_topk": 0, "max_step_rows": 512,
    }  # fmt: skip

    def drafted(num_ranks: int, *sabotage: str) -> EngineResult:
        ranks: dict[str, Any] = {**engine, "tensor_parallel_size": num_ranks}
        return run_engine(
            ranks, CALLS, speculative=speculative, sabotage=sabotage, own_processes=True
        )

    one, two, mixed = drafted(1), drafted(2), drafted(2, "heads")
    plain = run_engine({**engine, "tensor_parallel_size": 2}, CALLS, own_processes=True)
    for call in range(len(CALLS)):
        for tree in (one, two, mixed):
            assert tree.token_ids(call) == plain.token_ids(call)
    assert_drafted(two, least_acceptance=0.04)
    assert (two.drafted, two.accepted) == (one.drafted, one.accepted)
    assert (mixed.drafted, mixed.accepted) != (two.drafted, two.accepted)
    if make is not _followed:
        # There, drafts depend little on the context.
        assert mixed.accepted / mixed.drafted < 0.8 * two.accepted / two.drafted
