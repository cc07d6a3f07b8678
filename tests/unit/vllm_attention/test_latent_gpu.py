# SPDX-License-Identifier: Apache-2.0
"""vLLM's MLA backends on CUDA with trees: which there are, and which rows they decode."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")
pytest.importorskip("triton")

from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadata, QueryLenSupport
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.mla.triton_mla import TritonMLABackend, TritonMLAImpl

from vllm_specplug.kernels.cuda_contract import FULL_GRAPHS_VARIABLE
from vllm_specplug.seams.listing_attention import ATTENTION_BACKENDS, LATENT_SEAMS
from vllm_specplug.seams.seam import Register
from vllm_specplug.vllm_attention import latent_gpu
from vllm_specplug.vllm_attention.latent_gpu import (
    LATENT_BACKENDS,
    RaggedDecodesMixin,
    TreeMLAImplMixin,
    latent_metadata,
)
from vllm_specplug.vllm_attention.tree_rows import DeviceTreeRows
from vllm_specplug.vllm_v2.latent_device import LatentDeviceBackend
from vllm_specplug.vllm_worker.cuda_kernels import StepLimits
from vllm_specplug.vllm_worker.target.attention_backend import claim_attention_backend


def test_backends_are_made_when_they_are_asked_for() -> None:
    made = latent_gpu.TRITON_MLA
    assert made is latent_gpu.TRITON_MLA and issubclass(made, TritonMLABackend)
    assert vars(made)["takes_tree_rows"] and made.get_name() == "TRITON_MLA"
    assert issubclass(made.get_impl_cls(), TreeMLAImplMixin)
    assert issubclass(made.get_impl_cls(), TritonMLAImpl)
    assert issubclass(made.get_builder_cls(), RaggedDecodesMixin)
    with pytest.raises(AttributeError, match="TOKENSPEED_MLA"):
        _ = latent_gpu.TOKENSPEED_MLA


def test_each_is_registered() -> None:
    registered = [s.target.rpartition(".")[2] for s in LATENT_SEAMS["cuda"].seams
                  if isinstance(s, Register)]  # fmt: skip
    assert tuple(registered) == LATENT_BACKENDS


@pytest.mark.parametrize(
    ("dtype", "drafts"), [(torch.bfloat16, "FLASH_ATTN"), (torch.float32, "TRITON_ATTN")]
)
def test_draft_layers_get_a_backend_beside_the_targets(dtype: torch.dtype, drafts: str) -> None:
    from vllm.config.compilation import CompilationConfig, PassConfig
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    attention = SimpleNamespace(backend=AttentionBackendEnum.FLASHMLA, backend_per_kind={})
    config = SimpleNamespace(
        attention_config=attention,
        model_config=SimpleNamespace(dtype=dtype, use_mla=True),
        compilation_config=CompilationConfig(pass_config=PassConfig()),
    )
    try:
        claim_attention_backend(config)
        paths = {name: AttentionBackendEnum[name].get_path() for name in LATENT_BACKENDS}
    finally:
        LATENT_SEAMS["cuda"].undo()
        ATTENTION_BACKENDS.undo()
    assert paths == {name: f"{latent_gpu.__name__}.{name}" for name in LATENT_BACKENDS}
    assert attention.backend.name == "FLASHMLA"
    assert attention.backend_per_kind["full_attention"].name == drafts
    # It stores rows without the backend.
    assert config.compilation_config.pass_config.fuse_rope_kvcache_cat_mla is False


def test_requests_of_a_trees_rows_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """While vLLM's builder is made it has single rows, for which it reserves memory."""
    reserved = []

    class Stock:
        reorder_batch_threshold = 128
        query_len_support = QueryLenSupport.UNIFORM

        def __init__(self, *args: Any) -> None:
            reserved.append((self.reorder_batch_threshold, self.query_len_support))

    class Builder(RaggedDecodesMixin, Stock):
        pass

    config = SimpleNamespace(
        speculative_config=SimpleNamespace(
            num_speculative_tokens=12, method="custom_class", parallel_drafting=False
        )
    )
    made = Builder(None, [], config, None)
    assert reserved == [(1, QueryLenSupport.SINGLE_ONLY)]
    assert (made.reorder_batch_threshold, made.query_len_support) == (13, QueryLenSupport.VARLEN)
    for value, expected in (("0", "NEVER"), ("1", "UNIFORM_BATCH")):
        monkeypatch.setenv(FULL_GRAPHS_VARIABLE, value)
        assert Builder.get_cudagraph_support(config, None) == AttentionCGSupport[expected]


def step(counts: list[int], num_decodes: int) -> Any:
    """vLLM's metadata of requests of so many rows."""
    decoded = sum(counts[:num_decodes])
    return MLACommonMetadata(
        num_reqs=len(counts), max_query_len=max(counts), max_seq_len=99,
        num_actual_tokens=sum(counts), query_start_loc=torch.empty(0),
        slot_mapping=torch.empty(0), num_decodes=num_decodes, num_decode_tokens=decoded,
        num_prefills=len(counts) - num_decodes,
    )  # fmt: skip


def attached(
    counts: list[int], num_decodes: int, lengths: list[int], trees: Any = None, **batch: Any
) -> Any:
    """The rows that a step gets, of which `lengths` tokens are in the cache."""
    backend = LatentDeviceBackend("auto", 2, StepLimits(4, 64, 9, 200), torch.device("cpu"))
    # The caches are not bound yet, as while vLLM measures graphs.
    assert backend.kernel.name == "triton" and backend.views is not None
    backend.kernel = SimpleNamespace(reads_words=False, run=None)
    starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).to(torch.int32)
    inputs = SimpleNamespace(
        query_start_loc=starts, query_start_loc_np=starts.numpy(),
        seq_lens=torch.tensor(lengths, dtype=torch.int32), **batch,
    )  # fmt: skip
    metadata = step(counts, num_decodes)
    table = torch.zeros(len(counts), 4, dtype=torch.int32)
    other = SimpleNamespace()
    layers = {"a": metadata, "b": metadata, "draft": other}
    assert latent_metadata(layers) == [metadata]
    backend.attach(layers, inputs, trees, [table])
    assert not vars(other)
    return getattr(metadata, "specplug_tree_rows", None)


def test_short_pieces_of_prompts_are_chains() -> None:
    rows = attached([1, 3, 20], 2, [5, 9, 20])
    assert isinstance(rows, DeviceTreeRows) and not rows.covers_batch
    # Request, first row, rows, context, first mask row of those that are decoded.
    assert rows.metadata.plan.tolist() == [[0, 1], [0, 1], [1, 3], [4, 6], [0, 1]]
    assert rows.metadata.parent_rows is not None
    assert rows.metadata.parent_rows.tolist() == [-1, -1, 0, 1]
    assert rows.metadata.max_rows == 3


def test_a_tree_that_vllm_takes_for_a_prompt_stops_the_step() -> None:
    """Its kernels for prompts would attend the tree as a chain."""
    logits = np.array([0, 1, 6])
    with pytest.raises(AssertionError, match="not decoded"):
        attached([1, 20], 1, [5, 20], trees=SimpleNamespace(), cu_num_logits_np=logits)
