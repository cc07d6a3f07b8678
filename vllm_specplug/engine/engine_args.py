# SPDX-License-Identifier: Apache-2.0
"""Refuses what trees do not support, as the engine config shows it, before any process starts."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from vllm_specplug.drafting.method import Capability
from vllm_specplug.engine.cpu_memory import fit_to_free_memory
from vllm_specplug.engine.spec_config import (
    SpecPlugSpeculativeConfig,
    option_names,
    refusal_message,
    tree_config,
)
from vllm_specplug.kernels.cpu_layout import FP8_CACHES
from vllm_specplug.kernels.cuda_contract import (
    E4M3_CACHES,
    FULL_GRAPHS_VARIABLE,
    TOKEN_SCALE_CACHES,
)
from vllm_specplug.options import REMOVED_OPTIONS, short_repr, tree_option_names
from vllm_specplug.registry import find_method, owners_of

# A feature that trees do not support, and what to do.
Problem = tuple[str, str]


def _dtype_name(vllm_config: Any) -> str:
    return str(vllm_config.model_config.dtype).removeprefix("torch.")


def check_option_names(
    spec_method: str | None, options: dict[str, Any] | None, spec_model: str | None = None
) -> None:
    """Refuses keys that one of our methods does not have, with the nearest legal name.

    Raises:
        ValueError: naming the key, its value and every legal key.
    """
    options = options or {}
    if not isinstance(options, dict):
        raise ValueError(
            f"speculative_config={short_repr(options)} is not usable, legal: an object such as "
            """{"method": "tree", "model": "HEAD"}. Give one."""
        )
    method = find_method(spec_method or options.get("method"), spec_model or options.get("model"))
    if method is None:
        return
    legal = option_names(method.name)
    for key, value in options.items():
        name = key.replace("-", "_")
        if name in REMOVED_OPTIONS and name not in legal:
            raise ValueError(
                f"speculative_config.{name} (given {value!r}) is no longer an option: "
                f"{REMOVED_OPTIONS[name]}. Leave it out."
            )
        # Building the config refuses another method's option, with the names of its methods.
        if name not in legal and not owners_of(name):
            near = difflib.get_close_matches(name, sorted(legal), n=1)
            hint = f"Did you mean {near[0]!r}? " if near else ""
            names = (
                "model", "num_speculative_tokens", *tree_option_names(), *method.option_names()
            )  # fmt: skip
            raise ValueError(
                f"speculative_config has no option {key!r} (given {value!r}). {hint}"
                f"Options of method {method.name!r}: {', '.join(names)}."
            )


def refuse(method: str, problems: Iterable[Problem]) -> None:
    """Raises ValueError for the first of these problems."""
    for feature, remedy in problems:
        raise ValueError(f"Speculative method {method!r} cannot be used with {feature}. {remedy}.")


def check_engine_config(vllm_config: Any) -> None:
    """Refuses targets and engine options that trees do not support.

    Raises:
        ValueError: naming the field, its value and what to do.
    """
    spec = tree_config(vllm_config)
    if spec is not None:
        refuse(str(spec.plugin_method), _problems(spec, vllm_config))
        _check_token_budget(spec, vllm_config.scheduler_config)


def _problems(spec: SpecPlugSpeculativeConfig, vllm_config: Any) -> Iterator[Problem]:
    model = vllm_config.model_config
    parallel = vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        yield from _pipeline_problems(spec, vllm_config)
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        yield "context parallelism", "Leave the context-parallel sizes at 1"
    if parallel.use_ubatching:
        size = f"ubatch_size={parallel.ubatch_size}"
        yield (
            "enable_dbo=True" if parallel.enable_dbo else size,
            "Leave microbatching out; the rows of a tree cannot be split",
        )
    if vllm_config.cache_config.kv_sharing_fast_prefill:
        yield (
            "kv_sharing_fast_prefill=True",
            "Leave --kv-sharing-fast-prefill out: with it, layers that share a KV cache skip rows "
            "of a step",
        )
    yield from _row_problems(vllm_config)
    transfer = vllm_config.kv_transfer_config
    if transfer is not None and transfer.kv_load_failure_policy != "fail":
        yield (
            f"kv_load_failure_policy={transfer.kv_load_failure_policy!r}",
            "vLLM's Model Runner V2 does not recompute blocks whose load failed, so the request "
            'would answer wrongly: use "fail", the default',
        )
    yield from cache_problems(spec, vllm_config)
    if model.use_mla:
        yield from _latent_problems(spec, vllm_config)
    if model.is_hybrid or model.is_attention_free or model.has_inner_state:
        yield from state_problems(spec, vllm_config)
    if model.is_encoder_decoder or model.runner_type != "generate":
        yield f"runner {model.runner_type!r} of this target", "Use a decoder-only target"
    if model.is_multimodal_model or model.uses_mrope:
        yield from _multimodal_problems(spec, model)
    if model.is_moe and parallel.data_parallel_size > 1 and spec.target_forward_option:
        yield (
            f"{spec.target_forward_option} on a mixture-of-experts target with "
            f"data_parallel_size={parallel.data_parallel_size}",
            "Replicas run every forward together, but each replica drafts by itself: use another "
            "setting of that option, or data_parallel_size=1",
        )


def _pipeline_problems(spec: SpecPlugSpeculativeConfig, vllm_config: Any) -> Iterator[Problem]:
    """Yields what trees do not support over pipeline stages.

    Workers also check that the target's class passes outputs of layers on to later stages.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    size = f"pipeline_parallel_size={parallel.pipeline_parallel_size}"
    other = "use pipeline_parallel_size=1 (tensor parallelism works, also over nodes)"
    transfer = vllm_config.kv_transfer_config
    on_gpu = vllm_config.device_config.device_type == "cuda"
    if on_gpu and os.environ.get(FULL_GRAPHS_VARIABLE) == "1":
        yield (
            f"{size} and {FULL_GRAPHS_VARIABLE}=1",
            f"Whole graphs of pipeline stages are not tested: unset it, or {other}",
        )
    if not vllm_config.scheduler_config.async_scheduling:
        yield (
            f"{size} and async_scheduling=False",
            "Over pipeline stages vLLM spaces the steps of a request only with async scheduling: "
            f"leave async_scheduling out and use an executor that supports it, or {other}",
        )
    if _reads_target_cache(spec):
        yield (
            size,
            "Its drafts read KV caches of target layers, some of which are on other stages: "
            f"use another method, or {other}",
        )
    if model.is_hybrid or model.has_inner_state:
        yield (
            f"{size} on a target with recurrent states ({model.architectures[0]})",
            f"Earlier stages would apply accepted paths to these states too late: {other}",
        )
    if model.is_multimodal_model or model.uses_mrope:
        yield (
            f"{size} on a multimodal or M-RoPE target ({model.architectures[0]})",
            f"This combination is not tested: {other}",
        )
    if transfer is not None and transfer.is_kv_transfer_instance:
        yield (
            f"{size} and a KV connector",
            f"It may read accepted rows before earlier stages have compacted them: {other}",
        )
    if model.is_moe and parallel.data_parallel_size > 1:
        yield (
            f"{size} on a mixture-of-experts target with "
            f"data_parallel_size={parallel.data_parallel_size}",
            f"Replicas measure step costs together, but only last stages measure: {other}",
        )


