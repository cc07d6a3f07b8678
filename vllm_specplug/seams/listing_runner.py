# SPDX-License-Identifier: Apache-2.0
"""The part of the list that concerns vLLM's V2 model runner; `listing` has the whole."""

from __future__ import annotations

from vllm_specplug.seams.reasons import (
    HAS_CPU_KERNELS,
    HAS_REGISTRY,
    HAS_TREES,
    overrides,
    uses,
)
from vllm_specplug.seams.seam import (
    Add,
    InstanceAttribute,
    Overrides,
    Replace,
    ReplaceKernel,
    Seam,
    SeamSet,
    Wrap,
)

_WORKER = "vllm.v1.worker.gpu"
_RUNNER = f"{_WORKER}.model_runner:GPUModelRunner"
_OWN_KERNELS = "vllm_specplug.vllm_v2.cpu_kernels"
_WHY_KERNELS = (
    "without Triton the V2 runner has no kernels on a CPU; in place in workers of tree methods"
)

CPU_RUNNER = Replace(
    "cpu_runner",
    "vllm.v1.worker.cpu.model_runner:CPUModelRunner",
    "CPUWorker names its V2 runner class in its code; in place during init_device",
    "CPUWorker gains the _make_model_runner seam that the GPU worker has",
    make="vllm_specplug.vllm_v2.worker_cpu:tree_runner_class",
)

SPECULATOR = Replace(
    "speculator",
    f"{_WORKER}.model_runner:init_speculator",
    "vLLM's list of speculators is closed; in place while a tree runner is built",
    HAS_REGISTRY,
    make="vllm_specplug.vllm_v2.runner:make_speculator",
)

DEVICE_SPECULATOR = Replace(
    "device_speculator",
    f"{_WORKER}.model_runner:init_speculator",
    "vLLM's list of speculators is closed; in place while a tree runner of a device is built",
    HAS_REGISTRY,
    make="vllm_specplug.vllm_v2.device_speculator:make_device_speculator",
)

GRAPHS_OF_TREES = Replace(
    "graphs_of_trees",
    f"{_WORKER}.model_runner:ModelCudaGraphManager",
    "vLLM's full graphs take decoding requests of unequal numbers of rows only for its adaptive "
    "verification; in place while a tree runner makes its graphs",
    HAS_TREES,
    make="vllm_specplug.vllm_v2.graph_trees:wrap_graph_manager",
)


MODEL_RUNNER = (
    Replace(
        "model_runner_v2",
        "vllm.config.vllm:VllmConfig.use_v2_model_runner",
        "on a CPU without Triton vLLM takes V1, in which no trees run",
        HAS_CPU_KERNELS,
        make="vllm_specplug.engine.model_runner:takes_v2",
    ),
    Wrap(
        "model_runner_v2",
        "vllm.config.vllm:VllmConfig._get_v2_model_runner_unsupported_features",
        "V2 names the methods that it does not run, ours by the name they share with others",
        HAS_REGISTRY,
        make="vllm_specplug.engine.model_runner:admitting_trees",
    ),
    Wrap(
        "model_runner_v2",
        "vllm.config.vllm:VllmConfig._validate_v2_model_runner",
        "on a CPU without Triton our methods bring the kernels that V2 needs",
        HAS_CPU_KERNELS,
        make="vllm_specplug.engine.model_runner:wrap_v2_check",
    ),
    Wrap(
        "model_runner_v2",
        "vllm.config.vllm:VllmConfig.__post_init__",
        "asynchronous scheduling is admitted by the names of vLLM's own methods, and switched "
        "off on a CPU",
        HAS_REGISTRY,
        make="vllm_specplug.engine.model_runner:keeping_async_scheduling",
    ),
)

CPU_ADMISSION = Replace(
    "cpu_admission",
    "vllm.config.vllm:HAS_TRITON",
    "vLLM refuses the V2 runner without Triton; in place while the config of a tree method is "
    "checked",
    HAS_CPU_KERNELS,
    make=f"{_OWN_KERNELS}.launch:triton_stands_in",
)

