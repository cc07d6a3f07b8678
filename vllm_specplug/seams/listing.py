# SPDX-License-Identifier: Apache-2.0
"""The list: every touch on vLLM, what for, and what would let us drop it.

`PROCESS_SEAMS` are put in place in every process, `REFUSAL` instead of them on a vLLM that is not
supported, the scoped ones by workers that verify trees. All others change nothing; they are here so
that every start checks them. `scripts/vllm_names.py` reads from the code what belongs here.
"""

from __future__ import annotations

from vllm_specplug.seams.listing_gpu import (
    ATTENTION_BACKENDS,
    GPU_USES,
)
from vllm_specplug.seams.listing_latent import LATENT_SEAMS
from vllm_specplug.seams.listing_pages import CPU_MEMORY_USES, ZEROED_PAGES, ZEROED_PAGES_USES
from vllm_specplug.seams.listing_products import CPU_PRODUCTS, PRODUCT_USES
from vllm_specplug.seams.listing_requests import REQUEST_SEAMS
from vllm_specplug.seams.listing_runner import (
    CPU_ADMISSION,
    CPU_KERNELS,
    CPU_RUNNER,
    CPU_RUNNER_USES,
    DEVICE_SPECULATOR,
    GPU_RUNNER_USES,
    GRAPHS_OF_TREES,
    MODEL_RUNNER,
    RUNNER_USES,
    SPECULATOR,
)
from vllm_specplug.seams.listing_states import CPU_STATE_SEAMS, DEVICE_STATE_SEAMS, STATE_SEAMS
from vllm_specplug.seams.listing_weights import CPU_WEIGHT_USES, GPU_WEIGHT_USES, WEIGHT_USES
from vllm_specplug.seams.reasons import (
    CONTAINED,
    HAS_REGISTRY,
    REGISTRY,
    TREE,
    WHY_CONTAINED,
    overrides,
    uses,
)
from vllm_specplug.seams.seam import (
    InstanceAttribute,
    Overrides,
    Register,
    Replace,
    Retype,
    Seam,
    SeamSet,
    Wrap,
)

_PUBLIC = "never: it is public"
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_GRAMMARS = "vllm.v1.structured_output:StructuredOutputManager"
_CPU_WORKER = "vllm.v1.worker.cpu_worker:CPUWorker"
_BACKENDS = "vllm.v1.attention.backends"
# -- changes ------------------------------------------------------------------------------------

_WHY_STATS = "statistics are made in a worker and scraped in the API server"
_HAS_STATS = "a runner may attach statistics that reach stat loggers"
_WHY_GRAMMAR = (
    "vLLM walks a grammar along a flat draft list, where siblings get each other's masks; acts on "
    "drafts that carry parents"
)
_HAS_PARENTS = f"drafts carry their parents to the scheduler ({TREE})"
_WHY_PENALTY = (
    "the contextual penalty must hold with and without speculation; vLLM's entry point for "
    "processors loads one class into two incompatible runners"
)
_HAS_PROCESSORS = "the entry point distinguishes the model runners"

