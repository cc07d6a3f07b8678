# SPDX-License-Identifier: Apache-2.0
"""Bad options, heads and combinations stop at config time, naming what is wrong."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import KVTransferConfig

from tests.e2e.tiny import make_head, make_tokenswift_heads
from tests.unit.engine_config import engine_config
from vllm_specplug.engine import spec_config
from vllm_specplug.engine.engine_args import _check_cache_dtype, _check_states, check_engine_config

pytestmark = pytest.mark.usefixtures("installed")

VOCAB = 12


@pytest.fixture
def head(tmp_path: Path) -> Path:
    return make_head(tmp_path / "head", VOCAB)


def _jetspec(head: Path, **options: Any) -> dict[str, Any]:
    return {"method": "jetspec", "model": str(head), **options}


def _changed(target: Path, folder: Path, **changes: Any) -> Path:
    """A target whose config differs in these."""
    other = folder / "other"
    other.mkdir()
    config = json.loads((target / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, **changes}))
    return other


def test_a_good_config_claims_the_worker_and_keeps_typed_options(target: Path, head: Path) -> None:
    config = engine_config(target, _jetspec(head, num_speculative_tokens=24, tree_width=3))
    spec = config.speculative_config
    assert (spec.plugin_method, spec.method) == ("jetspec", "custom_class")
    assert (spec.num_speculative_tokens, spec.tree_width, spec.draft_depth) == (24, 3, 4)
    assert spec.aux_layers == (1, 2)  # zero-based ids 0 and 1 of the head, plus one
    assert config.parallel_config.worker_cls.endswith("TreeCPUWorker")
    assert "jetspec" in repr(spec) and str(head) not in repr(spec)
    assert not config.scheduler_config.async_scheduling
    again = pickle.loads(pickle.dumps(spec))
    assert again == spec and again.aux_layers == spec.aux_layers


def test_the_hash_depends_on_the_auxiliary_layers(target: Path, head: Path) -> None:
    spec = engine_config(target, _jetspec(head)).speculative_config
    before = spec.compute_hash()
    spec.plan = replace(spec.plan, hidden_layers=(1,))
    assert spec.compute_hash() != before


@pytest.mark.parametrize("method", ["jetspec", "tree"])
def test_the_methods_flags_are_accepted(target: Path, head: Path, method: str) -> None:
    flags = {"spec_method": method, "spec_model": str(head), "spec_tokens": 6}
    spec = engine_config(target, None, **flags).speculative_config
    assert (spec.plugin_method, spec.num_speculative_tokens) == ("jetspec", 6)


def test_plain_and_foreign_methods_are_untouched(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever options an installed method has."""
    monkeypatch.setattr(
        spec_config, "owners_of", lambda key: ["stranger"] * (key == "prompt_lookup_max")
    )
    assert engine_config(target, None).speculative_config is None
    config = engine_config(
        target, {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    )
    assert config.speculative_config.method == "ngram"
    assert "specplug" not in config.parallel_config.worker_cls


def test_methods_leave_vllms_own_names_alone() -> None:
    from typing import get_args

    from vllm.config.speculative import SpeculativeMethod

    from vllm_specplug.registry import legal_method_names

    own = set(get_args(SpeculativeMethod))
    nested = {name for part in own for name in get_args(part)} | own
    assert {"ngram", "eagle3", "dspark"} <= nested
    assert not nested & set(legal_method_names())


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2.*last rank drafts.*only token"),
        ({"kv_cache_dtype": "int8_per_token_head"}, "'int8_per_token_head'.*, or one of fp8"),
        ({"kv_cache_dtype": "bfloat16"}, "kv_cache_dtype='bfloat16' of a target of dtype float32"),
        ({"kv_sharing_fast_prefill": True}, "kv_sharing_fast_prefill=True"),
        ({"max_num_batched_tokens": 256, "max_num_seqs": 4}, None),
        ({"max_num_scheduled_tokens": 8}, "needs 9 rows .*max_num_scheduled_tokens=8"),
    ],
)
def test_engine_combinations(
    target: Path, head: Path, engine: dict[str, Any], message: str | None
) -> None:
    spec = _jetspec(head, num_speculative_tokens=256 if message is None else 8)
    with pytest.raises(ValueError, match=message or "needs 257 rows"):
        engine_config(target, spec, **engine)


_FP8_CACHE = {
    "quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {},
    "ignore": [],
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True,
                        "dynamic": False},
}  # fmt: skip


