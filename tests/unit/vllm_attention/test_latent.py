# SPDX-License-Identifier: Apache-2.0
"""Layers with multi-head latent attention: which are served, and how a step is divided."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonDecodeMetadata,
    MLACommonMetadata,
    MLACommonPrefillMetadata,
)
from vllm.model_executor.layers.fused_moe import MoERunner
from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper
from vllm.v1.attention.backends.mla.amx_mla import AMXMLABackend
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl

from vllm_specplug.tree.step_trees import StepTrees
from vllm_specplug.vllm_attention.latent import (
    LatentRequest,
    TreeCPUMLABackend,
    TreeCPUMLAImpl,
    attach_latent_rows,
    attach_warmup_rows,
    spans_of,
)
from vllm_specplug.vllm_attention.layer_support import check_target_layers
from vllm_specplug.vllm_attention.tree_rows import tree_rows_of
from vllm_specplug.vllm_v2.latent_backend import latent_requests
from vllm_specplug.vllm_worker.target.latent_layers import (
    check_compiled_routing,
    check_latent_rotary,
)

HEADS, NOPE, ROTARY = 3, 8, 4


def bare(cls: type[torch.nn.Module], **attributes: Any) -> Any:
    """A module of vLLM's with these attributes, and nothing built."""
    module = cls.__new__(cls)
    torch.nn.Module.__init__(module)
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def layer(**changed: Any) -> Any:
    attributes = {
        "num_heads": HEADS, "num_kv_heads": 1, "head_size": 576, "indexer": None,
        "sliding_window": None, "use_sparse": False, "non_causal_multi_token_decode": False,
        "attn_backend": TreeCPUMLABackend, "impl": object.__new__(TreeCPUMLAImpl),
    }  # fmt: skip
    return bare(MLAAttention, **{**attributes, **changed})


def test_vllms_cpu_layers_are_served() -> None:
    check_target_layers({"a": layer(), "b": layer()}, "ngram_tree")


@pytest.mark.parametrize(
    ("changed", "feature"),
    [
        ({"impl": object.__new__(CPUMLAImpl)}, "attention backend TreeCPUMLABackend with CPUMLAI"),
        ({"attn_backend": CPUMLABackend}, "by CPUMLABackend.*--attention-backend CPU_MLA"),
        ({"attn_backend": AMXMLABackend}, "by AMXMLABackend.*TRITON_MLA, FLASHMLA.* on CUDA"),
        ({"attn_backend": type("Mine", (TreeCPUMLABackend,), {})}, "attention backend Mine"),
        ({"sliding_window": 64}, "a sliding window"),
        ({"indexer": object()}, "sparse attention, by an index"),
        ({"use_sparse": True}, "sparse attention"),
        ({"non_causal_multi_token_decode": True}, "both directions"),
        ({"num_heads": 5}, r"another latent cache than .a"),
    ],
)
def test_each_feature_is_refused_by_layer_and_name(changed: dict[str, Any], feature: str) -> None:
    with pytest.raises(ValueError, match=f"'ngram_tree' .*layer 'b' has .*{feature}"):
        check_target_layers({"a": layer(), "b": layer(**changed)}, "ngram_tree")