PROCESS_SEAMS = SeamSet(
    (
        Replace(
            "spec_config",
            "vllm.engine.arg_utils:SpeculativeConfig",
            "vLLM's list of methods is closed and unknown keys are refused",
            HAS_REGISTRY,
            make="vllm_specplug.engine.spec_config:speculative_config_class",
        ),
        Wrap(
            "engine_config",
            "vllm.engine.arg_utils:EngineArgs.create_engine_config",
            "combinations such as a quantised cache only show in the whole config",
            f"a registered method may validate the engine config ({REGISTRY})",
            make="vllm_specplug.engine.engine_args:checked",
        ),
        Retype(
            "metrics_bridge",
            "vllm.v1.engine:EngineCoreOutputs",
            f"{_WHY_STATS}; the front end drops what no type declares",
            _HAS_STATS,
            attribute="scheduler_stats",
            annotation="vllm_specplug.engine.metrics_bridge:TreeSchedulerStats",
        ),
        Wrap(
            "metrics_bridge",
            f"{_SCHEDULER}.update_from_output",
            _WHY_STATS,
            _HAS_STATS,
            make="vllm_specplug.engine.metrics_bridge:with_stats",
        ),
        Wrap(
            "metrics_bridge",
            "vllm.v1.metrics.loggers:StatLoggerManager.__init__",
            _WHY_STATS,
            _HAS_STATS,
            make="vllm_specplug.engine.metrics_bridge:with_tree_logger",
        ),
        Wrap(
            "placeholders",
            f"{_SCHEDULER}.__init__",
            "requests that resume or hit the prefix cache would verify num_speculative_tokens "
            "placeholder rows that cannot be accepted",
            "a proposer can decline the padding",
            make="vllm_specplug.engine.placeholders:without_placeholders",
        ),
        ZEROED_PAGES,
        *REQUEST_SEAMS,
        *(
            Wrap(
                "structured_output",
                f"{owner}.{name}",
                _WHY_GRAMMAR,
                _HAS_PARENTS,
                make=f"vllm_specplug.engine.structured_output:{ours}",
            )
            for owner, name, ours in (
                (_SCHEDULER, "update_draft_token_ids", "update_draft_token_ids"),
                (_SCHEDULER, "update_draft_token_ids_in_output", "update_draft_token_ids"),
                (_GRAMMARS, "validate_tokens", "validate_tokens"),
                (_GRAMMARS, "grammar_bitmask", "grammar_bitmask"),
            )
        ),
        *MODEL_RUNNER,
        Wrap(
            "penalty_processor",
            "vllm.v1.worker.gpu.sample.logits_processor.loader:_load_v2_logitsprocs",
            _WHY_PENALTY,
            _HAS_PROCESSORS,
            make="vllm_specplug.engine.penalty:with_penalty",
        ),
        Wrap(
            "penalty_processor",
            "vllm.v1.engine.input_processor:InputProcessor."
            "_build_logits_processors_params_validator",
            _WHY_PENALTY,
            _HAS_PROCESSORS,
            make="vllm_specplug.engine.penalty:with_penalty_check",
        ),
    )
)

REFUSAL = SeamSet(
    (
        Wrap(
            "refusal",
            "vllm.engine.arg_utils:EngineArgs.create_engine_config",
            "on an unsupported vLLM our methods must say why they are unavailable instead of "
            "being unknown",
            "never needed on a supported vLLM",
            make="vllm_specplug.engine.refusal:refusing",
        ),
    )
)

_WHY_BACKEND = "stock attention has one causal mask; tree rows need their ancestors"

CPU_BACKENDS = SeamSet(
    (
        Register(
            "cpu_backend",
            f"{_BACKENDS}.registry:AttentionBackendEnum.CPU_ATTN",
            _WHY_BACKEND,
            f"vLLM takes a mask per request ({TREE})",
            path="vllm_specplug.vllm_attention.cpu.TreeCPUAttentionBackend",
        ),
    )
)

# -- what is called or overridden ---------------------------------------------------------------