@pytest.mark.parametrize("kind", ["fp8", "fp8_e4m3", "fp8_e5m2", "as the checkpoint says"])
def test_fp8_caches_are_read_by_whom_they_can_be(
    target: Path, head: Path, tmp_path: Path, kind: str
) -> None:
    """Not by drafts over the target's own keys and values."""
    engine = {"kv_cache_dtype": kind}
    if kind == "as the checkpoint says":
        target, engine = _changed(target, tmp_path, quantization_config=_FP8_CACHE), {}
    assert engine_config(target, _jetspec(head), **engine).speculative_config.plugin_method
    heads = {"method": "tokenswift", "model": str(make_tokenswift_heads(tmp_path / "heads", VOCAB))}
    for source in ("heads", "ngrams"):
        assert engine_config(target, {**heads, "draft_source": source}, **engine)
    for options, source in (({"draft_source": "self"}, "self"), ({}, "auto")):
        with pytest.raises(ValueError, match=f"draft_source='{source}' its drafts read the target"):
            engine_config(target, {**heads, **options}, **engine)


@pytest.mark.parametrize(
    ("device", "dtype", "scheme", "options", "message"),
    [
        ("cuda", "auto", None, {}, None),
        ("cuda", "fp8", None, {}, None),
        ("cuda", "fp8_e4m3", {"num_bits": 8}, {}, None),
        ("cuda", "auto", {"num_bits": 8}, {}, None),
        ("cuda", "fp8_e5m2", None, {}, "'fp8_e5m2' of .* on 'cuda'.*, or one of fp8, fp8_e4m3"),
        ("cuda", "int8_per_token_head", None, {}, None),
        ("cuda", "fp8_per_token_head", None, {}, None),
        ("cuda", "int4_per_token_head", None, {}, "'int4_per_token_head' of .*, or one of fp8"),
        ("cuda", "int8_per_token_head", None, {"tree_kernel": "reference"}, "tree_kernel='ref"),
        ("cuda", "fp8", None, {"tree_kernel": "reference"}, "tree_kernel='reference'"),
        ("cpu", "fp8_per_token_head", None, {}, "'fp8_per_token_head' of .* on 'cpu'"),
        ("cpu", "fp8_e5m2", None, {}, None),
        ("cpu", "auto", {"num_bits": 8}, {}, None),
        ("xpu", "fp8", None, {}, "'fp8' of .* on 'xpu'"),
    ],
)
def test_quantised_caches_by_device(
    device: str, dtype: str, scheme: Any, options: dict[str, Any], message: str | None
) -> None:
    config: Any = SimpleNamespace(
        device_config=SimpleNamespace(device_type=device),
        cache_config=SimpleNamespace(cache_dtype=dtype),
        model_config=SimpleNamespace(dtype="torch.bfloat16"),
        quant_config=SimpleNamespace(kv_cache_scheme=scheme),
    )
    fields = {"tree_kernel": "auto", "target_forward_option": None, "needs": frozenset, **options}
    spec: Any = SimpleNamespace(**fields)
    if message is None:
        _check_cache_dtype("jetspec", spec, config)
        return
    with pytest.raises(ValueError, match=message):
        _check_cache_dtype("jetspec", spec, config)


RECOMPUTES = KVTransferConfig(
    kv_connector="ExampleConnector", kv_role="kv_both", kv_load_failure_policy="recompute"
)


@pytest.mark.parametrize(
    ("part", "field", "value", "message"),
    [
        # vLLM switches these two off on CPU.
        ("parallel_config", "enable_dbo", True, "enable_dbo=True"),
        ("parallel_config", "ubatch_size", 2, "ubatch_size=2"),
        # These take rows for consecutive tokens.
        (None, "watermark_config", True, "watermarking"),
        ("parallel_config", "enable_batch_sharded_sampling", True, "sharded_sampling=True"),
        ("model_config", "enable_trace_replay", True, "enable_trace_replay=True"),
        ("aux_output_config", "enable_return_routed_experts", True, "routed_experts=True"),
        # On V2, vLLM answers wrongly after a load that failed.
        (None, "kv_transfer_config", RECOMPUTES, "policy='recompute'.* use \"fail\""),
    ],
)
def test_what_does_not_go_with_trees_is_named(
    target: Path, part: str | None, field: str, value: Any, message: str
) -> None:
    """Set on the finished config."""
    config = engine_config(target, {"method": "ngram_tree"})
    check_engine_config(config)
    setattr(config if part is None else getattr(config, part), field, value)
    with pytest.raises(ValueError, match=f"'ngram_tree' .*{message}"):
        check_engine_config(config)


def test_rows_that_are_reserved_ahead_follow_the_budget(target: Path) -> None:
    from vllm_specplug.engine.placeholders import drafts_by_batch_size

    def table(ahead: bool = True, **options: Any) -> list[int]:
        method = {"method": "ngram_tree", **options}
        config = engine_config(target, method, max_num_seqs=4, async_scheduling=ahead)
        spec = config.speculative_config
        return drafts_by_batch_size(spec, config.scheduler_config, spec.num_speculative_tokens)

    options = {"num_speculative_tokens": 16, "max_step_rows": 24}
    assert table(**options) == [16, 16, 11, 7, 5]
    # A scheduler that waits is told what the adaptive budget decided.
    assert table(False, **options) == [16] * 5
    assert table(False, **options, tree_budget=4) == table(**options, tree_budget=4)
    assert table(**options, tree_budget=4) == [8, 8, 8, 7, 5]
    assert table(**options, tree_budget=4, max_request_budget=0) == [4, 4, 4, 4, 4]
    assert table(num_speculative_tokens=16, max_step_rows=6) == [5, 5, 2, 1, 0]