def _row_problems(vllm_config: Any) -> Iterator[Problem]:
    """Yields features of vLLM that read a request's rows as consecutive tokens."""
    if vllm_config.watermark_config is not None:
        yield "watermarking", "It reads the rows before each row; leave watermarking out"
    if vllm_config.parallel_config.enable_batch_sharded_sampling:
        yield "enable_batch_sharded_sampling=True", "Leave it out: every rank walks all trees"
    if vllm_config.model_config.enable_trace_replay:
        yield "enable_trace_replay=True", "Replay traces without speculation"
    if vllm_config.aux_output_config.enabled:
        yield (
            "enable_return_routed_experts=True",
            "It reads a request's first rows as its accepted tokens, but an accepted path may skip "
            "rows of its tree: leave it out, or serve without speculation",
        )


def _multimodal_problems(spec: SpecPlugSpeculativeConfig, model: Any) -> Iterator[Problem]:
    """Yields features that need more than vLLM's embeddings and its positions on every axis."""
    target = f"a multimodal or M-RoPE target ({model.architectures[0]})"
    if spec.target_forward_option:
        yield (
            f"{spec.target_forward_option} on {target}",
            "A draft forward has only token ids and one position per token: use another setting of "
            "that option, or a text-only target",
        )
    images = model.multimodal_config
    if images is not None and images.is_multimodal_pruning_enabled():
        yield (
            f"video_pruning_rate={images.video_pruning_rate}",
            "vLLM recomputes the positions of all rows when it prunes: leave it out",
        )