CPU_WORKER_ADMISSION = Add(
    "cpu_admission",
    "vllm.v1.worker.gpu_worker:HAS_TRITON",
    "from 0.33 on a worker refuses the V2 runner without Triton as well; in place while one of a "
    "tree method is made",
    HAS_CPU_KERNELS,
    make=f"{_OWN_KERNELS}.launch:triton_stands_in",
)

CPU_KERNELS = SeamSet(
    (
        ReplaceKernel(
            "cpu_kernels",
            "vllm.v1.worker.utils:_zero_kv_blocks_kernel",
            _WHY_KERNELS,
            HAS_CPU_KERNELS,
            make=f"{_OWN_KERNELS}.inputs:zero_kv_blocks",
        ),
        *(
            ReplaceKernel(
                "cpu_kernels",
                f"{_WORKER}.{module}:_{name}_kernel",
                _WHY_KERNELS,
                HAS_CPU_KERNELS,
                make=f"{_OWN_KERNELS}.{ours}:{name}",
            )
            for ours, module, names in (
                (
                    "inputs",
                    "input_batch",
                    "prepare_prefill_inputs prepare_pos_seq_lens combine_sampled_and_draft_tokens "
                    "get_num_sampled_and_rejected post_update post_update_num_computed_tokens "
                    "expand_idx_mapping",
                ),
                ("inputs", "block_table", "gather_block_tables compute_slot_mappings"),
                ("inputs", "buffer_utils", "apply_write"),
                ("inputs", "model_states.prompt_embeds", "apply_prompt_embeds"),
                (
                    "inputs",
                    "model_states.mamba_hybrid",
                    "scatter_num_accepted fill_num_accepted",
                ),
                ("inputs", "mm.rope", "prepare_rope_positions"),
                ("sampling", "sample.gumbel", "temperature gumbel_sample"),
                ("sampling", "sample.min_p", "min_p"),
                ("sampling", "sample.logprob", "topk_log_softmax ranks fill_logprob_token_ids"),
                ("sampling", "sample.prompt_logprob", "prompt_logprobs_token_ids"),
                ("sampling", "metrics.logits", "num_nans"),
                ("sampling", "sample.output", "compact_sampling_mask"),
                ("sampling", "sample.trace_replay", "trace_replay"),
                ("logits", "sample.penalties", "penalties bincount"),
                ("logits", "sample.bad_words", "bad_words"),
                ("logits", "sample.logit_bias", "bias"),
                (
                    "logits",
                    "sample.thinking_budget",
                    "update_committed_marker_cache thinking_budget",
                ),
                ("logits", "structured_outputs", "apply_grammar_bitmask"),
                ("logits", "spec_decode.rejection_sampler", "flatten_sampled gather_draft_sampled"),
            )
            for name in names.split()
        ),
        Add(
            "cpu_kernels",
            "vllm.triton_utils:triton.next_power_of_2",
            _WHY_KERNELS,
            HAS_CPU_KERNELS,
            make=f"{_OWN_KERNELS}.launch:make_next_power_of_2",
        ),
    )
)

CPU_RUNNER_USES: tuple[Seam, ...] = (
    *uses(
        "runner_setup",
        "drafters read the target's hidden states; caches are known only after allocation",
        HAS_REGISTRY,
        "vllm.v1.worker.cpu.model_runner:CPUModelRunner",
    ),
    *overrides(
        "cpu_admission",
        "from 0.33 on a worker refuses the V2 runner without Triton",
        HAS_CPU_KERNELS,
        "vllm.v1.worker.cpu_worker:CPUWorker",
        "__init__",
    ),
    CPU_WORKER_ADMISSION,
    *uses(
        "cpu_kernels",
        "from 0.33 on cached draft logits come with seeds by step",
        HAS_CPU_KERNELS,
        f"{_WORKER}.sample:gumbel",
    ),
)

_WHY_STATE = (
    "what calibration, draft forwards and drafters' caches need of the runner is in no argument "
    "that it hands over"
)
_WHY_HISTORY = (
    "n-gram lookups read whole token histories in every step, which vLLM keeps in the host's memory"
)

