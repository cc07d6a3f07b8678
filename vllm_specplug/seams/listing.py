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
    GPU_V1_USES,
)
from vllm_specplug.seams.listing_latent import LATENT_SEAMS
from vllm_specplug.seams.listing_pages import CPU_MEMORY_USES, ZEROED_PAGES, ZEROED_PAGES_USES
from vllm_specplug.seams.listing_products import CPU_PRODUCTS, PRODUCT_USES
from vllm_specplug.seams.listing_requests import REQUEST_SEAMS
from vllm_specplug.seams.listing_states import CPU_STATE_SEAMS, DEVICE_STATE_SEAMS, STATE_SEAMS
from vllm_specplug.seams.listing_v2 import (
    CPU_RUNNER_V2,
    DEVICE_SPECULATOR,
    GRAPHS_OF_TREES,
    SPECULATOR,
    V2_ADMISSION,
    V2_CPU_ADMISSION,
    V2_CPU_KERNELS,
    V2_CPU_USES,
    V2_GPU_USES,
    V2_USES,
)
from vllm_specplug.seams.listing_weights import CPU_WEIGHT_USES, GPU_WEIGHT_USES, WEIGHT_USES
from vllm_specplug.seams.reasons import (
    CONTAINED,
    HAS_REGISTRY,
    HAS_TREES,
    REGISTRY,
    TREE,
    WHY_CONTAINED,
    overrides,
    uses,
)
from vllm_specplug.seams.seam import (
    Append,
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
_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_CPU_WORKER = "vllm.v1.worker.cpu_worker:CPUWorker"
_BACKENDS = "vllm.v1.attention.backends"
_PROCESSORS = "vllm.v1.sample.logits_processor"
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
            make="vllm_specplug.vllm_process.spec_config:speculative_config_class",
        ),
        Wrap(
            "engine_config",
            "vllm.engine.arg_utils:EngineArgs.create_engine_config",
            "combinations such as a quantised cache only show in the whole config",
            f"a registered method may validate the engine config ({REGISTRY})",
            make="vllm_specplug.vllm_process.engine_args:checked",
        ),
        Retype(
            "metrics_bridge",
            "vllm.v1.engine:EngineCoreOutputs",
            f"{_WHY_STATS}; the front end drops what no type declares",
            _HAS_STATS,
            attribute="scheduler_stats",
            annotation="vllm_specplug.vllm_process.metrics_bridge:TreeSchedulerStats",
        ),
        Wrap(
            "metrics_bridge",
            f"{_SCHEDULER}.update_from_output",
            _WHY_STATS,
            _HAS_STATS,
            make="vllm_specplug.vllm_process.metrics_bridge:with_stats",
        ),
        Wrap(
            "metrics_bridge",
            "vllm.v1.metrics.loggers:StatLoggerManager.__init__",
            _WHY_STATS,
            _HAS_STATS,
            make="vllm_specplug.vllm_process.metrics_bridge:with_tree_logger",
        ),
        Wrap(
            "placeholders",
            f"{_SCHEDULER}.__init__",
            "requests that resume or hit the prefix cache would verify num_speculative_tokens "
            "placeholder rows that cannot be accepted",
            "a proposer can decline the padding",
            make="vllm_specplug.vllm_process.placeholders:without_placeholders",
        ),
        ZEROED_PAGES,
        *REQUEST_SEAMS,
        *(
            Wrap(
                "structured_output",
                f"{owner}.{name}",
                _WHY_GRAMMAR,
                _HAS_PARENTS,
                make=f"vllm_specplug.vllm_process.structured_output:{ours}",
            )
            for owner, name, ours in (
                (_SCHEDULER, "update_draft_token_ids", "update_draft_token_ids"),
                (_SCHEDULER, "update_draft_token_ids_in_output", "update_draft_token_ids"),
                (_SCHEDULER, "schedule", "schedule"),
                (_GRAMMARS, "validate_tokens", "validate_tokens"),
                (_GRAMMARS, "grammar_bitmask", "grammar_bitmask"),
            )
        ),
        *V2_ADMISSION,
        Append(
            "penalty_processor",
            f"{_PROCESSORS}:BUILTIN_LOGITS_PROCESSORS",
            _WHY_PENALTY,
            _HAS_PROCESSORS,
            item="vllm_specplug.vllm_process.penalty:make_processor",
        ),
        Wrap(
            "penalty_processor",
            "vllm.v1.worker.gpu.sample.logits_processor.loader:_load_v2_logitsprocs",
            _WHY_PENALTY,
            _HAS_PROCESSORS,
            make="vllm_specplug.vllm_process.penalty:with_penalty_on_v2",
        ),
        Wrap(
            "penalty_processor",
            "vllm.v1.engine.input_processor:InputProcessor."
            "_build_logits_processors_params_validator",
            _WHY_PENALTY,
            _HAS_PROCESSORS,
            make="vllm_specplug.vllm_process.penalty:with_penalty_check",
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
            make="vllm_specplug.vllm_process.refusal:refusing",
        ),
    )
)