# Dtypes that vLLM's CPU kernels for Gated DeltaNet layers support. The kernels check the dtype in
# the first step with requests, where a failure would end a running engine.
STATE_DTYPES = ["bfloat16"]
# Fields of a model's config that describe such layers.
_DELTA_NET = ("linear_conv_kernel_dim", "linear_num_key_heads", "linear_num_value_heads")


def state_problems(spec: SpecPlugSpeculativeConfig, vllm_config: Any) -> Iterator[Problem]:
    """Yields what trees do not support on a target with recurrent states: layers other than Gated
    DeltaNet, whose state cannot follow a tree, and options that would change states.

    The config does not tell the kind of each layer; workers check the layers once they are built.
    """
    model = vllm_config.model_config
    if not all(hasattr(model.hf_text_config, name) for name in _DELTA_NET):
        yield (
            f"recurrent layers other than Gated DeltaNet ({model.architectures[0]})",
            "Their state cannot follow a tree; use a target of attention layers, or of attention "
            "and Gated DeltaNet layers",
        )
    device = vllm_config.device_config.device_type
    dtype = _dtype_name(vllm_config)
    if device == "cpu" and dtype not in STATE_DTYPES:
        yield (
            f"dtype={dtype} on a target with Gated DeltaNet layers ({model.architectures[0]})",
            'vLLM\'s CPU kernels for them support only bfloat16: set dtype="bfloat16"',
        )
    if spec.target_forward_option:
        yield (
            f"{spec.target_forward_option} on a target with recurrent states "
            f"({model.architectures[0]})",
            "A draft forward would change them; use another setting of that option",
        )
    transfer = vllm_config.kv_transfer_config
    if transfer is not None and transfer.is_kv_transfer_instance:
        yield (
            f"a KV connector on a target with recurrent states ({model.architectures[0]})",
            "Serve this target without kv_transfer_config and kv_offloading_size",
        )


# Legal values of `tree_kernel` for latent attention, by device.
_LATENT_KERNELS = {"cpu": ("auto", "reference"), "cuda": ("auto", "triton")}


def _latent_problems(spec: SpecPlugSpeculativeConfig, vllm_config: Any) -> Iterator[Problem]:
    """Yields what trees over latent caches (multi-head latent attention) do not support.

    Workers check the kind of each layer, and on a CPU its rotary operator, once they are built.
    """
    model = vllm_config.model_config
    target = f"an MLA target ({model.architectures[0]})"
    kernels = _LATENT_KERNELS[vllm_config.device_config.device_type]
    if spec.tree_kernel not in kernels:
        yield (
            f"tree_kernel={spec.tree_kernel!r} on {target}",
            "One kernel reads latent caches here: use tree_kernel="
            + " or ".join(f'"{kernel}"' for kernel in kernels),
        )
    cache_dtype = vllm_config.cache_config.cache_dtype
    if cache_dtype not in ("auto", _dtype_name(vllm_config)):
        yield (
            f"kv_cache_dtype={cache_dtype!r} on {target}",
            'Trees read only unquantised latent caches: use kv_cache_dtype="auto"',
        )
    scheduler = vllm_config.scheduler_config
    limit = scheduler.max_num_scheduled_tokens
    if not scheduler.enable_chunked_prefill and limit is not None and limit < model.max_model_len:
        yield (
            f"max_num_scheduled_tokens={limit} on {target}",
            "Without chunked prefill, which vLLM turns off on some CPUs, a longer prompt is never "
            f"scheduled: leave it out, or give at least max_model_len={model.max_model_len}",
        )
    option = spec.target_forward_option
    if _reads_target_cache(spec):
        yield (
            f"{option} on {target}" if option else target,
            "Its drafts read the target's keys and values of each head, which a latent cache does "
            f"not have: use another {'setting of that option' if option else 'method'}",
        )


