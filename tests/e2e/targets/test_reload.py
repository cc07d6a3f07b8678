# SPDX-License-Identifier: Apache-2.0
"""Weights that are replaced while an engine lives: the target's are then those of the new
checkpoint in every form, and drafters read them too."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

from tests.e2e import tiny
from tests.e2e.mimo import make_mimo_target
from tests.e2e.number_formats import BFLOAT16_MARGIN
from tests.e2e.oracle import OracleDrafter
from tests.e2e.pair import Drafted, Pair, generate, make_engine, sequences_of, watch_drafts
from tests.e2e.requests import greedy
from tests.packed_weights import is_packed
from vllm_specplug.kernels.packed_linear import packs_target

pytestmark = [pytest.mark.e2e, pytest.mark.own_process]


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


class _FromDisk(NCCLWeightTransferEngine):
    """Reads what a trainer would send from its checkpoint."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.model.load_weights(_tensors(update_info["folder"]))


def _tensors(path: str) -> Iterator[tuple[str, torch.Tensor]]:
    return iter(load_file(Path(path) / "model.safetensors").items())


WeightTransferEngineFactory.register_engine("from_disk", _FromDisk)


def packed_layers(made: Pair) -> list[str]:
    modules = made.runner.get_model().named_modules()
    return [name for name, m in modules if hasattr(m, "cpu_linear") and is_packed(m)]


@pytest.mark.parametrize(
    ("kind", "engine"),
    [
        ("tied", {}),
        ("untied", {}),
        pytest.param("tied", {"enforce_eager": False}, marks=pytest.mark.full),
    ],
)
def test_packed_weights_are_those_of_the_new_checkpoint(kind: str, engine: dict[str, Any]) -> None:
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


def test_tied_lm_heads_are_new_where_products_are_vllms() -> None:
    """vLLM itself keeps the old one in a packed copy."""
    tree = engine_of("oracle", target_of("tied", 0))
    reload(tree, target_of("tied", 1))
    made = Pair(engine_of(None, target_of("tied", 1)), tree)
    made.watch()
    made.compare(PROMPTS, PARAMS, least_accepted=40)


def test_rollouts_between_weight_updates() -> None:
    """A trainer sends new weights again and again, also while requests run."""
    way, own = WAYS["untied"]
    made = Pair(*(engine_of(method, target_of("untied", 0), **own) for method in (None, "oracle")))
    made.watch()
    expected = None
    for seed in (1, 2, 1):
        for llm in (made.plain, made.tree):
            engine = llm.llm_engine
            for i, prompt in enumerate(PROMPTS):
                engine.add_request(f"{seed}-{i}", {"prompt_token_ids": prompt}, PARAMS)
            for _ in range(4):
                engine.step()
            way(llm, target_of("untied", seed))
            while engine.has_unfinished_requests():
                engine.step()
            assert llm.reset_prefix_cache()
        before = expected
        expected, _ = made.compare(PROMPTS, PARAMS, least_accepted=40)
        expected = sequences_of(expected)
        assert expected != before, "the weights are those before the update"


def test_updates_of_the_head_are_refused() -> None:
    llm = engine_of("oracle", target_of("untied", 0), **WAYS["untied"][1])
    with pytest.raises(RuntimeError, match="no draft model is configured"):
        llm.collective_rpc("start_draft_weight_update")
    WAYS["untied"][0](llm, target_of("untied", 1))


def _without(path: Path, name: str) -> Path:
    """A head's folder less one tensor, for which it takes the target's."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})
    return path


def _local_head(path: Path) -> Path:
    """A local head that has neither inputs nor outputs of its own."""
    from vllm_specplug.methods.dels.checkpoint import save_local_head
    from vllm_specplug.methods.local.head import LocalHead, LocalHeadConfig

    torch.manual_seed(2)
    config = LocalHeadConfig(
        kind="gru", vocab_size=VOCAB, target_hidden_size=64, rank=16, hidden_size=32,
        parameterization="target_factorized", lm_head_mode="target_lm_head", alpha=1.0, beta=0.0,
    )  # fmt: skip
    head = LocalHead(config)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(std=0.5)
    save_local_head(path, head, dtype=torch.float32)
    return path


@cache
def head_of(method: str) -> dict[str, Any]:
    path = folder() / method
    if method in ("jetspec", "dels"):
        head = tiny.make_head(path, VOCAB, causal=method == "jetspec")
        options = {"model": str(_without(head, "mask_embedding"))}
        if method == "dels":
            options |= {"local_head": str(_local_head(path / "local"))}
        return options
    if method == "eagle3_tree":
        head = tiny.make_eagle3_head(path, VOCAB, draft_vocab_size=VOCAB - 40)
        return {"model": str(_without(head, "lm_head.weight"))}
    if method == "longspec":
        return {"model": str(tiny.make_longspec_head(path, VOCAB))}
    if method == "tokenswift":
        heads = tiny.make_tokenswift_heads(path, VOCAB)
        return {"model": str(heads), "draft_source": "heads"}
    return {}


def drafts_of(llm: Any) -> dict[tuple[int, ...], Drafted]:
    """What is drafted after each text of a run."""
    with watch_drafts(llm) as seen:
        generate(llm, PROMPTS, PARAMS)
    assert sum(len(tokens) for tokens, *_ in seen.values()) > 100
    return seen


@pytest.mark.parametrize(
    ("method", "kind", "engine"),
    [
        *((name, "untied", {}) for name in (
            "jetspec", "dels", "eagle3_tree", "longspec", "tokenswift"
        )),
        # Of a class that hands states of layers over through buffers, which vLLM takes out while
        # it reloads.
        ("jetspec", "hooked", {}),
        ("mtp_tree", "mimo", {"trust_remote_code": True}),
    ],
)  # fmt: skip
def test_drafters_follow(method: str, kind: str, engine: dict[str, Any]) -> None:
    """What is drafted after a reload is what an engine drafts that began with those weights."""
    speculative = {**head_of(method), "ngram_topk": 0}
    ours, fresh = (
        engine_of(method, target_of(kind, seed), speculative=speculative, **engine)
        for seed in (0, 1)
    )
    before, expected = drafts_of(ours), drafts_of(fresh)
    reload(ours, target_of(kind, 1))
    after = drafts_of(ours)
    assert after == expected and after != before
