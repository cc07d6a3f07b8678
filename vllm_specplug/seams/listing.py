# SPDX-License-Identifier: Apache-2.0
"""The list of all seams, each with its reason and with what would make it unnecessary.

Every process applies `PROCESS_SEAMS`, or `REFUSAL` on an unsupported vLLM. Workers that verify
trees apply the other seams that change something. The remaining seams change nothing; they are
listed so that every start checks them. `scripts/vllm_names.py` derives from the code what must be
listed.
"""

from __future__ import annotations

from vllm_specplug.seams.listing_gpu import ATTENTION_BACKENDS, GPU_USES
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
    MODEL_RUNNER,
    RUNNER_USES,
    SPECULATOR,
    TREE_GRAPHS,
)
from vllm_specplug.seams.listing_states import CPU_STATE_SEAMS, DEVICE_STATE_SEAMS, STATE_SEAMS
from vllm_specplug.seams.listing_weights import CPU_WEIGHT_USES, GPU_WEIGHT_USES, WEIGHT_USES
from vllm_specplug.seams.reasons import (
    BACKENDS,
    HAS_DRAFT_LAYERS,
    HAS_MASKS,
    HAS_PROCESSORS,
    HAS_REGISTRY,
    REGISTRY,
    SKIPS_VALUES,
    TREE,
    WHY_BACKEND,
    WHY_ISOLATED,
    attributes,
    overrides,
    uses,
)
from vllm_specplug.seams.seam import Register, Replace, Retype, Seam, SeamSet, Wrap

_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_GRAMMARS = "vllm.v1.structured_output:StructuredOutputManager"
_CPU_WORKER = "vllm.v1.worker.cpu_worker:CPUWorker"

# -- seams that change vLLM -----------------------------------------------------------------------

_WHY_DRAFT_LAYERS = (
    "the context of drafts is kept in vLLM's pages, so it follows prefix hits and preemption"
)
_WHY_STATS = "a worker makes the statistics, and the API server exports them"
_HAS_STATS = "a runner can attach statistics that reach stat loggers"
_WHY_COUNTS = "vLLM counts rows that it reserved ahead as drafts, whether they have a node or not"
_HAS_COUNTS = "a worker that works ahead reports the number of drafts of each request"
_WHY_GRAMMAR = (
    "vLLM advances a grammar along a flat draft list, where siblings get each other's masks; "
    "changes only drafts that carry their parents"
)
_HAS_PARENTS = f"drafts carry their parents to the scheduler ({TREE})"
_WHY_PENALTY = (
    "the contextual penalty applies with and without speculation; vLLM's entry point for "
    "processors loads one class into two incompatible runners"
)

