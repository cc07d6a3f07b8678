# SPDX-License-Identifier: Apache-2.0
"""Seams of vLLM's V2 model runner."""

from __future__ import annotations

from vllm_specplug.seams.reasons import (
    HAS_CPU_KERNELS,
    HAS_PROCESSORS,
    HAS_REGISTRY,
    HAS_TREES,
    attributes,
    overrides,
    uses,
)
from vllm_specplug.seams.seam import Add, Replace, ReplaceKernel, Seam, SeamSet, Wrap

_WORKER = "vllm.v1.worker.gpu"
_RUNNER = f"{_WORKER}.model_runner:GPUModelRunner"
_OWN_KERNELS = "vllm_specplug.vllm_v2.cpu_kernels"
_WHY_KERNELS = (
    "without Triton the V2 runner has no kernels on a CPU; applied in workers of tree methods"
)
_WHY_SPECULATOR = "vLLM's list of speculators is closed; applied while a tree runner is built"

CPU_RUNNER = Replace(
    "cpu_runner",
    "vllm.v1.worker.cpu.model_runner:CPUModelRunner",
    "CPUWorker fixes its V2 runner class; applied during init_device",
    "CPUWorker gets the _make_model_runner hook of the GPU worker",
    make="vllm_specplug.vllm_v2.worker_cpu:tree_runner_class",
)

SPECULATOR = Replace(
    "speculator",
    f"{_WORKER}.model_runner:init_speculator",
    _WHY_SPECULATOR,
    HAS_REGISTRY,
    make="vllm_specplug.vllm_v2.runner:make_speculator",
)

DEVICE_SPECULATOR = Replace(
    "device_speculator",
    f"{_WORKER}.model_runner:init_speculator",
    _WHY_SPECULATOR,
    HAS_REGISTRY,
    make="vllm_specplug.vllm_v2.device_speculator:make_device_speculator",
)

TREE_GRAPHS = Replace(
    "tree_graphs",
    f"{_WORKER}.model_runner:ModelCudaGraphManager",
    "vLLM's full graphs take requests with unequal numbers of rows only for its adaptive "
    "verification; applied while a tree runner makes its graphs",
    HAS_TREES,
    make="vllm_specplug.vllm_v2.graph_trees:wrap_graph_manager",
)


MODEL_RUNNER = (
    Replace(
        "model_runner_v2",
        "vllm.config.vllm:VllmConfig.use_v2_model_runner",
        "on a CPU without Triton vLLM chooses V1, which does not run trees",
        HAS_CPU_KERNELS,
        make="vllm_specplug.engine.model_runner:replace_use_v2_model_runner",
    ),
    Wrap(
        "model_runner_v2",
        "vllm.config.vllm:VllmConfig._get_v2_model_runner_unsupported_features",
        "V2 refuses methods by name, and ours share the name custom_class with others",
        HAS_REGISTRY,
        make="vllm_specplug.engine.model_runner:wrap_unsupported_features",
    ),
    Wrap(
        "model_runner_v2",
        "vllm.config.vllm:VllmConfig._validate_v2_model_runner",
        "on a CPU without Triton our methods provide the kernels that V2 needs",
        HAS_CPU_KERNELS,
        make="vllm_specplug.engine.model_runner:wrap_validate_v2_model_runner",
    ),
    Wrap(
        "model_runner_v2",
        "vllm.config.vllm:VllmConfig.__post_init__",
        "vLLM allows asynchronous scheduling only for its own methods, by name, and switches it "
        "off on a CPU",
        HAS_REGISTRY,
        make="vllm_specplug.engine.model_runner:wrap_post_init",
    ),
)

CPU_ADMISSION = Replace(
    "cpu_admission",
    "vllm.config.vllm:HAS_TRITON",
    "vLLM refuses the V2 runner without Triton; applied while the config of a tree method is "
    "checked",
    HAS_CPU_KERNELS,
    make=f"{_OWN_KERNELS}.launch:triton_stands_in",
)

