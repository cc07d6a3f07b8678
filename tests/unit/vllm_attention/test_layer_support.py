# SPDX-License-Identifier: Apache-2.0
"""Layers whose attention tree rows would leave something of are refused, by what they hold.

vLLM's own layers over the CPU backend that serves; its CUDA implementations by their parameters.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.config import CacheConfig, ModelConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl
from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl

from tests.e2e.tiny import make_target
from vllm_specplug.drafting.caches import TargetCacheSpec
from vllm_specplug.kernels import AttnFeatures
from vllm_specplug.kernels.cpu_layout import FP8_CACHES
from vllm_specplug.vllm_attention.cpu import TreeCPUAttentionBackend, TreeCPUAttentionBackendImpl
from vllm_specplug.vllm_attention.gpu import TreeFlashAttentionImpl, TreeTritonAttentionImpl
from vllm_specplug.vllm_attention.layer_support import (
    IMPL_FEATURES,
    check_cache_dtypes,
    check_target_layers,
)
from vllm_specplug.vllm_worker.memory import cache_groups
from vllm_specplug.vllm_worker.memory.cache_groups import (
    CacheGroup,
    check_plain_attention,
    draft_group,
    target_layer,
)
from vllm_specplug.vllm_worker.memory.draft_cache import DraftKVLayer
from vllm_specplug.vllm_worker.proposer import _check_forward

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 32
# Parameters of implementations that tree rows honour, or that the layer check covers elsewhere.
HONOURED = {
    "self", "num_heads", "head_size", "scale", "num_kv_heads", "kv_cache_dtype",
    # Tree rows read the cache of the layer, whoever wrote it.
    "kv_sharing_target_layer_name",
}  # fmt: skip


@pytest.fixture(scope="module")
def model_config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    target = make_target(tmp_path_factory.mktemp("target"), 12)
    return ModelConfig(model=str(target), skip_tokenizer_init=True, dtype="float32")


@pytest.fixture
def config(model_config: ModelConfig) -> Iterator[VllmConfig]:
    config = VllmConfig(model_config=model_config)
    with set_current_vllm_config(config):
        yield config


def layer(config: VllmConfig, index: int = 0, cls: type = Attention, **options: Any) -> Attention:
    """vLLM's attention layer as a model builds it, registered in `config`."""
    sizes = {"num_heads": HEADS, "head_size": HEAD_DIM, "num_kv_heads": KV_HEADS}
    return cls(
        scale=HEAD_DIM**-0.5,
        prefix=f"model.layers.{index}.attn",
        **{"attn_backend": TreeCPUAttentionBackend, "cache_config": CacheConfig(), **sizes}
        | options,
    )


def check(config: VllmConfig) -> None:
    check_target_layers(config.compilation_config.static_forward_context, "ngram_tree")


class Derived(TreeCPUAttentionBackend): ...


class ChunkedAttention(Attention): ...


def test_plain_full_attention_is_served(config: VllmConfig) -> None:
    layer(config)
    layer(config, 1)
    layer(config, 2, num_kv_heads=1)
    layer(config, 3, kv_sharing_target_layer_name="model.layers.0.attn")
    # Layers of other kinds are in the context, too.
    config.compilation_config.static_forward_context["model.layers.0.mlp.experts"] = object()
    check(config)


@pytest.mark.parametrize(
    ("options", "feature"),
    [
        ({"attn_type": AttentionType.ENCODER_ONLY}, "not a decoder's"),
        ({"attn_type": AttentionType.ENCODER_DECODER}, "not a decoder's"),
        ({"head_size_v": 16}, "values of another size"),
        ({"attn_backend": CPUAttentionBackend}, "implementation CPUAttentionBackendImpl"),
        # Chunked and sink layers derive a backend whose implementation is ours all the same.
        ({"attn_backend": Derived}, "attention backend Derived"),
        ({"cls": ChunkedAttention}, "layer class ChunkedAttention"),
    ],
)
def test_each_feature_is_refused_by_layer_and_name(
    config: VllmConfig, options: dict[str, Any], feature: str
) -> None:
    layer(config)
    layer(config, 1, **options)
    with pytest.raises(ValueError, match=f"'ngram_tree' .*'model.layers.1.attn' has .*{feature}"):
        check(config)