# Checked with PROCESS_SEAMS, wherever the plugin is loaded.
_PROCESS_USES: tuple[Seam, ...] = (
    *uses(
        "config",
        "options of our methods are a subclass of vLLM's",
        HAS_REGISTRY,
        "vllm:__version__",
        "vllm.config.speculative:SpeculativeConfig",
        "vllm.config.speculative:SpeculativeMethod",
        "vllm.config.utils:config",
        "vllm.utils.hashing:safe_hash",
        "vllm.platforms:current_platform",
        "vllm.logger:init_logger",
        "vllm.exceptions:VLLMValidationError",
        "vllm.v1.executor.abstract:Executor",
    ),
    *CPU_MEMORY_USES,
    *ZEROED_PAGES_USES,
    *overrides(
        "config",
        "our methods resolve their options and the compiled graph's hash",
        HAS_REGISTRY,
        "vllm.config.speculative:SpeculativeConfig",
        "__post_init__",
        "__repr__",
        "compute_hash",
        "use_eagle_block_drop",
    ),
    *uses(
        "metrics_bridge",
        _WHY_STATS,
        _HAS_STATS,
        "vllm.v1.engine:EngineCoreOutputs",
        "vllm.v1.metrics.loggers:AggregateStatLoggerBase",
        "vllm.v1.metrics.stats:SchedulerStats",
    ),
    *overrides(
        "metrics_bridge",
        "the receiving end of the statistics",
        _PUBLIC,
        "vllm.v1.metrics.loggers:AggregateStatLoggerBase",
        "__init__",
        "record",
        "log_engine_initialized",
    ),
    *uses(
        "structured_output",
        _WHY_GRAMMAR,
        _HAS_PARENTS,
        f"{_GRAMMARS}._get_constraint_bounds",
    ),
    *(
        InstanceAttribute("structured_output", f"{_GRAMMARS}.{name}", _WHY_GRAMMAR, _HAS_PARENTS)
        for name in ("_grammar_bitmask", "_full_mask")
    ),
    *uses(
        "attention_registry",
        "workers register attention backends that can hand over tree rows",
        f"vLLM takes a mask per request ({TREE})",
        f"{_BACKENDS}.registry:register_backend",
        f"{_BACKENDS}.registry:AttentionBackendEnum",
        f"{_BACKENDS}.registry:AttentionBackendEnum.CPU_ATTN",
    ),
)

# Checked when a worker starts that verifies trees.
_WORKER_USES: tuple[Seam, ...] = (
    *WEIGHT_USES,
    *uses(
        "runner",
        "the runner mixin and what it reads of vLLM's set-up",
        HAS_REGISTRY,
        "vllm.config:VllmConfig",
        "vllm:envs",
        "vllm.distributed:get_tensor_model_parallel_rank",
        "vllm.distributed:get_tensor_model_parallel_world_size",
        "vllm.distributed:get_tp_group",
        "vllm.distributed:get_world_group",
        "vllm.distributed:tensor_model_parallel_all_gather",
    ),
    *uses(
        "layer_support",
        "whether tree rows can be computed is decided by the target's layers as they were built",
        HAS_REGISTRY,
        "vllm.model_executor.layers.attention:Attention",
        "vllm.model_executor.layers.attention:MLAAttention",
        "vllm.v1.attention.backend:AttentionType",
        "vllm.model_executor.layers.mamba.abstract:MambaBase",
        "vllm.model_executor.layers.vocab_parallel_embedding:ParallelLMHead",
        "vllm.model_executor.layers.vocab_parallel_embedding:UnquantizedEmbeddingMethod",
        "vllm.model_executor.layers.vocab_parallel_embedding:VocabParallelEmbedding",
    ),
    *uses(
        "layer_states",
        "heads read outputs of decoder layers, which only some of vLLM's classes return",
        "every class does",
        "vllm.model_executor.layers.attention_layer_base:AttentionLayerBase",
        "vllm.model_executor.models.interfaces:supports_eagle3",
    ),
    *uses(
        "draft_kv_layer",
        "draft context lives in vLLM's pages, so prefix hits and preemption hold",
        "vLLM offers cache-only layers to proposers",
        "vllm.model_executor.layers.attention_layer_base:AttentionLayerBase",
        "vllm.v1.attention.backend:AttentionBackend",
        "vllm.v1.attention.selector:get_attn_backend",
        "vllm.v1.kv_cache_interface:FullAttentionSpec",
        "vllm.v1.kv_cache_interface:KVCacheSpec",
        "vllm:_custom_ops",
    ),
    *overrides(
        "draft_kv_layer",
        "draft context lives in vLLM's pages, so prefix hits and preemption hold",
        "vLLM offers cache-only layers to proposers",
        "vllm.model_executor.layers.attention_layer_base:AttentionLayerBase",
        "get_attn_backend",
        "get_kv_cache_spec",
    ),
    *PRODUCT_USES,
    *uses(
        "attention_choice",
        "vLLM remembers which backend it chose; an earlier choice must be forgotten",
        f"vLLM takes a mask per request ({TREE})",
        "vllm.v1.attention.selector:_cached_get_attn_backend",
        "vllm.v1.attention.selector:_cached_get_mamba_attn_backend",
    ),
)