CPU_WORKER_ADMISSION = Add(
    "cpu_admission",
    "vllm.v1.worker.gpu_worker:HAS_TRITON",
    "since 0.33 workers refuse the V2 runner without Triton; applied while a worker of a tree "
    "method is built",
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
                ("logits", "sample.penalties", "penalties bincount"),
                ("logits", "sample.bad_words", "bad_words"),
                ("logits", "sample.logit_bias", "bias"),
                (
                    "logits",
                    "sample.thinking_budget",
                    "update_committed_marker_cache thinking_budget",
                ),
                ("logits", "structured_outputs", "apply_grammar_bitmask"),
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

_WHY_SETUP = "drafters read the target's hidden states; caches are known only after allocation"

CPU_RUNNER_USES: tuple[Seam, ...] = (
    *uses(
        "runner_setup",
        _WHY_SETUP,
        HAS_REGISTRY,
        "vllm.v1.worker.cpu.model_runner:CPUModelRunner",
    ),
    *overrides(
        "cpu_admission",
        "since 0.33 workers refuse the V2 runner without Triton",
        HAS_CPU_KERNELS,
        "vllm.v1.worker.cpu_worker:CPUWorker",
        "__init__",
    ),
    CPU_WORKER_ADMISSION,
)

_WHY_STATE = (
    "calibration, draft forwards and drafters' caches need state of the runner that it passes in "
    "no argument"
)
_WHY_HISTORY = (
    "n-gram lookups read full token histories in every step, which vLLM keeps in host memory"
)
_DEVICE_HISTORY = "a registered method can request them on the device, as vLLM's ngram_gpu does"
_GRAPH_MANAGER = f"{_WORKER}.cudagraph_utils:CudaGraphManager"
_WHY_GRAPHS = "draft forwards are captured in graphs, as vLLM captures those of its own methods"
_WHY_PROFILE = "the KV cache must leave memory for drafts and for the logits of all rows"

GPU_RUNNER_USES: tuple[Seam, ...] = (
    *uses(
        "device_ngrams",
        _WHY_HISTORY,
        _DEVICE_HISTORY,
        f"{_WORKER}.buffer_utils:StagedWriteTensor",
    ),
    *attributes(
        "device_ngrams",
        _WHY_HISTORY,
        _DEVICE_HISTORY,
        f"{_WORKER}.states:RequestState",
        "all_token_ids",
    ),
    *uses(
        "tree_graphs",
        _WHY_GRAPHS,
        HAS_REGISTRY,
        f"{_GRAPH_MANAGER}.capture",
        f"{_GRAPH_MANAGER}.dispatch",
        f"{_GRAPH_MANAGER}.run_fullgraph",
        f"{_WORKER}.cudagraph_utils:BatchExecutionDescriptor",
        "vllm.config.compilation:CUDAGraphMode",
    ),
    *overrides("tree_graphs", _WHY_GRAPHS, HAS_REGISTRY, _GRAPH_MANAGER, "__init__"),
    *attributes(
        "tree_graphs",
        "vLLM's graphs differ in rows or in requests; draft graphs also differ in depth, and "
        "graphs of ragged steps in both rows and requests",
        HAS_REGISTRY,
        _GRAPH_MANAGER,
        "_candidates",
        "_capture_descs",
    ),
    *attributes(
        "tree_graphs",
        "the graph that stores a draft head's context reads the target's hidden states",
        HAS_REGISTRY,
        f"{_WORKER}.cudagraph_utils:ModelCudaGraphManager",
        "aux_hidden_states",
    ),
    *uses(
        "gpu_worker",
        _WHY_PROFILE,
        HAS_REGISTRY,
        "vllm.v1.sample.ops.topk_topp_sampler:apply_top_k_top_p",
    ),
    *overrides("gpu_worker", _WHY_PROFILE, HAS_REGISTRY, _RUNNER, "profile_run"),
)

_WHY_PENALTY = "the contextual penalty reads committed tokens in vLLM's buffers"
_HAS_ACCEPTANCE = "a registered method can bring its own acceptance"
_WHY_PROPOSE = "vLLM's runner asks a speculator for the next drafts"
_SPECULATOR = f"{_WORKER}.spec_decode.speculator:BaseSpeculator"
_MODEL_STATE = f"{_WORKER}.model_states.interface:ModelState"

RUNNER_USES: tuple[Seam, ...] = (
    *uses(
        "tree_params",
        "penalties, bad words and thinking budgets read the rows before a row; in a tree these are "
        "not its ancestors",
        HAS_TREES,
        f"{_WORKER}.sample.bad_words:BadWordsState",
        f"{_WORKER}.sample.logit_bias:LogitBiasState",
    ),
    *uses(
        "penalty_processor",
        _WHY_PENALTY,
        HAS_PROCESSORS,
        f"{_WORKER}.sample.logits_processor:LogitsProcessor",
        f"{_WORKER}.buffer_utils:UvaBackedTensor",
    ),
    *overrides(
        "penalty_processor",
        _WHY_PENALTY,
        HAS_PROCESSORS,
        f"{_WORKER}.sample.logits_processor:LogitsProcessor",
        "__init__",
        "add_request",
        "apply_staged_writes",
        "apply",
    ),
    *overrides(
        "runner_step",
        "the runner times steps, attaches their statistics to the output, and tells a scheduler "
        "that waits for drafts how many there are",
        HAS_TREES,
        _RUNNER,
        "__init__",
        "execute_model",
        "sample_tokens",
        "take_draft_token_ids",
    ),
    *overrides(
        "runner_step",
        "the sizes of trees are attached to a step's output after the copy to the host",
        HAS_TREES,
        f"{_WORKER}.async_utils:AsyncOutput",
        "get_output",
    ),
    *overrides(
        "runner_inputs",
        "the runner keeps trees by request slot; rotary positions follow the depth",
        HAS_TREES,
        _RUNNER,
        "finish_requests",
        "add_requests",
        "prepare_attn",
    ),
    *overrides(
        "runner_inputs",
        "every dummy forward creates and removes LoRA adapters, also during calibration",
        "vLLM's dummy forwards take remove_lora",
        _RUNNER,
        "maybe_setup_dummy_loras",
    ),
    *overrides(
        "runner_inputs",
        "vLLM maps one row with logits per request to a LoRA adapter; a tree has several",
        "V2 maps all rows with logits, as V1 does",
        _RUNNER,
        "_set_active_loras",
    ),
    *overrides(
        "runner_inputs",
        "tree rows are attached to the attention metadata",
        HAS_TREES,
        _MODEL_STATE,
        "prepare_attn",
    ),
    *overrides(
        "runner_inputs",
        "rotary positions on several axes also follow the depth; vLLM makes them after the others",
        HAS_TREES,
        _MODEL_STATE,
        "prepare_inputs",
    ),
    *overrides(
        "runner_inputs",
        "calibration's dummy rows must differ, or they would all take the same experts",
        "vLLM's `randomize_inputs` fills embeddings too",
        _MODEL_STATE,
        "dummy_inputs_embeds",
    ),
    *overrides(
        "runner_sample",
        "accepted rows must be compacted before blocks are hashed",
        _HAS_ACCEPTANCE,
        _RUNNER,
        "sample",
    ),
    *uses(
        "runner_sample",
        "acceptance walks each tree along the samples of its rows",
        _HAS_ACCEPTANCE,
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
        _WHY_SETUP,
        HAS_REGISTRY,
        _RUNNER,
        "load_model",
        "initialize_kv_cache",
    ),
    *uses(
        "runner_setup",
        _WHY_SETUP,
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
    *attributes(
        "runner_state",
        _WHY_STATE,
        HAS_TREES,
        _RUNNER,
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
    ),
    *attributes(
        "runner_setup",
        "the runner's own fields hold a tree's metadata, parameters and acceptance",
        HAS_TREES,
        _RUNNER,
        "sampler",
        "rejection_sampler",
        "model_state",
        "req_states",
        "num_speculative_steps",
        "use_aux_hidden_state_outputs",
        "cache_config",
    ),
    *uses("speculator", _WHY_PROPOSE, HAS_REGISTRY, _SPECULATOR),
    *overrides(
        "speculator",
        _WHY_PROPOSE,
        HAS_REGISTRY,
        _SPECULATOR,
        "init_cudagraph_manager",
        "capture",
        "propose",
    ),
)