SERVED = [
    ({"alibi_slopes": [0.5] * HEADS}, "ALiBi", "alibi_slopes", torch.full((HEADS,), 0.5)),
    ({"sinks": torch.zeros(HEADS)}, "attention sinks", "sinks", torch.zeros(HEADS)),
    ({"logits_soft_cap": 50.0}, r"soft-capped logits \(logits_soft_cap=50.0\)", "soft_cap", 50.0),
    ({"per_layer_sliding_window": 64}, r"a sliding window \(sliding_window=64\)", "window", 64),
    ({"cache_config": CacheConfig(sliding_window=64)}, "a sliding window", "window", 64),
]


@pytest.mark.parametrize(("options", "title", "name", "value"), SERVED)
def test_what_the_kernel_reproduces_is_handed_over_or_refused(
    config: VllmConfig,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    title: str,
    name: str,
    value: Any,
) -> None:
    features = layer(config, 1, **options).impl.tree_features()
    check(config)
    assert not features.is_plain
    given = getattr(features, name)
    assert torch.equal(given, value) if isinstance(value, torch.Tensor) else given == value
    monkeypatch.setattr(TreeCPUAttentionBackendImpl, "serves", frozenset())
    with pytest.raises(ValueError, match=f"'ngram_tree' .*'model.layers.1.attn' has .*{title}"):
        check(config)


def test_drafts_of_the_targets_own_layers_need_plain_attention(config: VllmConfig) -> None:
    layers = config.compilation_config.static_forward_context
    layer(config, 0)
    check_plain_attention(layers, "tokenswift")
    layer(config, 1, per_layer_sliding_window=64)
    with pytest.raises(ValueError, match="'tokenswift' .*'model.layers.1.attn' has more"):
        check_plain_attention(layers, "tokenswift")


def test_a_cache_of_the_target_is_that_of_its_last_layer_with_the_window(
    config: VllmConfig,
) -> None:
    """Layers that read another layer's cache do not count."""
    names = [f"model.layers.{i}.attn" for i in range(5)]
    groups = []
    for i, (name, window) in enumerate(zip(names, (None, 64, None, 64, 64), strict=True)):
        made = layer(config, i, per_layer_sliding_window=window)
        features = {name: made.impl.tree_features()}
        readers = frozenset({name} if i == 4 else ())
        caches = {name: torch.zeros(1)}
        groups.append(CacheGroup(7 - i, caches, features=features, readers=readers))
    layers = config.compilation_config.static_forward_context
    heads = (made.num_kv_heads, made.head_size)

    def found(window: int | None, shape: tuple[int, int] = heads) -> tuple[int, str]:
        return target_layer(groups, layers, TargetCacheSpec(*shape, 1.0, window), "m")

    assert found(None) == (5, names[2])
    assert found(64) == (4, names[3])
    with pytest.raises(
        ValueError, match=r"'m' .*window of 32 .*no such layer .*windows: \[64\]\)\."
    ):
        found(32)
    with pytest.raises(ValueError, match=rf"'{names[2]}', which has .* was made for 9 of 8\."):
        found(None, (9, 8))


# KV heads of the head and of the layer on each rank, and ranks.
@pytest.mark.parametrize(
    ("wanted", "own", "num_ranks", "is_legal"),
    [
        (8, 4, 2, True), (4, 1, 4, True), (2, 1, 8, True),
        # A layer of 8, of 4, of 4, and of one that two ranks hold.
        (4, 4, 2, False), (5, 2, 2, False), (8, 2, 2, False), (3, 1, 4, False),
    ],
)  # fmt: skip
def test_ranks_have_their_parts_of_the_kv_heads(
    wanted: int, own: int, num_ranks: int, is_legal: bool
) -> None:
    name = "model.layers.0.attn"
    groups = [CacheGroup(3, {name: torch.zeros(1)})]
    layers = {name: SimpleNamespace(num_kv_heads=own, head_size=HEAD_DIM)}
    spec = TargetCacheSpec(wanted, HEAD_DIM, 1.0)
    if is_legal:
        assert target_layer(groups, layers, spec, "m", num_ranks) == (3, name)
        return
    message = rf"has {own} KV heads of {HEAD_DIM} on each of {num_ranks} ranks; .* for {wanted} of"
    with pytest.raises(ValueError, match=message):
        target_layer(groups, layers, spec, "m", num_ranks)