def by_position(positions: torch.Tensor, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(part * positions[:, None, None] for part in parts)


def by_place(positions: torch.Tensor, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
    query, key = by_position(positions, *parts)
    return query * torch.arange(1, len(positions) + 1)[:, None, None], key


@pytest.mark.parametrize("turn", [by_position, by_place])
def test_what_turns_queries_by_their_place_is_refused(turn: Any) -> None:
    class Rotary(torch.nn.Module):
        cos_sin_cache = torch.zeros(1)

        def forward(self, *args: Any) -> Any:
            return turn(*args)

    def wrapper(rotary: Any) -> Any:
        return bare(
            MultiHeadLatentAttentionWrapper, rotary_emb=rotary, mla_attn=layer(), num_heads=HEADS,
            qk_head_dim=NOPE + ROTARY, qk_nope_head_dim=NOPE, qk_rope_head_dim=ROTARY,
        )  # fmt: skip

    # Layers may have none.
    model = torch.nn.ModuleList([wrapper(None), wrapper(Rotary())])
    if turn is by_position:
        check_latent_rotary(model, "ngram_tree")
        return
    with pytest.raises(ValueError, match=r"layer '1' \(Rotary\).*custom_ops.*none"):
        check_latent_rotary(model, "ngram_tree")


def test_layers_outside_of_vllms_wrapper_are_refused() -> None:
    model = torch.nn.ModuleList([bare(torch.nn.Module, attention=layer())])
    with pytest.raises(ValueError, match="layer '0.attention' cannot be tested"):
        check_latent_rotary(model, "ngram_tree")


def test_experts_by_other_scores_than_a_softmax_are_refused_when_compiled() -> None:
    def experts(scoring: str | None, bias: torch.Tensor | None = None) -> Any:
        router = SimpleNamespace(scoring_func=scoring, e_score_correction_bias=bias)
        return bare(MoERunner, router=router)

    known = experts("softmax")
    check_compiled_routing(torch.nn.ModuleList([known]), "ngram_tree")
    others = {
        "'sigmoid' and no bias": experts("sigmoid"),
        "'softmax' and a bias": experts("softmax", torch.zeros(2)),
        "None and no bias": bare(MoERunner, router=object()),
    }
    for named, other in others.items():
        model = torch.nn.ModuleList([known, other])
        with pytest.raises(ValueError, match=f"layer '1' .*={named}.*enforce_eager=True"):
            check_compiled_routing(model, "ngram_tree")


def metadata(counts: list[int], num_decodes: int) -> Any:
    """vLLM's of a batch of requests with so many rows; the first ones are single."""
    starts = torch.tensor([0, *np.cumsum(counts[num_decodes:])], dtype=torch.int32)
    table = torch.arange(len(counts) * 4, dtype=torch.int32).view(-1, 4)
    prepared: list[Any] = []
    prefill = MLACommonPrefillMetadata(
        block_table=table[num_decodes:],
        query_start_loc=starts,
        max_query_len=max(counts),
        chunked_context=object(),  # type: ignore[arg-type]
        prefill_backend=SimpleNamespace(prepare_metadata=prepared.append),  # type: ignore[arg-type]
        query_lens_cpu=torch.tensor(counts[num_decodes:]),
    )
    decode = MLACommonDecodeMetadata(table[:num_decodes], torch.tensor([9] * num_decodes), None)
    made: Any = MLACommonMetadata(
        num_reqs=len(counts),
        max_query_len=max(counts),
        max_seq_len=99,
        num_actual_tokens=sum(counts),
        query_start_loc=torch.empty(0),
        slot_mapping=torch.empty(0),
        num_decodes=num_decodes,
        num_decode_tokens=num_decodes,
        num_prefills=len(counts) - num_decodes,
        prefill=prefill if len(counts) > num_decodes else None,
        decode=decode if num_decodes else None,
    )
    made.prepared = prepared
    return made


TREE = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)


def requests(*sizes: tuple[int, int, int]) -> list[LatentRequest]:
    """Of (rows before the root, rows from it on, tokens in the cache)."""
    made, row = [], 0
    for before, rows, computed in sizes:
        mask = TREE if rows == 3 else None
        made.append(LatentRequest(row, row + before, row + before + rows, computed, mask))
        row += before + rows
    return made


@pytest.mark.parametrize("num_decodes", [0, 1])
def test_requests_that_go_on_are_decoded_and_prompts_are_left(num_decodes: int) -> None:
    # A single row, a tree, a tree behind the end of its prompt, a line, two prompts.
    batch = requests((0, 1, 9), (0, 3, 5), (2, 3, 7), (0, 2, 4), (5, 1, 0), (6, 1, 0))
    step = metadata([r.end_row - r.first_row for r in batch], num_decodes)
    other = SimpleNamespace()
    attach_latent_rows({"a": step, "b": step, "draft": other}, batch)
    assert tree_rows_of(other) is None
    rows: Any = tree_rows_of(step)
    spans = [(s.request, s.first_row, s.num_rows, s.context) for s in rows.spans]
    assert spans[1 - num_decodes :] == [(1, 1, 3, 5), (2, 4, 2, 7), (2, 6, 3, 9), (3, 9, 2, 4)]
    assert [s.mask.sum().item() for s in rows.spans][1 - num_decodes :] == [5, 3, 5, 3]
    assert rows.num_single == num_decodes and len(rows.block_table) == 6
    assert (step.num_decodes, step.num_decode_tokens, step.num_prefills) == (4, 11, 2)
    assert len(step.decode.block_table) == len(step.decode.seq_lens) == num_decodes
    assert step.prepared == [step.prefill] and step.prefill.chunked_context is None
    assert step.prefill.query_start_loc.tolist() == [0, 6, 13]
    assert step.prefill.query_lens_cpu.tolist() == [6, 7]
    assert torch.equal(step.prefill.block_table, rows.block_table[4:])


def test_a_prompt_before_a_request_that_goes_on_is_decoded_too() -> None:
    batch = requests((4, 1, 0), (0, 3, 5))
    step = metadata([5, 3], 0)
    attach_latent_rows({"a": step}, batch)
    rows: Any = tree_rows_of(step)
    assert [(s.first_row, s.num_rows, s.context) for s in rows.spans] == [
        (0, 4, 0), (4, 1, 4), (5, 3, 5),
    ]  # fmt: skip
    assert step.prefill is None and step.num_decode_tokens == 8


@pytest.mark.parametrize(("sizes", "num_decodes"), [([(0, 1, 9)] * 2, 2), ([(4, 1, 0)], 0)])
def test_single_rows_and_prompts_alone_are_vllms(sizes: Any, num_decodes: int) -> None:
    step = metadata([before + rows for before, rows, _ in sizes], num_decodes)
    attach_latent_rows({"a": step}, requests(*sizes))
    assert tree_rows_of(step) is None and step.num_decodes == num_decodes and not step.prepared


@pytest.mark.parametrize(("counts", "num_decodes"), [([1] * 7, 7), ([4, 3], 0)])
def test_warmup_rows_are_trees_over_the_context(counts: list[int], num_decodes: int) -> None:
    step = metadata(counts, num_decodes)
    attach_warmup_rows({"a": step}, 7, 5, context=30, block_size=8)
    rows: Any = tree_rows_of(step)
    # The table has room for 32 tokens.
    spans = [(s.request, s.first_row, s.num_rows, s.context) for s in rows.spans]
    assert spans == [(0, 0, 5, 27), (1, 5, 2, 30)]
    assert rows.num_single == 0 and step.num_decode_tokens == 7 and step.prefill is None


def test_rows_of_a_prompt_before_their_root_are_a_span() -> None:
    """A request of one row, and one of two rows and a tree of four nodes."""
    rows: Any = SimpleNamespace(
        starts=torch.tensor([0, 1, 6]), offsets=torch.tensor([0, 0, 1, 2, 3, 4]), max_rows=5,
        contexts=torch.tensor([4, 9]),
    )  # fmt: skip
    above = torch.tensor([0, 1, 1, 2, 2, 1])
    trees = StepTrees(rows, None, None, above)  # type: ignore[arg-type]
    batch = SimpleNamespace(query_start_loc_np=np.array([0, 1, 8]))
    spans = spans_of(enumerate(latent_requests(batch, trees)))
    tree = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 0, 0, 1]]
    found = [(s.request, s.first_row, s.context, s.mask.int().tolist()) for s in spans]
    assert found == [(0, 0, 4, [[1]]), (1, 1, 7, [[1, 0], [1, 1]]), (1, 3, 9, tree)]
