# SPDX-License-Identifier: Apache-2.0
"""float16 targets, and KV caches of 8 bits.

In float16, trees part from plain decoding at near ties alone, as in bfloat16. Over a cache of 8
bits a float32 target is compared exactly: plain decoding reads the same rounded keys and values.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from tests.e2e.families import WINDOW_PROMPTS, around_windows, diverges, engine_of, num_groups
from tests.e2e.number_formats import BFLOAT16_MARGIN, VOCAB, folder, head, scaled_target
from tests.e2e.oracle import OracleDrafter
from tests.e2e.pair import Pair, changed, generate, pair, sequences_of
from tests.e2e.requests import greedy
from tests.e2e.tiny import make_other_target, make_target
from tests.packed_weights import is_packed
from vllm_specplug.kernels.packed_linear import pack_linear, packed_linear, packs_target
from vllm_specplug.vllm_attention.cpu import TreeCPUAttentionBackendImpl

pytestmark = [pytest.mark.e2e, pytest.mark.own_process]
# Of a logprob, an eighth of what bfloat16 is given: float16 has three bits more.
MARGIN = 2.0**-8


def engines_of(target: Path | None, method: str = "oracle", **engine: Any) -> Pair:
    path = target or make_target(folder() / "plain", VOCAB)
    return pair(method, model=str(path), skip_tokenizer_init=True, **engine)


def up_to_ties(made: Pair, margin: float = MARGIN) -> None:
    """The oracle knows the plain engine's answers, so that drafts are accepted until the first
    near tie that is decided otherwise, and branch."""
    params = greedy(max_tokens=40, detokenize=False, ignore_eos=True)
    OracleDrafter.sequences = sequences_of(generate(made.plain, WINDOW_PROMPTS, params))
    counts = made.compare_up_to_ties(WINDOW_PROMPTS, 40, margin)
    assert counts.accepted > 40, counts


def test_float16_parts_at_ties_alone() -> None:
    up_to_ties(engines_of(None, dtype="float16"))


def test_float16_without_branches_is_exact() -> None:
    """vLLM's own attention verifies them."""
    made = engines_of(None, dtype="float16", speculative={"tree_width": 1})
    params = greedy(max_tokens=40, detokenize=False)
    _, counts = made.compare(WINDOW_PROMPTS, params, least_accepted=100, branching=False)
    assert not counts.branching, counts


def test_float16_would_show_missing_compaction() -> None:
    made = engines_of(None, dtype="float16")
    lost = patch.object(made.runner.tree_backend, "compact", lambda *args: None)
    with lost, pytest.raises(AssertionError, match="behind the best"):
        up_to_ties(made)


def num_packed(made: Pair) -> int:
    """Weights of the tree engine's target that are packed, but for its LM head."""
    return len(packed_layers(made))


def packed_layers(made: Pair) -> list[Any]:
    """The layers that they are of."""
    return [
        module
        for module in made.runner.model.modules()
        if hasattr(module, "cpu_linear") and is_packed(module) and not module.weight.numel()
    ]


def test_bfloat16_products_are_packed_where_the_cpu_has_them() -> None:
    """Attention's two and the MLP's two in each layer; plain decoding beside it has vLLM's own."""
    made = engines_of(None, dtype="bfloat16")
    layers = made.plain.llm_engine.model_config.hf_config.num_hidden_layers
    assert num_packed(made) == (4 * layers if packs_target("auto") else 0)
    up_to_ties(made, BFLOAT16_MARGIN)