_CACHE_SCALES = "vllm.model_executor.layers.quantization.kv_cache:BaseKVCacheMethod"
_CPU_USES: tuple[Seam, ...] = (
    *CPU_WEIGHT_USES,
    *uses(
        "cpu_backend",
        _WHY_BACKEND,
        f"vLLM takes a mask per request ({TREE})",
        "vllm.v1.worker.cpu_worker:CPUWorker",
        f"{_BACKENDS}.cpu_attn:CPUAttentionBackend",
        f"{_BACKENDS}.cpu_attn:CPUAttentionBackendImpl",
        f"{_BACKENDS}.cpu_attn:_get_attn_isa",
    ),
    *(
        InstanceAttribute("cpu_backend", f"{_CACHE_SCALES}.{name}", _WHY_BACKEND, TREE)
        for name in ("_k_scale_float", "_v_scale_float")
    ),
    Overrides(
        "cpu_backend",
        f"{_BACKENDS}.cpu_attn:CPUAttentionBackend.get_impl_cls",
        _WHY_BACKEND,
        f"vLLM takes a mask per request ({TREE})",
    ),
    Overrides(
        "cpu_backend",
        f"{_BACKENDS}.cpu_attn:CPUAttentionBackendImpl.forward",
        _WHY_BACKEND,
        f"vLLM takes a mask per request ({TREE})",
    ),
    Overrides(
        "cpu_backend",
        f"{_BACKENDS}.cpu_attn:CPUAttentionBackendImpl.do_kv_cache_update",
        WHY_CONTAINED,
        CONTAINED,
    ),
    *overrides(
        "cpu_worker",
        "our backend and runner are chosen before the device is set up, drafters' memory is taken "
        "out of the caches', step costs are measured once the model is ready, and steps run the "
        "kernels of their engine's choice",
        f"a method may name its runner ({REGISTRY})",
        _CPU_WORKER,
        "init_device",
        "load_model",
        "execute_model",
        "determine_available_memory",
        "compile_or_warm_up_model",
    ),
)

PROCESS_CHECKS = SeamSet((*PROCESS_SEAMS.seams, *_PROCESS_USES))
WORKER_SEAMS = {
    "cpu": SeamSet(
        (
            *_WORKER_USES,
            CPU_RUNNER,
            SPECULATOR,
            *CPU_KERNELS.seams,
            CPU_PRODUCTS,
            *CPU_BACKENDS.seams,
            *_CPU_USES,
            *CPU_RUNNER_USES,
            *RUNNER_USES,
        )
    ),
    "cuda": SeamSet(
        (
            *_WORKER_USES,
            DEVICE_SPECULATOR,
            GRAPHS_OF_TREES,
            *ATTENTION_BACKENDS.seams,
            *GPU_WEIGHT_USES,
            *GPU_USES,
            *RUNNER_USES,
            *GPU_RUNNER_USES,
        )
    ),
}
"""By device: what a worker that verifies trees relies on, beyond what every process does."""

ALL_SEAMS: tuple[Seam, ...] = (
    *PROCESS_CHECKS.seams,
    *REFUSAL.seams,
    *_WORKER_USES,
    CPU_RUNNER,
    SPECULATOR,
    DEVICE_SPECULATOR,
    GRAPHS_OF_TREES,
    CPU_PRODUCTS,
    *CPU_BACKENDS.seams,
    *STATE_SEAMS.seams,
    *CPU_STATE_SEAMS.seams,
    *DEVICE_STATE_SEAMS.seams,
    *LATENT_SEAMS.seams,
    *_CPU_USES,
    CPU_ADMISSION,
    *CPU_KERNELS.seams,
    *CPU_RUNNER_USES,
    *RUNNER_USES,
    *ATTENTION_BACKENDS.seams,
    *GPU_WEIGHT_USES,
    *GPU_USES,
    *GPU_RUNNER_USES,
)
