# SPDX-License-Identifier: Apache-2.0
"""Seams of every process: configuration, scheduler, metrics and requests."""

from __future__ import annotations

from vllm_specplug.seams.seam import Members, Replace, SeamSet, Topic, Wrap

_ENGINE = "vllm_specplug.engine"
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_GRAMMARS = "vllm.v1.structured_output:StructuredOutputManager"
_CONFIG = "vllm.config.vllm:VllmConfig"
_CREATE_CONFIG = "vllm.engine.arg_utils:EngineArgs.create_engine_config"

_SPEC_CONFIG = Topic("spec_config", "vLLM's list of methods is closed, and it refuses unknown keys")
_STATS = Topic(
    "metrics_bridge",
    "a worker makes the statistics, and the API server exports them; the front end drops fields "
    "that no type declares",
)
_REPORTS = Topic(
    "step_reports",
    "a worker's statistics, reservations and drafts come with its output; vLLM's call for drafts "
    "after each step leaves the worker idle",
)
_COUNTS = Topic(
    "draft_counts",
    "vLLM counts rows that it reserved ahead as drafts, whether they have a node or not",
)
_GRAMMAR = Topic(
    "structured_output",
    "vLLM advances a grammar along a flat draft list, where siblings get each other's masks; "
    "changes only drafts that carry their parents",
)
_ZEROED = Topic(
    "zeroed_pages",
    "cache groups with unlike heads share pages, so NaN keys of drafts may be read as values",
)

PENALTY = Topic(
    "penalty_processor",
    "the contextual penalty applies with and without speculation; vLLM's entry point for "
    "processors loads one class into two incompatible runners",
)

_MODEL_RUNNER = (
    Replace(
        Topic(
            "model_runner_v2", "on a CPU without Triton vLLM chooses V1, which does not run trees"
        ),
        f"{_CONFIG}.use_v2_model_runner",
        make=f"{_ENGINE}.model_runner:replace_use_v2_model_runner",
    ),
    Wrap(
        Topic(
            "model_runner_v2",
            "V2 refuses methods by name, and ours share the name custom_class with others",
        ),
        f"{_CONFIG}._get_v2_model_runner_unsupported_features",
        make=f"{_ENGINE}.model_runner:wrap_unsupported_features",
    ),
    Wrap(
        Topic(
            "model_runner_v2",
            "on a CPU without Triton our methods provide the kernels that V2 needs",
        ),
        f"{_CONFIG}._validate_v2_model_runner",
        make=f"{_ENGINE}.model_runner:wrap_validate_v2_model_runner",
    ),
    Wrap(
        Topic(
            "model_runner_v2",
            "vLLM allows asynchronous scheduling only for its own methods, by name, and switches "
            "it off on a CPU",
        ),
        f"{_CONFIG}.__post_init__",
        make=f"{_ENGINE}.model_runner:wrap_post_init",
    ),
)