@pytest.mark.parametrize("is_reader", [False, True])
def test_a_drafter_may_demand_the_targets_last_layer(config: VllmConfig, is_reader: bool) -> None:
    layers = config.compilation_config.static_forward_context
    layer(config, 0)
    name, later = "model.layers.0.attn", "model.layers.1.attn"
    spec = TargetCacheSpec(KV_HEADS, HEAD_DIM, 1.0, must_be_last=True)
    groups = [CacheGroup(3, {name: torch.zeros(1)})]
    assert target_layer(groups, layers, spec, "longspec") == (3, name)
    features = {later: layer(config, 1, per_layer_sliding_window=64).impl.tree_features()}
    readers = frozenset({later} if is_reader else ())
    groups.append(CacheGroup(0, {later: torch.zeros(1)}, features=features, readers=readers))
    with pytest.raises(ValueError, match=r"'longspec' .*'model.layers.1.attn' .*window of 64"):
        target_layer(groups, layers, spec, "longspec")
    spec = TargetCacheSpec(KV_HEADS, HEAD_DIM, 1.0)
    assert target_layer(groups, layers, spec, "m") == (3, name)


def test_draft_layers_in_several_groups_are_refused(config: VllmConfig) -> None:
    draft = object.__new__(DraftKVLayer)
    layers = {"t": layer(config), "d0": draft, "d1": draft}

    def groups(*names: list[str]) -> Any:
        return SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=n) for n in names])

    assert draft_group(groups(["t"]), layers, "jetspec") == 0
    assert draft_group(groups(["t"], ["d0", "d1"]), layers, "jetspec") == 1
    with pytest.raises(ValueError, match="'jetspec' .*over 2.*--disable-hybrid-kv-cache-manager"):
        draft_group(groups(["t", "d0"], ["d1"]), layers, "jetspec")


@pytest.mark.parametrize(
    ("drafts", "windows", "full", "is_told"),
    # Layers of each group: drafts of another shape, with a window, with full attention.
    [(1, [1] * 10, [1] * 2, True), (2, [2] * 5, [2], False), (1, [2], [2], False)],
)
def test_draft_layers_that_split_the_targets_groups_are_told_of(
    monkeypatch: pytest.MonkeyPatch, drafts: int, windows: list[int], full: list[int], is_told: bool
) -> None:
    said: list[str] = []
    monkeypatch.setattr(cache_groups.logger, "warning", lambda text, *a: said.append(text % a))
    draft, groups, layers = object.__new__(DraftKVLayer), [], {}
    for kind, sizes in (("windows", windows), ("full", full), ("drafts", [drafts])):
        for size in sizes:
            names = [f"{len(groups)}.{i}" for i in range(size)]
            layers |= dict.fromkeys(names, draft if kind == "drafts" else None)
            groups.append(SimpleNamespace(layer_names=names, kv_cache_spec=kind))
    found = draft_group(SimpleNamespace(kv_cache_groups=groups), layers, "jetspec")
    assert found == len(groups) - 1 and bool(said) == is_told
    assert all("12 KV cache groups instead of 6" in text for text in said)


def test_bidirectional_prefixes_are_refused(config: VllmConfig) -> None:
    layer(config).use_mm_prefix = True
    with pytest.raises(ValueError, match="both directions"):
        check(config)