GPU_RUNNER_USES: tuple[Seam, ...] = (
    *uses(
        "device_ngrams",
        _WHY_HISTORY,
        "a registered method may ask for them on the device, as vLLM's own does",
        f"{_WORKER}.buffer_utils:StagedWriteTensor",
    ),
    InstanceAttribute(
        "device_ngrams",
        f"{_WORKER}.states:RequestState.all_token_ids",
        _WHY_HISTORY,
        "a registered method may ask for them on the device, as vLLM's own does",
    ),
    *uses(
        "graphs_of_trees",
        "draft forwards are captured as vLLM captures those of its own methods",
        HAS_REGISTRY,
        f"{_WORKER}.cudagraph_utils:CudaGraphManager.capture",
        f"{_WORKER}.cudagraph_utils:CudaGraphManager.dispatch",
        f"{_WORKER}.cudagraph_utils:CudaGraphManager.run_fullgraph",
        f"{_WORKER}.cudagraph_utils:BatchExecutionDescriptor",
        "vllm.config.compilation:CUDAGraphMode",
    ),
    *overrides(
        "graphs_of_trees",
        "draft forwards are captured as vLLM captures those of its own methods",
        HAS_REGISTRY,
        f"{_WORKER}.cudagraph_utils:CudaGraphManager",
        "__init__",
    ),
    *(
        InstanceAttribute(
            "graphs_of_trees",
            f"{_WORKER}.cudagraph_utils:CudaGraphManager.{name}",
            "vLLM's graphs differ in rows or in requests, drafts of trees in depth as well, and "
            "ragged steps in both",
            HAS_REGISTRY,
        )
        for name in ("_candidates", "_capture_descs")
    ),
    InstanceAttribute(
        "graphs_of_trees",
        f"{_WORKER}.cudagraph_utils:ModelCudaGraphManager.aux_hidden_states",
        "what a draft head keeps of a step's tokens is a graph that reads the target's",
        HAS_REGISTRY,
    ),
    *uses(
        "gpu_worker",
        "drafts and the logits of all rows are memory that the KV cache must not get",
        HAS_REGISTRY,
        "vllm.v1.sample.ops.topk_topp_sampler:apply_top_k_top_p",
    ),
    *overrides(
        "gpu_worker",
        "drafts and the logits of all rows are memory that the KV cache must not get",
        HAS_REGISTRY,
        _RUNNER,
        "profile_run",
    ),
)

