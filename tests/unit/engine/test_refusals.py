# SPDX-License-Identifier: Apache-2.0
"""Bad options, heads and combinations stop at config time, naming what is wrong."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import KVTransferConfig

from tests.e2e.latent import BACKEND, latent_config
from tests.e2e.tiny import make_head, make_tokenswift_heads
from tests.unit.engine_config import engine_config
from vllm_specplug.engine import spec_config
from vllm_specplug.engine.engine_args import (
    cache_problems,
    check_engine_config,
    refuse,
    state_problems,
)
from vllm_specplug.kernels.cuda_contract import FULL_GRAPHS_VARIABLE
from vllm_specplug.kernels.packed_linear import packed_isa
from vllm_specplug.options import RowBudget

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


def test_the_hash_depends_on_who_computes_products(target: Path, head: Path) -> None:
    spec = engine_config(target, _jetspec(head)).speculative_config
    spec.target_products = "vllm"
    stock = spec.compute_hash()
    spec.target_products = "packed"
    assert (spec.compute_hash() != stock) == (packed_isa() is not None)


def test_the_hash_depends_on_code_and_cpu(
    target: Path, head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = engine_config(target, _jetspec(head)).speculative_config
    before = spec.compute_hash()
    assert before == spec.compute_hash()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 99)
        assert spec.compute_hash() != before
    monkeypatch.setattr(spec_config, "_code_and_cpu", lambda: "another machine")
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
        refuse("jetspec", cache_problems(spec, config))
        return
    with pytest.raises(ValueError, match=message):
        refuse("jetspec", cache_problems(spec, config))


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
        return drafts_by_batch_size(config.speculative_config, config.scheduler_config)

    options = {"num_speculative_tokens": 16, "max_step_rows": 24}
    assert table(**options) == [16, 16, 11, 7, 5]
    # A scheduler that waits is told what the adaptive budget decided.
    assert table(False, **options) == [16] * 5
    assert table(False, **options, tree_budget=4) == table(**options, tree_budget=4)
    assert table(**options, tree_budget=4) == [8, 8, 8, 7, 5]
    assert table(**options, tree_budget=4, max_request_budget=0) == [4, 4, 4, 4, 4]
    assert table(num_speculative_tokens=16, max_step_rows=6) == [5, 5, 2, 1, 0]


_FP8_CACHE = {
    "quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {},
    "ignore": [],
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True,
                        "dynamic": False},
}  # fmt: skip
_MIXTURE = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32,
}  # fmt: skip
_HYBRID = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "num_experts": 4, "moe_intermediate_size": 64,
}  # fmt: skip


def _hybrid(folder: Path, family: str, layers: int) -> Path:
    import transformers

    sizes = {**_HYBRID, "num_hidden_layers": layers, "architectures": [f"{family}ForCausalLM"]}
    getattr(transformers, f"{family}Config")(**sizes).save_pretrained(folder)
    return folder


def _latent(folder: Path) -> Path:
    latent_config("DeepseekV3", vocab_size=VOCAB).save_pretrained(folder)
    return folder


_STATES = {"dtype": "bfloat16", "enable_prefix_caching": False}
# Targets by kind: what makes one of the plain target and a folder, and its engine's arguments.
TARGETS: dict[str, tuple[Callable[[Path, Path], Path], dict[str, Any]]] = {
    "plain": (lambda target, folder: target, {}),
    "fp8 caches": (lambda target, folder: _changed(target, folder, quantization_config=_FP8_CACHE),
                   {}),
    "experts": (lambda target, folder: _changed(target, folder, **_MIXTURE), {}),
    "states": (lambda target, folder: _hybrid(folder / "states", "Qwen3Next", 4), _STATES),
    "other states": (lambda target, folder: _hybrid(folder / "states", "FalconH1", 2), _STATES),
    "latent": (lambda target, folder: _latent(folder / "latent"), BACKEND),
}  # fmt: skip


def _made(kind: str, target: Path, folder: Path, spec: dict[str, Any], **engine: Any) -> Any:
    """The config of an engine on such a target; options `draft_source` are of TokenSwift heads."""
    make, usual = TARGETS[kind]
    spec = {"method": "ngram_tree", "num_speculative_tokens": 8, **spec}
    if "draft_source" in spec:
        heads = make_tokenswift_heads(folder / "heads", VOCAB)
        spec |= {"method": "tokenswift", "model": str(heads), "ngram_topk": 3}
    return engine_config(make(target, folder), spec, **{**usual, **engine})


CONNECTOR = {"kv_connector": "ExampleConnector", "kv_role": "kv_both",
             "kv_connector_extra_config": {"shared_storage_path": "unused"}}  # fmt: skip
HEADS, SELF = ({"draft_source": s} for s in ("heads", "self"))
# Kind of target, engine, options, and the refusal where there is one.
CASES: list[tuple[str, dict[str, Any], dict[str, Any], str | None]] = [
    *((kind, {"pipeline_parallel_size": 2, **engine}, spec, message)
      for kind, engine, spec, message in (
          ("plain", {}, {}, None),
          ("plain", {}, HEADS, None),
          ("latent", {}, {}, None),
          ("plain", {}, SELF, "parallel_size=2. Its drafts read KV caches .* on other stages"),
          ("plain", {"async_scheduling": False}, {}, "async_scheduling=False.*leave async_sched"),
          ("plain", {"distributed_executor_backend": "external_launcher"}, {},
           "not support pipeline parallelism with external_launcher"),
          ("plain", {"kv_transfer_config": CONNECTOR}, {}, "parallel_size=2 and a KV connector"),
          ("experts", {"data_parallel_size": 2}, {}, "mixture-of-experts.*data_parallel_size=2"),
          ("states", {}, {}, "parallel_size=2 on a target with recurrent states"),
      )),
    ("plain", {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}, {},
     "context parallelism"),
    ("plain", {"runner": "pooling"}, {}, "runner 'pooling' of this target"),
    ("plain", {"kv_cache_dtype": "int8_per_token_head"}, {},
     "'int8_per_token_head'.*, or one of fp8"),
    ("plain", {"kv_cache_dtype": "bfloat16"}, {},
     "kv_cache_dtype='bfloat16' of a target of dtype float32"),
    ("plain", {"kv_sharing_fast_prefill": True}, {}, "kv_sharing_fast_prefill=True"),
    ("plain", {"max_num_batched_tokens": 256, "max_num_seqs": 4}, {"num_speculative_tokens": 256},
     "needs 257 rows"),
    ("plain", {"max_num_scheduled_tokens": 8}, {}, "needs 9 rows .*max_num_scheduled_tokens=8"),
    # Caches of bytes are read by all but drafts over the target's own keys and values.
    *(("plain", {"kv_cache_dtype": kind}, spec, None)
      for kind in ("fp8", "fp8_e4m3", "fp8_e5m2") for spec in ({}, HEADS)),
    ("plain", {"kv_cache_dtype": "fp8"}, SELF, "draft_source='self' its drafts read the target"),
    ("fp8 caches", {}, HEADS, None),
    ("fp8 caches", {}, SELF, "draft_source='self' its drafts read the target"),
    # Replicas meet in every forward; one that ran one more would deadlock.
    *(("experts", {}, spec, None) for spec in (HEADS, SELF)),
    ("experts", {"data_parallel_size": 2}, HEADS, None),
    ("experts", {"data_parallel_size": 2}, SELF, "draft_source='self'.*data_parallel_size=2"),
    # Dense replicas are engines of their own.
    ("plain", {"data_parallel_size": 2}, SELF, None),
    ("states", {"enable_prefix_caching": True}, {}, None),
    ("states", {}, SELF, "draft_source='self' on a target with recurrent states"),
    ("states", {"dtype": "float32"}, {}, r'dtype=float32 .*set dtype="bfloat16"'),
    ("other states", {}, {}, r"recurrent layers other than Gated DeltaNet .*FalconH1"),
    ("latent", {}, {}, None),
    ("latent", {"dtype": "bfloat16"}, {}, None),
    ("latent", {}, {"tree_kernel": "reference"}, None),
    ("latent", {}, {"tree_kernel": "cpp"}, r"tree_kernel='cpp' on an MLA target .*\"auto\" or"),
    ("latent", {"kv_cache_dtype": "fp8"}, {},
     "kv_cache_dtype='fp8' on an MLA target .*unquantised"),
    # Whether it can be is seen in the loaded target.
    ("latent", {"enforce_eager": False}, {}, None),
    # Prompts come in whole.
    ("latent", {"max_num_batched_tokens": 64}, {}, None),
    ("latent", {"max_num_scheduled_tokens": 64}, {}, "scheduled_tokens=64 on .*max_model_len=256"),
    # What vLLM's scheduler does not follow above the other limit, which is 2048 here.
    ("latent", {"max_num_scheduled_tokens": 4096}, {}, None),
    ("latent", {}, HEADS, None),
    ("latent", {}, SELF, r"draft_source='self' on an MLA target .*another setting"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "engine", "spec", "message"), CASES)
def test_engine_combinations(
    target: Path, tmp_path: Path, kind: str, engine: dict[str, Any], spec: dict[str, Any],
    message: str | None,
) -> None:  # fmt: skip
    if message is not None:
        with pytest.raises(ValueError, match=message):
            _made(kind, target, tmp_path, spec, **engine)
        return
    config = _made(kind, target, tmp_path, spec, **engine)
    assert config.speculative_config.plugin_method
    if kind == "latent":
        budget = RowBudget.of(config.speculative_config, config.scheduler_config)
        assert 256 <= budget.scheduler_rows <= 2048


def test_what_recurrent_states_need_on_cuda(target: Path, tmp_path: Path) -> None:
    config = _made("states", target, tmp_path, {})
    config.device_config = SimpleNamespace(device_type="cuda")
    for dtype in (torch.bfloat16, torch.float32):
        config.model_config.dtype = dtype
        refuse("ngram_tree", state_problems(config.speculative_config, config))
    config.kv_transfer_config = RECOMPUTES
    with pytest.raises(ValueError, match="'ngram_tree' .* a KV connector .*recurrent states"):
        refuse("ngram_tree", state_problems(config.speculative_config, config))


@pytest.mark.parametrize(
    ("device", "kernel", "message"),
    [
        ("cuda", "auto", None),
        ("cuda", "triton", None),
        ("cuda", "flash", r"tree_kernel='flash' on an MLA target .*\"auto\" or \"triton\""),
    ],
)
def test_latent_attention_by_device(
    target: Path, tmp_path: Path, device: str, kernel: str, message: str | None
) -> None:
    config = _made("latent", target, tmp_path, {})
    config.speculative_config.tree_kernel = kernel
    config.device_config = SimpleNamespace(device_type=device)
    if message is None:
        check_engine_config(config)
        return
    with pytest.raises(ValueError, match=f"'ngram_tree' .*{message}"):
        check_engine_config(config)


def test_whole_graphs_of_pipeline_stages_are_refused_on_cuda(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = _made("plain", target, tmp_path, {}, pipeline_parallel_size=2)
    monkeypatch.setenv(FULL_GRAPHS_VARIABLE, "1")
    check_engine_config(config)
    config.device_config = SimpleNamespace(device_type="cuda")
    with pytest.raises(ValueError, match=f"size=2 and {FULL_GRAPHS_VARIABLE}=1. .*unset it"):
        check_engine_config(config)
    monkeypatch.setenv(FULL_GRAPHS_VARIABLE, "0")
    check_engine_config(config)


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