@pytest.mark.parametrize(
    ("impl", "unlimited"),
    [
        (CPUAttentionBackendImpl, -1),
        (TritonAttentionImpl, (-1, -1)),
        (FlashAttentionImpl, (-1, -1)),
    ],
)
def test_everything_an_implementation_takes_is_honoured_or_checked(
    impl: type, unlimited: Any
) -> None:
    parameters = inspect.signature(impl.__init__).parameters
    assert set(parameters) <= HONOURED | set(IMPL_FEATURES), "tree rows would ignore one of these"
    for name in set(parameters) & set(IMPL_FEATURES):
        _, changes_nothing = IMPL_FEATURES[name]
        default = parameters[name].default
        assert changes_nothing(None if default is inspect.Parameter.empty else default), name
    # An unlimited window is none, as the implementations write it.
    assert f"self.sliding_window = {unlimited}" in inspect.getsource(impl.__init__)
    assert IMPL_FEATURES["sliding_window"][1](unlimited)


@pytest.mark.parametrize("impl", [TreeFlashAttentionImpl, TreeTritonAttentionImpl])
@pytest.mark.parametrize(
    ("held", "expected"),
    [
        ({"sliding_window": (-1, -1), "logits_soft_cap": 0, "sinks": None}, AttnFeatures()),
        ({"sliding_window": (63, 0)}, AttnFeatures(window=64)),
        ({"logits_soft_cap": 30.0}, AttnFeatures(soft_cap=30.0)),
        ({"sinks": torch.zeros(4, dtype=torch.bfloat16)}, AttnFeatures(sinks=torch.zeros(4))),
        ({"alibi_slopes": torch.ones(4)}, AttnFeatures(alibi_slopes=torch.ones(4))),
    ],
)
def test_implementations_of_cuda_hand_over_what_they_hold(
    impl: type, held: dict[str, Any], expected: AttnFeatures
) -> None:
    """As their constructors leave it: windows are keys before and after a row."""
    made = object.__new__(impl)
    vars(made).update(held)
    features = made.tree_features()
    assert features.kind == expected.kind
    for name, value in held.items():
        if isinstance(value, torch.Tensor):
            # No copy: weights may be loaded again in place.
            assert getattr(features, name).data_ptr() == value.data_ptr()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.bfloat16])
def test_caches_of_another_dtype_are_refused(dtype: torch.dtype) -> None:
    good = torch.zeros(1, 1, 16, 8)
    check_cache_dtypes({"a": good}, torch.float32, "jetspec")
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(ValueError, match=f"'jetspec' .*'b'.* dtype is {name}.*--kv-cache-dtype"):
        check_cache_dtypes({"a": good, "b": good.to(dtype)}, torch.float32, "jetspec")


def test_the_caches_of_eight_bits_are_those_that_vllms_cpu_attention_declares() -> None:
    """It has none of int8, though vLLM takes the name without asking the backend."""
    assert {*FP8_CACHES, "auto"} == set(CPUAttentionBackend.supported_kv_cache_dtypes)


def test_a_forward_that_reads_the_tokens_before_a_row_is_refused() -> None:
    _check_forward(torch.nn.Identity(), "jetspec")
    with pytest.raises(ValueError, match="'jetspec' .*token_lookback_depth=2"):
        _check_forward(SimpleNamespace(token_lookback_depth=2), "jetspec")  # type: ignore[arg-type]


def test_a_target_whose_inputs_are_made_by_a_class_of_its_own_is_refused() -> None:
    """V2 asks the model for that class; that of LongCat embeds the n tokens up to each row."""
    from vllm.model_executor.models.longcat_flash_ngram import LongcatFlashNgramForCausalLM
    from vllm.v1.worker.gpu.model_states import resolve_model_state_cls

    model = LongcatFlashNgramForCausalLM.__new__(LongcatFlashNgramForCausalLM)
    assert resolve_model_state_cls(SimpleNamespace(), model).__name__ == "LongcatNgramModelState"  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'jetspec' .*LongcatFlash.* LongcatNgramModelState,"):
        _check_forward(model, "jetspec")


def test_embeddings_of_decoded_tokens_are_refused() -> None:
    """vLLM's own name of such a target."""
    from vllm.model_executor.models.interfaces import SupportsRealtime, supports_realtime

    class Streaming(torch.nn.Module):
        supports_realtime = True

    made = Streaming()
    assert SupportsRealtime.supports_realtime and supports_realtime(made)
    with pytest.raises(ValueError, match="'jetspec' .*Streaming.*supports_realtime"):
        _check_forward(made, "jetspec")