LOGITS_PROCESSORS = Replace(
    "logits_processors",
    "vllm.v1.worker.gpu_model_runner:build_logitsprocs",
    "under speculation vLLM builds min_tokens alone and refuses custom processors; in place while "
    "a tree runner is built",
    "vLLM builds all processors for methods that sample row by row",
    make="vllm_specplug.vllm_v1.logits_processors:plain_builder",
)

CPU_RUNNER = Replace(
    "cpu_runner",
    "vllm.v1.worker.cpu_worker:CPUModelRunner",
    "CPUWorker names its runner class as a global; in place during init_device",
    "CPUWorker gains the _make_model_runner seam that the GPU worker has",
    make="vllm_specplug.vllm_v1.worker_cpu:tree_runner_class",
)

_DUMMY_LORAS = ("maybe_setup_dummy_loras", "maybe_select_dummy_loras", "maybe_remove_all_loras")
_WHY_STATE = "rows, tokens and caches of the step are in no argument that the runner hands over"
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
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner",
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
    *overrides(
        "runner_step",
        "a step is timed, its statistics leave with its output, and drafts that constrain a "
        "grammar leave with their parents",
        HAS_TREES,
        _RUNNER,
        "__init__",
        "execute_model",
        "sample_tokens",
        "take_draft_token_ids",
    ),
    *overrides(
        "runner_inputs",
        "state of requests that ended is dropped in every step, the empty ones too; rotary "
        "positions follow depth; tree rows are attached to the attention metadata, but not to that "
        "of dummy batches",
        HAS_TREES,
        _RUNNER,
        "_update_states",
        "_prepare_inputs",
        "_build_attention_metadata",
        "_dummy_run",
    ),
    *overrides(
        "runner_sample",
        "acceptance is a walk; compaction must end before blocks are hashed; vLLM rewinds CPU "
        "generators of prompt chunks, which raises, and counts NaN of rows as of requests",
        "a registered method may bring its own acceptance",
        _RUNNER,
        "_sample",
        "_bookkeeping_sync",
        "_get_nans_in_logits",
    ),
    *overrides(
        "runner_draft",
        "custom proposers get neither hidden states nor per-request limits",
        "https://github.com/vllm-project/vllm/pull/39487 passes hidden states",
        _RUNNER,
        "propose_draft_token_ids",
        "_input_fits_in_drafter",
    ),
    *overrides(
        "runner_setup",
        "drafters read the target's hidden states; caches are known only after allocation",
        HAS_REGISTRY,
        _RUNNER,
        "_get_eagle3_aux_layers_from_config",
        "_setup_eagle3_aux_hidden_state_outputs",
        "initialize_kv_cache",
    ),
    *uses(
        "layer_states",
        "heads read outputs of decoder layers, which only some of vLLM's classes return",
        "every class does",
        "vllm.model_executor.layers.attention_layer_base:AttentionLayerBase",
        "vllm.model_executor.models.interfaces:supports_eagle3",
    ),
    *(
        InstanceAttribute("runner_state", f"{owner}.{name}", _WHY_STATE, HAS_TREES)
        for owner, names in (
            (
                _RUNNER,
                "vllm_config model_config parallel_config compilation_config device dtype "
                "max_model_len max_num_reqs max_num_tokens kv_cache_config enable_prompt_embeds "
                "model drafter sampler input_batch requests positions query_start_loc "
                "discard_request_mask lora_config uses_mrope mrope_positions",
            ),
            (
                "vllm.v1.worker.gpu_input_batch:InputBatch",
                "num_computed_tokens_cpu num_tokens_no_spec token_ids_cpu is_token_ids "
                "req_output_token_ids generators logitsprocs sampling_metadata block_table "
                "request_lora_mapping lora_id_to_lora_request thinking_budget_state_holder",
            ),
            (
                "vllm.v1.worker.gpu_input_batch:CachedRequestState",
                "req_id sampling_params output_token_ids",
            ),
        )
        for name in names.split()
    ),
    *uses(
        "runner_state",
        _WHY_STATE,
        HAS_TREES,
        f"{_RUNNER}.get_kv_cache_spec",
        *(f"{_RUNNER}.{name}" for name in ("_sync_device", "_set_active_loras", *_DUMMY_LORAS)),
        "vllm.model_executor.models.utils:extract_layer_index",
        "vllm.forward_context:set_forward_context",
        "vllm.v1.kv_cache_interface:FullAttentionSpec",
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
        "target_sampler",
        "each visited node is sampled as plain decoding would sample it",
        "vLLM's sampler takes (request, depth) rows",
        "vllm.sampling_params:SamplingParams",
        "vllm.v1.outputs:LogprobsTensors",
        "vllm.v1.outputs:SamplerOutput",
        "vllm.v1.sample.metadata:SamplingMetadata",
        f"{_PROCESSORS}:LogitsProcessors",
        f"{_PROCESSORS}.builtin:LogitBiasLogitsProcessor",
        f"{_PROCESSORS}.builtin:MinPLogitsProcessor",
        f"{_PROCESSORS}.builtin:MinTokensLogitsProcessor",
        "vllm.v1.sample.thinking_budget_state:ThinkingBudgetStateHolder.has_tracked_requests",
    ),
    *(
        InstanceAttribute(
            "target_sampler",
            f"vllm.v1.sample.thinking_budget_state:ThinkingBudgetStateHolder.{name}",
            "only requests that still walk count down their thinking budgets, and no request that "
            "has none",
            "vLLM's sampler takes (request, depth) rows, and moves clear the slot they move to",
        )
        for name in ("_state", "in_spec_mode")
    ),
    *uses(
        "penalty_processor",
        _WHY_PENALTY,
        _HAS_PROCESSORS,
        f"{_PROCESSORS}.builtin:process_dict_updates",
        f"{_PROCESSORS}.interface:BatchUpdate",
        f"{_PROCESSORS}.interface:LogitsProcessor",
    ),
    *overrides(
        "penalty_processor",
        _WHY_PENALTY,
        _PUBLIC,
        f"{_PROCESSORS}.interface:LogitsProcessor",
        "__init__",
        "apply",
        "is_argmax_invariant",
        "update_state",
    ),
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
        "vllm.v1.worker.cpu_model_runner:CPUModelRunner",
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
            LOGITS_PROCESSORS,
            CPU_RUNNER,
            CPU_PRODUCTS,
            *CPU_BACKENDS.seams,
            *_CPU_USES,
        )
    ),
    "cpu_v2": SeamSet(
        (
            *_WORKER_USES,
            CPU_RUNNER_V2,
            SPECULATOR,
            *V2_CPU_KERNELS.seams,
            CPU_PRODUCTS,
            *CPU_BACKENDS.seams,
            *_CPU_USES,
            *V2_CPU_USES,
            *V2_USES,
        )
    ),
    "cuda": SeamSet(
        (
            *_WORKER_USES,
            LOGITS_PROCESSORS,
            *ATTENTION_BACKENDS.seams,
            *GPU_WEIGHT_USES,
            *GPU_USES,
            *GPU_V1_USES,
        )
    ),
    "cuda_v2": SeamSet(
        (
            *_WORKER_USES,
            DEVICE_SPECULATOR,
            GRAPHS_OF_TREES,
            *ATTENTION_BACKENDS.seams,
            *GPU_WEIGHT_USES,
            *GPU_USES,
            *V2_USES,
            *V2_GPU_USES,
        )
    ),
}
"""By device, and by model runner where it is V2: what a worker that verifies trees relies on,
beyond what every process does."""

ALL_SEAMS: tuple[Seam, ...] = (
    *PROCESS_CHECKS.seams,
    *REFUSAL.seams,
    *_WORKER_USES,
    LOGITS_PROCESSORS,
    CPU_RUNNER,
    CPU_RUNNER_V2,
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
    V2_CPU_ADMISSION,
    *V2_CPU_KERNELS.seams,
    *V2_CPU_USES,
    *V2_USES,
    *ATTENTION_BACKENDS.seams,
    *GPU_WEIGHT_USES,
    *GPU_USES,
    *GPU_V1_USES,
    *V2_GPU_USES,
)