def _reads_target_cache(spec: SpecPlugSpeculativeConfig) -> bool:
    """Whether drafts read the target's own keys and values of each head, unquantised."""
    return Capability.TARGET_CACHE in spec.needs() or spec.target_forward_option is not None


# vLLM's names of the quantised caches that tree kernels read, by device.
SERVED_CACHES: dict[str, tuple[str, ...]] = {
    "cpu": tuple(FP8_CACHES),
    "cuda": (*sorted(E4M3_CACHES), *TOKEN_SCALE_CACHES),
}


def cache_problems(spec: SpecPlugSpeculativeConfig, vllm_config: Any) -> Iterator[Problem]:
    """Yields what is wrong with a KV cache that has neither the model's dtype nor an 8-bit dtype of
    the kernels."""
    cache_dtype = vllm_config.cache_config.cache_dtype
    dtype = _dtype_name(vllm_config)
    # The layers of a checkpoint with such a scheme turn "auto" into "fp8" when they are built.
    scheme = getattr(vllm_config.quant_config, "kv_cache_scheme", None)
    if cache_dtype == dtype or (cache_dtype == "auto" and scheme is None):
        return
    cache = f"kv_cache_dtype={cache_dtype!r} of a target of dtype {dtype}"
    if cache_dtype == "auto":
        cache = f"a checkpoint whose kv_cache_scheme={scheme!r} asks for a quantised KV cache"
    remedy = f'Use kv_cache_dtype="{dtype}", which keeps keys and values as they are'
    device = vllm_config.device_config.device_type
    served = SERVED_CACHES[device]
    if cache_dtype not in ("auto", *served):
        yield f"{cache} on {device!r}", f"{remedy}, or one of {', '.join(served)}"
    if device == "cuda" and spec.tree_kernel == "reference":
        yield f"{cache} and tree_kernel={spec.tree_kernel!r}", remedy
    if _reads_target_cache(spec):
        option = spec.target_forward_option
        drafts = f"with {option} its drafts" if option else "its drafts"
        yield f"{cache}: {drafts} read the target's cache", remedy


def _check_token_budget(spec: SpecPlugSpeculativeConfig, scheduler_config: Any) -> None:
    rows = spec.num_speculative_tokens + 1
    for name in ("max_num_batched_tokens", "max_num_scheduled_tokens"):
        limit = getattr(scheduler_config, name)
        if limit is not None and rows > limit:
            raise ValueError(
                f"speculative_config.num_speculative_tokens={spec.num_speculative_tokens} needs "
                f"{rows} rows for one request, but {name}={limit}. Lower num_speculative_tokens or "
                f"raise --{name.replace('_', '-')}."
            )


def _fit_steps_to_prompts(vllm_config: Any) -> None:
    """Raises the limit of a step to the longest prompt if vLLM turned chunked prefill off.

    Under speculation vLLM computes the limit before its CPU platform turns chunked prefill off and
    raises `max_num_batched_tokens`; a longer prompt would never be scheduled.
    """
    scheduler = vllm_config.scheduler_config
    if tree_config(vllm_config) is not None and not scheduler.enable_chunked_prefill:
        scheduler.max_num_scheduled_tokens = scheduler.max_num_batched_tokens


def wrap_create_engine_config(original: Callable[..., Any]) -> Callable[..., Any]:
    """`EngineArgs.create_engine_config` with the checks of this module. Seam: engine_config."""

    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            check_option_names(self.spec_method, self.speculative_config, self.spec_model)
            vllm_config = original(self, *args, **kwargs)
            if self.max_num_scheduled_tokens is None:
                _fit_steps_to_prompts(vllm_config)
            check_engine_config(vllm_config)
            if tree_config(vllm_config) is not None:
                fit_to_free_memory(vllm_config)
        except ValueError as error:
            message = refusal_message(error)
            if message is None:
                raise
            raise ValueError(message) from None
        return vllm_config

    return create_engine_config