PROCESS_SEAMS = SeamSet(
    (
        Replace(
            "spec_config",
            "vllm.engine.arg_utils:SpeculativeConfig",
            "vLLM's list of methods is closed, and it refuses unknown keys",
            HAS_REGISTRY,
            make="vllm_specplug.engine.spec_config:speculative_config_class",
        ),
        Wrap(
            "engine_config",
            "vllm.engine.arg_utils:EngineArgs.create_engine_config",
            "some combinations, such as a quantised cache, show only in the engine config",
            f"a registered method can validate the engine config ({REGISTRY})",
            make="vllm_specplug.engine.engine_args:wrap_create_engine_config",
        ),
        Retype(
            "metrics_bridge",
            "vllm.v1.engine:EngineCoreOutputs",
            f"{_WHY_STATS}; the front end drops fields that no type declares",
            _HAS_STATS,
            attribute="scheduler_stats",
            annotation="vllm_specplug.engine.metrics_bridge:TreeSchedulerStats",
        ),
        Wrap(
            "metrics_bridge",
            f"{_SCHEDULER}.update_from_output",
            _WHY_STATS,
            _HAS_STATS,
            make="vllm_specplug.engine.metrics_bridge:wrap_update_from_output",
        ),
        Wrap(
            "metrics_bridge",
            "vllm.v1.metrics.loggers:StatLoggerManager.__init__",
            _WHY_STATS,
            _HAS_STATS,
            make="vllm_specplug.engine.metrics_bridge:wrap_stat_logger_manager",
        ),
        *(
            Wrap(
                "draft_counts",
                f"{_SCHEDULER}.{name}",
                _WHY_COUNTS,
                _HAS_COUNTS,
                make=f"vllm_specplug.engine.draft_counts:wrap_{name}",
            )
            for name in ("make_spec_decoding_stats", "add_request")
        ),
        Wrap(
            "placeholders",
            f"{_SCHEDULER}.__init__",
            "requests that resume or hit the prefix cache would verify num_speculative_tokens "
            "placeholder rows, which can never be accepted",
            "a proposer can decline the placeholders",
            make="vllm_specplug.engine.placeholders:wrap_scheduler",
        ),
        ZEROED_PAGES,
        *REQUEST_SEAMS,
        *(
            Wrap(
                "structured_output",
                f"{owner}.{name}",
                _WHY_GRAMMAR,
                _HAS_PARENTS,
                make=f"vllm_specplug.engine.structured_output:wrap_{wrapped}",
            )
            for owner, name, wrapped in (
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
            HAS_PROCESSORS,
            make="vllm_specplug.engine.penalty:wrap_load_logitsprocs",
        ),
        Wrap(
            "penalty_processor",
            "vllm.v1.engine.input_processor:InputProcessor."
            "_build_logits_processors_params_validator",
            _WHY_PENALTY,
            HAS_PROCESSORS,
            make="vllm_specplug.engine.penalty:wrap_params_validator",
        ),
    )
)

REFUSAL = SeamSet(
    (
        Wrap(
            "refusal",
            "vllm.engine.arg_utils:EngineArgs.create_engine_config",
            "on an unsupported vLLM, vLLM would refuse our methods as unknown; this says why they "
            "are unavailable",
            "never: it is not applied on a supported vLLM",
            make="vllm_specplug.engine.refusal:wrap_create_engine_config",
        ),
    )
)

CPU_BACKENDS = SeamSet(
    (
        Register(
            "cpu_backend",
            f"{BACKENDS}.registry:AttentionBackendEnum.CPU_ATTN",
            WHY_BACKEND,
            HAS_MASKS,
            path="vllm_specplug.vllm_attention.cpu.TreeCPUAttentionBackend",
        ),
    )
)

# -- names that the package calls or overrides ----------------------------------------------------

# Checked with PROCESS_SEAMS in every process.
_PROCESS_USES: tuple[Seam, ...] = (
    *uses(
        "config",
        "the options of our methods are a subclass of vLLM's",
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
        "our methods resolve their options and extend the hash of the compiled graph",
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
        "draft_counts",
        _WHY_COUNTS,
        _HAS_COUNTS,
        "vllm.v1.metrics.stats:RequestSpecDecodeMetrics",
        "observe",
    ),
    *overrides(
        "metrics_bridge",
        "the front end counts the statistics in a stat logger",
        "never: it is public",
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
    *attributes(
        "structured_output",
        _WHY_GRAMMAR,
        _HAS_PARENTS,
        _GRAMMARS,
        "_grammar_bitmask",
        "_full_mask",
    ),
    *uses(
        "attention_registry",
        "workers register attention backends that compute tree rows",
        HAS_MASKS,
        f"{BACKENDS}.registry:register_backend",
        f"{BACKENDS}.registry:AttentionBackendEnum",
        f"{BACKENDS}.registry:AttentionBackendEnum.CPU_ATTN",
    ),
)

# Checked when a worker that verifies trees starts.
_WORKER_USES: tuple[Seam, ...] = (
    *WEIGHT_USES,
    *uses(
        "runner",
        "the runner reads the engine's config and ranks",
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
        "the target's layers show whether tree rows can be computed",
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
        "heads read outputs of decoder layers, which only some of vLLM's model classes return",
        "every model class returns them",
        "vllm.model_executor.layers.attention_layer_base:AttentionLayerBase",
        "vllm.model_executor.models.interfaces:supports_eagle3",
    ),
    *uses(
        "draft_kv_layer",
        _WHY_DRAFT_LAYERS,
        HAS_DRAFT_LAYERS,
        "vllm.model_executor.layers.attention_layer_base:AttentionLayerBase",
        "vllm.v1.attention.backend:AttentionBackend",
        "vllm.v1.attention.selector:get_attn_backend",
        "vllm.v1.kv_cache_interface:FullAttentionSpec",
        "vllm.v1.kv_cache_interface:KVCacheSpec",
        "vllm:_custom_ops",
    ),
    *overrides(
        "draft_kv_layer",
        _WHY_DRAFT_LAYERS,
        HAS_DRAFT_LAYERS,
        "vllm.model_executor.layers.attention_layer_base:AttentionLayerBase",
        "get_attn_backend",
        "get_kv_cache_spec",
    ),
    *PRODUCT_USES,
    *uses(
        "attention_choice",
        "vLLM caches its choice of backend, which must be cleared when backends are registered",
        HAS_MASKS,
        "vllm.v1.attention.selector:_cached_get_attn_backend",
        "vllm.v1.attention.selector:_cached_get_mamba_attn_backend",
    ),
)

_CPU_ATTN = f"{BACKENDS}.cpu_attn:CPUAttention"
_CACHE_SCALES = "vllm.model_executor.layers.quantization.kv_cache:BaseKVCacheMethod"
_CPU_USES: tuple[Seam, ...] = (
    *CPU_WEIGHT_USES,
    *uses(
        "cpu_backend",
        WHY_BACKEND,
        HAS_MASKS,
        "vllm.v1.worker.cpu_worker:CPUWorker",
        f"{_CPU_ATTN}Backend",
        f"{_CPU_ATTN}BackendImpl",
        f"{BACKENDS}.cpu_attn:_get_attn_isa",
    ),
    *attributes(
        "cpu_backend", WHY_BACKEND, HAS_MASKS, _CACHE_SCALES, "_k_scale_float", "_v_scale_float"
    ),
    *overrides("cpu_backend", WHY_BACKEND, HAS_MASKS, f"{_CPU_ATTN}Backend", "get_impl_cls"),
    *overrides("cpu_backend", WHY_BACKEND, HAS_MASKS, f"{_CPU_ATTN}BackendImpl", "forward"),
    *overrides(
        "cpu_backend", WHY_ISOLATED, SKIPS_VALUES, f"{_CPU_ATTN}BackendImpl", "do_kv_cache_update"
    ),
    *overrides(
        "cpu_worker",
        "the worker chooses our backend and runner before it sets up the device, subtracts the "
        "drafters' memory from the caches', measures step costs once the model is ready, and runs "
        "steps with the kernels that their engine chose",
        f"a method can name its runner ({REGISTRY})",
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
            TREE_GRAPHS,
            *ATTENTION_BACKENDS.seams,
            *GPU_WEIGHT_USES,
            *GPU_USES,
            *RUNNER_USES,
            *GPU_RUNNER_USES,
        )
    ),
}
"""Seams of a worker that verifies trees, by device, in addition to those of every process."""

ALL_SEAMS: tuple[Seam, ...] = tuple(
    dict.fromkeys(
        (
            *PROCESS_CHECKS.seams,
            *REFUSAL.seams,
            *WORKER_SEAMS["cpu"].seams,
            *WORKER_SEAMS["cuda"].seams,
            *STATE_SEAMS.seams,
            *CPU_STATE_SEAMS.seams,
            *DEVICE_STATE_SEAMS.seams,
            *LATENT_SEAMS["cpu"].seams,
            *LATENT_SEAMS["cuda"].seams,
            CPU_ADMISSION,
        )
    )
)