_HYBRID = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "num_experts": 4, "moe_intermediate_size": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "layers", "engine", "spec", "message"),
    [
        ("Qwen3Next", 4, {}, {}, None),
        ("Qwen3Next", 4, {"enable_prefix_caching": True}, {}, None),
        ("Qwen3Next", 4, {}, {"method": "tokenswift", "draft_source": "self"},
         "draft_source='self' on a target with recurrent states"),
        ("Qwen3Next", 4, {"dtype": "float32"}, {}, r'dtype=float32 .*set dtype="bfloat16"'),
        ("FalconH1", 2, {}, {}, r"recurrent layers other than Gated DeltaNet .*FalconH1"),
    ],
)  # fmt: skip
def test_targets_with_recurrent_states(
    tmp_path: Path, family: str, layers: int, engine: dict[str, Any], spec: dict[str, Any],
    message: str | None,
) -> None:  # fmt: skip
    import transformers

    sizes = {**_HYBRID, "num_hidden_layers": layers, "architectures": [f"{family}ForCausalLM"]}
    getattr(transformers, f"{family}Config")(**sizes).save_pretrained(tmp_path)
    spec = {"method": "ngram_tree", "num_speculative_tokens": 8, **spec}
    if spec["method"] == "tokenswift":
        spec["model"] = str(make_tokenswift_heads(tmp_path / "heads", 64))
    engine = {"dtype": "bfloat16", "enable_prefix_caching": False, **engine}
    if message is None:
        config = engine_config(tmp_path, spec, **engine)
        assert config.model_config.is_hybrid
        # What CPUs lack, CUDA has.
        config.device_config = SimpleNamespace(device_type="cuda")
        for dtype in (torch.bfloat16, torch.float32):
            config.model_config.dtype = dtype
            _check_states("ngram_tree", config.speculative_config, config)
        config.kv_transfer_config = RECOMPUTES
        with pytest.raises(ValueError, match="'ngram_tree' .* a KV connector .*recurrent states"):
            _check_states("ngram_tree", config.speculative_config, config)
        return
    with pytest.raises(ValueError, match=message):
        engine_config(tmp_path, spec, **engine)


_MIXTURE = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32,
}  # fmt: skip


@pytest.mark.parametrize("source", ["self", "auto", "heads", "ngrams"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_mixture_of_experts_in_replicas_takes_no_draft_forwards_of_one_replica(
    target: Path, tmp_path: Path, source: str, replicas: int
) -> None:
    """Replicas meet in every forward; one that ran one more would wait for the others for ever."""
    other = _changed(target, tmp_path, **_MIXTURE)
    heads = make_tokenswift_heads(tmp_path / "heads", VOCAB)
    spec = {"method": "tokenswift", "model": str(heads), "draft_source": source}
    if source == "ngrams":
        spec["ngram_topk"] = 3
    if replicas == 1 or source in ("heads", "ngrams"):
        made = engine_config(other, spec, data_parallel_size=replicas)
        assert made.model_config.is_moe
        assert made.speculative_config.plan.settings.source == source
        return
    with pytest.raises(ValueError, match=f"draft_source='{source}'.*data_parallel_size=2"):
        engine_config(other, spec, data_parallel_size=replicas)
    # Dense replicas are engines of their own.
    engine_config(target, spec, data_parallel_size=replicas)


def test_what_multimodal_targets_do_not_give_is_named(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.config import ModelConfig, MultiModalConfig

    heads = make_tokenswift_heads(tmp_path / "heads", VOCAB)
    own = {"method": "tokenswift", "model": str(heads), "draft_source": "self"}
    config, of_own_layers = (
        engine_config(target, {"method": "ngram_tree"}),
        engine_config(target, own),
    )
    monkeypatch.setattr(ModelConfig, "uses_mrope", True)
    check_engine_config(config)
    with pytest.raises(ValueError, match=r"'tokenswift' .*draft_source='self' on a multimodal or"):
        check_engine_config(of_own_layers)
    pruned = MultiModalConfig(video_pruning_rate=0.5)
    with monkeypatch.context() as patch:
        patch.setattr(config.model_config, "multimodal_config", pruned)
        with pytest.raises(ValueError, match=r"'ngram_tree' .*video_pruning_rate=0.5"):
            check_engine_config(config)