RUNNER_USES: tuple[Seam, ...] = (
    *uses(
        "tree_params",
        "penalties, bad words and thinking budgets read the rows before a row, which are not its "
        "ancestors",
        HAS_TREES,
        f"{_WORKER}.sample.bad_words:BadWordsState",
        f"{_WORKER}.sample.logit_bias:LogitBiasState",
    ),
    *uses(
        "penalty_processor",
        "the contextual penalty reads committed tokens where vLLM keeps them",
        "the entry point distinguishes the model runners",
        f"{_WORKER}.sample.logits_processor:LogitsProcessor",
        f"{_WORKER}.buffer_utils:UvaBackedTensor",
    ),
    *overrides(
        "penalty_processor",
        "the contextual penalty reads committed tokens where vLLM keeps them",
        "the entry point distinguishes the model runners",
        f"{_WORKER}.sample.logits_processor:LogitsProcessor",
        "__init__",
        "add_request",
        "apply_staged_writes",
        "apply",
    ),
    *overrides(
        "runner_step",
        "a step is timed, its statistics leave with its output, and a scheduler that waits for "
        "drafts is told how many there are",
        HAS_TREES,
        _RUNNER,
        "__init__",
        "execute_model",
        "sample_tokens",
        "take_draft_token_ids",
    ),
    *overrides(
        "runner_inputs",
        "trees are kept by request slot; rotary positions follow depth",
        HAS_TREES,
        _RUNNER,
        "finish_requests",
        "add_requests",
        "prepare_attn",
    ),
    *overrides(
        "runner_inputs",
        "every dummy forward makes LoRA adapters and removes them, those of a calibration too",
        "vLLM's dummy forwards take remove_lora",
        _RUNNER,
        "maybe_setup_dummy_loras",
    ),
    *overrides(
        "runner_inputs",
        "one row with logits per request is mapped to its LoRA adapter, and a tree has many",
        "V2 maps as many as there are, as V1 does",
        _RUNNER,
        "_set_active_loras",
    ),
    Overrides(
        "runner_inputs",
        f"{_WORKER}.model_states.interface:ModelState.prepare_attn",
        "tree rows are attached to the attention metadata",
        HAS_TREES,
    ),
    Overrides(
        "runner_inputs",
        f"{_WORKER}.model_states.interface:ModelState.prepare_inputs",
        "rotary positions on several axes follow depth, too; vLLM makes them after the others",
        HAS_TREES,
    ),
    *overrides(
        "runner_sample",
        "compaction must end before blocks are hashed",
        "a registered method may bring its own acceptance",
        _RUNNER,
        "sample",
    ),
    *uses(
        "runner_sample",
        "acceptance is a walk over the samples of all rows",
        "a registered method may bring its own acceptance",
        "vllm.config.model:PROCESSED_LOGPROBS_MODES",
        f"{_WORKER}.input_batch:get_num_sampled_and_rejected",
        f"{_WORKER}.metrics.logits:get_num_nans",
        f"{_WORKER}.sample.bad_words:BadWordsState",
        f"{_WORKER}.sample.logit_bias:LogitBiasState",
        f"{_WORKER}.sample.logprob:compute_topk_scores",
        f"{_WORKER}.sample.output:SamplerOutput",
        f"{_WORKER}.sample.output:SamplingMaskTensors",
        f"{_WORKER}.sample.sampler:Sampler.get_logprobs_dims",
        f"{_WORKER}.sample.sampler:Sampler.sample",
    ),
    *overrides(
        "runner_setup",
        "drafters read the target's hidden states; caches are known only after allocation",
        HAS_REGISTRY,
        _RUNNER,
        "load_model",
        "initialize_kv_cache",
    ),
    *uses(
        "runner_setup",
        "drafters read the target's hidden states; caches are known only after allocation",
        HAS_REGISTRY,
        "vllm.model_executor.models.interfaces:SupportsEagle3.set_aux_hidden_state_layers",
        "vllm.triton_utils:HAS_TRITON",
    ),
    *overrides(
        "kv_connector",
        "a connector that saves layers during the forward would read them before compaction",
        HAS_TREES,
        "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1",
        "save_kv_layer",
        "wait_for_save",
    ),
    *uses(
        "kv_connector",
        "draft layers are saved with the target's",
        HAS_REGISTRY,
        "vllm.distributed.kv_transfer:get_kv_transfer_group",
        "vllm.distributed.kv_transfer:has_kv_transfer_group",
        "vllm.forward_context:get_forward_context",
    ),
    *uses(
        "runner_state",
        _WHY_STATE,
        HAS_TREES,
        "vllm.model_executor.models.utils:extract_layer_index",
        "vllm.forward_context:set_forward_context",
        "vllm.v1.kv_cache_interface:FullAttentionSpec",
        f"{_RUNNER}._dummy_run",
        f"{_RUNNER}.get_kv_cache_spec",
        f"{_RUNNER}.maybe_select_dummy_loras",
        f"{_RUNNER}.maybe_remove_all_loras",
    ),
    *(
        InstanceAttribute("runner_state", f"{_RUNNER}.{name}", _WHY_STATE, HAS_TREES)
        for name in (
            "vllm_config",
            "model_config",
            "parallel_config",
            "device",
            "dtype",
            "max_model_len",
            "max_num_reqs",
            "max_num_tokens",
            "model",
            "compilation_config",
            "kv_cache_config",
            "block_tables",
            "lora_config",
        )
    ),
    *(
        InstanceAttribute(
            "runner_setup",
            f"{_RUNNER}.{name}",
            "a tree's metadata, parameters and walk go where the runner keeps its own",
            HAS_TREES,
        )
        for name in (
            "sampler",
            "rejection_sampler",
            "model_state",
            "req_states",
            "num_speculative_steps",
            "use_aux_hidden_state_outputs",
            "cache_config",
        )
    ),
    *uses(
        "speculator",
        "vLLM's runner asks a speculator for the next drafts",
        HAS_REGISTRY,
        f"{_WORKER}.spec_decode.speculator:BaseSpeculator",
    ),
    *overrides(
        "speculator",
        "vLLM's runner asks a speculator for the next drafts",
        HAS_REGISTRY,
        f"{_WORKER}.spec_decode.speculator:BaseSpeculator",
        "init_cudagraph_manager",
        "capture",
        "propose",
    ),
)