PROCESS_SEAMS = SeamSet(
    (
        Replace(
            _SPEC_CONFIG,
            "vllm.engine.arg_utils:SpeculativeConfig",
            make=f"{_ENGINE}.spec_config:speculative_config_class",
        ),
        Members(
            _SPEC_CONFIG,
            "vllm.config.speculative:SpeculativeConfig",
            "__post_init__ compute_hash use_eagle_block_drop",
        ),
        Wrap(
            Topic(
                "engine_config",
                "some combinations, such as a quantised cache, show only in the engine config",
            ),
            _CREATE_CONFIG,
            make=f"{_ENGINE}.engine_args:wrap_create_engine_config",
        ),
        Members(_STATS, "vllm.v1.engine:EngineCoreOutputs", "scheduler_stats"),
        Replace(
            _STATS,
            "vllm.v1.engine:EngineCoreOutputs.__annotations__",
            make=f"{_ENGINE}.metrics_bridge:replace_annotations",
        ),
        Wrap(
            _REPORTS,
            f"{_SCHEDULER}.update_from_output",
            make=f"{_ENGINE}.step_reports:wrap_update_from_output",
        ),
        Wrap(
            _REPORTS,
            "vllm.v1.engine.core:EngineCore.post_step",
            make=f"{_ENGINE}.step_reports:wrap_post_step",
        ),
        Wrap(
            _STATS,
            "vllm.v1.metrics.loggers:StatLoggerManager.__init__",
            make=f"{_ENGINE}.metrics_bridge:wrap_stat_logger_manager",
        ),
        Members(
            _STATS,
            "vllm.v1.metrics.loggers:AggregateStatLoggerBase",
            "record log_engine_initialized",
        ),
        *(
            Wrap(_COUNTS, f"{_SCHEDULER}.{name}", make=f"{_ENGINE}.draft_counts:wrap_{name}")
            for name in ("make_spec_decoding_stats", "add_request")
        ),
        Members(_COUNTS, "vllm.v1.metrics.stats:RequestSpecDecodeMetrics", "observe"),
        Wrap(
            Topic(
                "placeholders",
                "requests that resume or hit the prefix cache would verify num_speculative_tokens "
                "placeholder rows, which can never be accepted",
            ),
            f"{_SCHEDULER}.__init__",
            make=f"{_ENGINE}.placeholders:wrap_scheduler",
        ),
        Wrap(
            _ZEROED,
            "vllm.v1.engine.core:get_kv_cache_configs",
            make=f"{_ENGINE}.zeroed_pages:wrap_get_kv_cache_configs",
        ),
        Members(_ZEROED, "vllm.v1.kv_cache_interface:KVCacheConfig", "needs_kv_cache_zeroing"),
        Wrap(
            Topic(
                "sampling_options",
                "vLLM refuses min_p and logit_bias under any speculation; tree verification "
                "honours them",
            ),
            "vllm.sampling_params:SamplingParams._validate_spec_decode",
            make=f"{_ENGINE}.sampling_options:wrap_sampling_params",
        ),
        Wrap(
            Topic(
                "request_body",
                "vllm_xargs takes no booleans, so true is read as 1; unknown fields of a request "
                "are silently dropped",
            ),
            "vllm.entrypoints.serve.utils.api_utils:validate_json_request",
            make=f"{_ENGINE}.request_body:wrap_validate_json_request",
        ),
        *(
            Wrap(_GRAMMAR, target, make=f"{_ENGINE}.structured_output:wrap_{wrapped}")
            for target, wrapped in (
                (f"{_SCHEDULER}.update_draft_token_ids", "update_draft_token_ids"),
                (f"{_SCHEDULER}.update_draft_token_ids_in_output", "update_draft_token_ids"),
                (f"{_GRAMMARS}.validate_tokens", "validate_tokens"),
                (f"{_GRAMMARS}.grammar_bitmask", "grammar_bitmask"),
            )
        ),
        Members(_GRAMMAR, _GRAMMARS, "_get_constraint_bounds _grammar_bitmask _full_mask"),
        *_MODEL_RUNNER,
        Wrap(
            PENALTY,
            "vllm.v1.worker.gpu.sample.logits_processor.loader:_load_v2_logitsprocs",
            make=f"{_ENGINE}.penalty:wrap_load_logitsprocs",
        ),
        Wrap(
            PENALTY,
            "vllm.v1.engine.input_processor:InputProcessor."
            "_build_logits_processors_params_validator",
            make=f"{_ENGINE}.penalty:wrap_params_validator",
        ),
    )
)

REFUSAL = SeamSet(
    (
        Wrap(
            Topic(
                "refusal",
                "on an unsupported vLLM, vLLM would refuse our methods as unknown; this says why "
                "they are unavailable",
            ),
            _CREATE_CONFIG,
            make=f"{_ENGINE}.versions:wrap_create_engine_config",
        ),
    )
)
