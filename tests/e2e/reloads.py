# SPDX-License-Identifier: Apache-2.0
"""Weights that are replaced while an engine lives."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import tiny
from tests.e2e.mimo import make_mimo_target
from tests.e2e.number_formats import BFLOAT16_MARGIN
from tests.e2e.oracle import OracleDrafter
from tests.e2e.pair import Pair, generate, make_engine, sequences_of
from tests.e2e.requests import greedy
from tests.packed_weights import is_packed
from vllm_specplug.kernels.packed_linear import packs_target

VOCAB = 300
PROMPTS = [[(37 * i + 11 * n) % 290 + 5 for i in range(n)] for n in (5, 9, 17, 30)]
PARAMS = greedy(max_tokens=30, detokenize=False, ignore_eos=True)
TIED = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1,
        "intermediate_size": 128, "num_hidden_layers": 2, "tie_word_embeddings": True}  # fmt: skip


@cache
def folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="specplug-reload-"))


@cache
def target_of(kind: str, seed: int) -> Path:
    path = folder() / f"{kind}-{seed}"
    if kind == "tied":
        return tiny.make_other_target(path, "Llama", VOCAB, seed=seed, **TIED)
    if kind == "hooked":
        return tiny.make_other_target(
            path, "GPT2", VOCAB, seed=seed, n_embd=64, n_head=2, n_layer=2, n_positions=512
        )
    if kind == "mimo":
        return make_mimo_target(path, VOCAB, seed=seed)
    return tiny.make_target(path, VOCAB, seed=seed)


# Engines of one process share vLLM's groups of processes, which end with the first that is dropped.
_kept: list[Any] = []


def engine_of(method: str | None, target: Path, **engine: Any) -> Any:
    made = make_engine(method, model=str(target), skip_tokenizer_init=True, **engine)
    _kept.append(made)
    return made


def reload(llm: Any, target: Path) -> None:
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(target)})


def update(llm: Any, target: Path) -> None:
    """As a trainer does it that sends weights."""
    llm.collective_rpc("start_weight_update")
    llm.collective_rpc("update_weights", kwargs={"update_info": {"folder": str(target)}})
    llm.collective_rpc("finish_weight_update")


WAYS: dict[str, tuple[Callable[[Any, Path], None], dict[str, Any]]] = {
    "tied": (reload, {}),
    "untied": (update, {"weight_transfer_config": {"backend": "from_disk"}}),
}


def packed_layers(made: Pair) -> list[str]:
    modules = made.runner.get_model().named_modules()
    return [name for name, m in modules if hasattr(m, "cpu_linear") and is_packed(m)]


def packed_weights_follow(kind: str, **engine: Any) -> None:
    """`engine` has more arguments of the engine with trees."""
    if not packs_target("packed"):
        pytest.skip("this CPU has no AVX2")
    way, own = WAYS[kind]
    plain = engine_of(None, target_of(kind, 1), dtype="bfloat16")
    tree = engine_of("oracle", target_of(kind, 0), dtype="bfloat16", **own, **engine,
                     speculative={"target_products": "packed"})  # fmt: skip
    made = Pair(plain, tree)
    made.watch()
    packed = packed_layers(made)
    assert len(packed) == 9
    # Twice: what was put back in place of a packed weight is replaced again.
    for seed in (0, 1):
        way(tree, target_of(kind, seed))
        assert packed_layers(made) == packed
    OracleDrafter.sequences = sequences_of(generate(plain, PROMPTS, PARAMS))
    counts = made.compare_up_to_ties(PROMPTS, 30, BFLOAT16_MARGIN)
    assert counts.accepted > 40, counts