def test_of_embeddings_those_are_packed_that_a_product_reads() -> None:
    """Tied ones in both of the ways that vLLM's models have: by their weight, and themselves."""
    if not packs_target("packed"):
        return
    tied = folder() / "tied"
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1,
             "intermediate_size": 128, "num_hidden_layers": 2}  # fmt: skip
    make_other_target(tied, "Llama", VOCAB, tie_word_embeddings=True, **sizes)
    for target, name in (
        (None, "lm_head"),
        (tied, "lm_head"),
        (Path(engine_of("Gemma2")["model"]), "embed_tokens"),
    ):
        made = engines_of(target, dtype="bfloat16", speculative={"target_products": "packed"})
        assert num_packed(made) == 8
        generate(made.tree, WINDOW_PROMPTS, greedy(max_tokens=20, detokenize=False))
        modules = made.runner.model.named_modules()
        embeddings = {n: m for n, m in modules if isinstance(m, VocabParallelEmbedding)}
        packed = [n for n, m in embeddings.items() if is_packed(m)]
        assert len(packed) == 1 and packed[0].endswith(name), (target, packed)


def _multiply(packed: Any, columns: int, x: Any, weight: Any, bias: Any) -> Any:
    return packed_linear(x, packed, columns, bias)


def test_packed_products_would_show_columns_in_the_wrong_place() -> None:
    made = engines_of(None, dtype="bfloat16")
    if num_packed(made) == 0:
        return
    for layer in packed_layers(made):
        ones = torch.eye(layer.input_size_per_partition, dtype=torch.bfloat16)
        weight = layer.cpu_linear(ones, layer.weight, None).T
        layer.cpu_linear = partial(_multiply, pack_linear(weight.roll(1, dims=0)), len(weight))
    with pytest.raises(AssertionError, match="behind the best"):
        made.compare_up_to_ties(WINDOW_PROMPTS, 40, BFLOAT16_MARGIN)


def test_products_are_left_to_vllm_where_it_is_asked() -> None:
    made = engines_of(None, dtype="bfloat16", speculative={"target_products": "vllm"})
    assert num_packed(made) == 0
    exact = engines_of(None, dtype="float32")
    assert num_packed(exact) == 0


def scale_left_out(which: str) -> Any:
    """Tree rows that take `key_scale` or `value_scale` for 1."""
    return changed(
        TreeCPUAttentionBackendImpl,
        "cache_scales",
        lambda stock, *args: {**stock(*args), which: 1.0},
    )


def have_fp8() -> bool:
    """vLLM serves them with AVX-512 alone."""
    return torch.cpu._is_avx512_supported()


def test_fp8_caches_with_scales() -> None:
    if not have_fp8():
        return
    made = engines_of(scaled_target())
    layer = next(iter(made.runner.state.target_caches().values()))
    assert layer.dtype == torch.uint8
    around_windows(made)
    for which in ("key_scale", "value_scale"):
        with scale_left_out(which):
            diverges(made)
    with patch.object(made.runner.tree_backend, "compact", lambda *args: None):
        diverges(made)


def test_fp8_caches_in_groups() -> None:
    """Also where vLLM leaves the layers with windows as they are."""
    if not have_fp8():
        return
    for skipped in ([], ["sliding_window"]):
        made = pair(
            "oracle",
            **engine_of("Gemma3Text"),
            kv_cache_dtype="fp8",
            kv_cache_dtype_skip_layers=skipped,
        )
        assert num_groups(made) > 1
        dtypes = {c.dtype for c in made.runner.state.target_caches().values()}
        assert len(dtypes) == 1 + bool(skipped), dtypes
        around_windows(made)


def test_fp8_caches_beside_others_in_a_group() -> None:
    if not have_fp8():
        return
    made = engines_of(None, kv_cache_dtype="fp8", kv_cache_dtype_skip_layers=["0"])
    assert num_groups(made) == 1
    dtypes = [c.dtype for c in made.runner.state.target_caches().values()]
    assert sorted(map(str, dtypes)) == ["torch.float32", "torch.uint8"], dtypes
    around_windows(made)


def test_draft_heads_beside_fp8_caches() -> None:
    """A head's own keys and values keep the model's dtype."""
    if not have_fp8():
        return
    for cache in ("fp8", "fp8_e5m2"):
        made = engines_of(None, "jetspec", kv_cache_dtype=cache, speculative={"model": str(head())})
        made.compare(WINDOW_PROMPTS, greedy(max_tokens=40, detokenize=False))
