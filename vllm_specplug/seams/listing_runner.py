# SPDX-License-Identifier: Apache-2.0
"""Seams of workers and of vLLM's V2 model runner."""

from __future__ import annotations

from vllm_specplug.seams.listing_process import PENALTY
from vllm_specplug.seams.seam import (
    Add,
    Members,
    Replace,
    ReplaceKernel,
    Seam,
    SeamSet,
    Topic,
    Wrap,
)

_V2 = "vllm.v1.worker.gpu"
_RUNNER = f"{_V2}.model_runner:GPUModelRunner"
_GRAPHS = f"{_V2}.cudagraph_utils"
_OWN_KERNELS = "vllm_specplug.vllm_v2.cpu_kernels"

_SPECULATOR = Topic(
    "speculator", "vLLM's list of speculators is closed; applied while a tree runner is built"
)
_TREE_GRAPHS = Topic(
    "tree_graphs",
    "vLLM's full graphs take requests with unequal numbers of rows only for its adaptive "
    "verification; applied while a tree runner makes its graphs",
)
_PIPELINE = Topic(
    "pipeline",
    "vLLM broadcasts tokens and counts from the last pipeline stage; earlier stages also need the "
    "parents of trees and the accepted paths",
)
_KERNELS = Topic(
    "cpu_kernels",
    "without Triton the V2 runner has no kernels on a CPU; applied in workers of tree methods",
)

CPU_RUNNER = Replace(
    Topic("cpu_runner", "CPUWorker fixes its V2 runner class; applied during init_device"),
    "vllm.v1.worker.cpu.model_runner:CPUModelRunner",
    make="vllm_specplug.vllm_v2.worker_cpu:tree_runner_factory",
)
SPECULATOR = Replace(
    _SPECULATOR,
    f"{_V2}.model_runner:init_speculator",
    make="vllm_specplug.vllm_v2.runner:make_speculator",
)
DEVICE_SPECULATOR = Replace(
    Topic("device_speculator", _SPECULATOR.why),
    f"{_V2}.model_runner:init_speculator",
    make="vllm_specplug.vllm_v2.device_speculator:make_device_speculator",
)
TREE_GRAPHS = Replace(
    _TREE_GRAPHS,
    f"{_V2}.model_runner:ModelCudaGraphManager",
    make="vllm_specplug.vllm_v2.graph_trees:wrap_graph_manager",
)
CPU_ADMISSION = Replace(
    Topic(
        "cpu_admission",
        "vLLM refuses the V2 runner without Triton; applied while the config of a tree method is "
        "checked",
    ),
    "vllm.config.vllm:HAS_TRITON",
    make=f"{_OWN_KERNELS}.launch:triton_stands_in",
)
CPU_WORKER_ADMISSION = Add(
    Topic(
        "cpu_admission",
        "since 0.33 workers refuse the V2 runner without Triton; applied while a worker of a tree "
        "method is built",
    ),
    "vllm.v1.worker.gpu_worker:HAS_TRITON",
    make=f"{_OWN_KERNELS}.launch:triton_stands_in",
)
LOADED_GRAPHS = SeamSet(
    (
        Add(
            Topic(
                "loaded_graphs",
                "vLLM calls a method that only graphs of its own backend have, so that it compiles "
                "the graph of a CPU again at each start, for a minute or two; applied in workers",
            ),
            "torch._dynamo.aot_compile_types:BundledAOTAutogradSerializableCallable."
            "finalize_loading",
            make="vllm_specplug.vllm_worker.start_up:make_finalize_loading",
        ),
    )
)
_TARGET_PRODUCTS = "vllm_specplug.vllm_worker.target"
_LINEAR_KERNELS = "vllm.model_executor.kernels.linear"
_CPU_PRODUCTS_TOPIC = Topic(
    "cpu_products",
    "vLLM multiplies a dozen bfloat16 rows in 1.5 times the time of one row on a CPU with "
    "AVX-512 BF16, in 5 times with AVX-512 only, in 9 times without it, and in 2.5 times with "
    "4-bit weights; applied while a worker loads its weights",
)
CPU_PRODUCTS = SeamSet(
    Wrap(_CPU_PRODUCTS_TOPIC, target, make=f"{_TARGET_PRODUCTS}.{make}")
    for target, make in (
        (
            "vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm",
            "linear:packing_dispatch",
        ),
        (
            f"{_LINEAR_KERNELS}.mixed_precision.cpu:"
            "CPUWNA16LinearKernel.process_weights_after_loading",
            "quantised:packing_int4",
        ),
        (
            f"{_LINEAR_KERNELS}.scaled_mm.cpu:"
            "CPUInt8ScaledMMLinearKernel.process_weights_after_loading",
            "quantised:packing_int8",
        ),
    )
)

# Module of `cpu_kernels`, module of vLLM's runner, and the names of its kernels.
_REPLACED = (
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
    ("inputs", "model_states.mamba_hybrid", "scatter_num_accepted fill_num_accepted"),
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
    ("logits", "sample.thinking_budget", "update_committed_marker_cache thinking_budget"),
    ("logits", "structured_outputs", "apply_grammar_bitmask"),
)
CPU_KERNELS = SeamSet(
    (
        ReplaceKernel(
            _KERNELS,
            "vllm.v1.worker.utils:_zero_kv_blocks_kernel",
            make=f"{_OWN_KERNELS}.inputs:zero_kv_blocks",
        ),
        *(
            ReplaceKernel(
                _KERNELS, f"{_V2}.{module}:_{name}_kernel", make=f"{_OWN_KERNELS}.{ours}:{name}"
            )
            for ours, module, names in _REPLACED
            for name in names.split()
        ),
        Add(
            _KERNELS,
            "vllm.triton_utils:triton.next_power_of_2",
            make=f"{_OWN_KERNELS}.launch:make_next_power_of_2",
        ),
    )
)

# -- members that the runner and the worker override, call or read ---------------------------------

RUNNER_MEMBERS: tuple[Seam, ...] = (
    Members(
        PENALTY,
        f"{_V2}.sample.logits_processor:LogitsProcessor",
        "add_request apply_staged_writes apply",
    ),
    Members(
        Topic(
            "runner_setup",
            "drafters read the target's hidden states; caches are known only after allocation; "
            "the runner's own fields hold a tree's metadata, parameters and acceptance",
        ),
        _RUNNER,
        "load_model initialize_kv_cache sampler rejection_sampler model_state req_states "
        "num_speculative_steps use_aux_hidden_state_outputs cache_config",
    ),
    Members(
        Topic(
            "layer_states",
            "heads read outputs of decoder layers, which only some of vLLM's model classes return",
        ),
        "vllm.model_executor.models.interfaces:SupportsEagle3",
        "set_aux_hidden_state_layers",
    ),
    Members(
        Topic(
            "runner_step",
            "the runner keeps trees by request slot, times steps, attaches their statistics to the "
            "output, and tells a scheduler that waits for drafts how many there are; accepted rows "
            "must be compacted before blocks are hashed",
        ),
        _RUNNER,
        "execute_model finish_requests add_requests prepare_attn sample sample_tokens "
        "take_draft_token_ids",
    ),
    Members(
        _PIPELINE,
        _RUNNER,
        "update_pp_decode_requests execute_model_state pp_handler intermediate_tensors",
    ),
    Members(
        _PIPELINE,
        f"{_V2}.pp_utils:PPHandler",
        "is_last_rank last_rank device main_stream broadcast_stream broadcast_group queue "
        "req_idx_gen_np configure_aux_hidden_state_relay",
    ),
    Members(
        _PIPELINE,
        f"{_V2}.pp_utils:PendingRecv",
        "idx_mapping idx_mapping_np gen_at_receive_np",
    ),
    Members(
        _PIPELINE,
        f"{_V2}.spec_decode.eagle.eagle3_utils",
        "verify_supports_aux_hidden_states_over_pp reserve_aux_intermediate_tensor_slots",
    ),
    Members(
        Topic(
            "runner_step",
            "the sizes of trees are attached to a step's output after the copy to the host",
        ),
        f"{_V2}.async_utils:AsyncOutput",
        "get_output",
    ),
    Members(
        Topic("runner_sample", "acceptance walks each tree along the samples of its rows"),
        f"{_V2}.sample.sampler:Sampler",
        "get_logprobs_dims sample",
    ),
    Members(
        Topic(
            "runner_adapters",
            "vLLM maps one row with logits per request to a LoRA adapter, and a tree has several; "
            "every dummy forward creates and removes adapters, also during calibration",
        ),
        _RUNNER,
        "_set_active_loras maybe_setup_dummy_loras maybe_select_dummy_loras maybe_remove_all_loras",
    ),
    Members(
        Topic(
            "model_state",
            "tree rows are attached to the attention metadata; rotary positions on several axes "
            "follow the depth; calibration's dummy rows must differ, or they would all take the "
            "same experts",
        ),
        f"{_V2}.model_states.interface:ModelState",
        "prepare_attn prepare_inputs dummy_inputs_embeds",
    ),
    Members(
        Topic(
            "runner_state",
            "calibration, draft forwards and drafters' caches need state of the runner that it "
            "passes in no argument",
        ),
        _RUNNER,
        "_dummy_run get_kv_cache_spec vllm_config model_config parallel_config device dtype "
        "max_model_len max_num_reqs max_num_tokens model compilation_config kv_cache_config "
        "block_tables lora_config",
    ),
    Members(
        Topic(
            "kv_connector",
            "a connector that saves layers during the forward would read them before compaction",
        ),
        "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1",
        "save_kv_layer wait_for_save",
    ),
    Members(
        Topic(
            "draft_kv_layer",
            "the context of drafts is kept in vLLM's pages, so it follows prefix hits and "
            "preemption",
        ),
        "vllm.model_executor.layers.attention_layer_base:AttentionLayerBase",
        "get_attn_backend get_kv_cache_spec",
    ),
    Members(
        Topic("speculator", "vLLM's runner asks a speculator for the next drafts"),
        f"{_V2}.spec_decode.speculator:BaseSpeculator",
        "init_cudagraph_manager capture propose",
    ),
)

_WEIGHT_UPDATES = Topic(
    "weight_updates",
    "weights are packed whenever they are loaded, and drafters copy the target's embedding and LM "
    "head, which vLLM replaces",
)
_WEIGHT_METHODS = "reload_weights update_weights finish_weight_update"

# Separate lists: importing vLLM's CPU worker replaces torch's events and pinned memory.
CPU_WORKER_MEMBERS: tuple[Seam, ...] = (
    Members(
        Topic(
            "cpu_worker",
            "the worker chooses our backend and runner before it sets up the device, subtracts the "
            "drafters' memory from the caches', measures step costs once the model is ready, "
            "settles pipeline stages at a pause, and runs steps with the kernels that their engine "
            "chose",
        ),
        "vllm.v1.worker.cpu_worker:CPUWorker",
        "init_device load_model execute_model determine_available_memory compile_or_warm_up_model "
        "synchronize_device",
    ),
    Members(_WEIGHT_UPDATES, "vllm.v1.worker.cpu_worker:CPUWorker", _WEIGHT_METHODS),
    CPU_WORKER_ADMISSION,
    Members(
        Topic(
            "int8_linear", "int8 products of drafts read half the bytes at nearly twice the speed"
        ),
        "vllm._custom_ops",
        "create_onednn_scaled_mm onednn_scaled_int8_quant onednn_scaled_mm",
    ),
)

GPU_WORKER_MEMBERS: tuple[Seam, ...] = (
    Members(
        Topic(
            "gpu_worker",
            "vLLM's documented hook for another runner, the two points for warming up (before "
            "graphs are captured, and before vLLM reports kernels that compile late), and the "
            "pause at which pipeline stages settle",
        ),
        "vllm.v1.worker.gpu_worker:Worker",
        "init_device _make_model_runner compile_or_warm_up_model _maybe_activate_jit_monitor "
        "synchronize_device",
    ),
    Members(
        Topic(
            "gpu_worker", "the KV cache must leave memory for drafts and for the logits of all rows"
        ),
        _RUNNER,
        "profile_run",
    ),
    Members(_WEIGHT_UPDATES, "vllm.v1.worker.gpu_worker:Worker", _WEIGHT_METHODS),
    Members(
        Topic(
            "device_ngrams",
            "n-gram lookups read full token histories in every step, which vLLM keeps in host "
            "memory",
        ),
        f"{_V2}.states:RequestState",
        "all_token_ids",
    ),
    Members(
        Topic(
            "tree_graphs",
            "draft forwards are captured in graphs, as vLLM captures those of its own methods; "
            "vLLM's graphs differ in rows or in requests, draft graphs also in depth, and graphs "
            "of ragged steps in both rows and requests",
        ),
        f"{_GRAPHS}:CudaGraphManager",
        "capture dispatch run_fullgraph _candidates _capture_descs",
    ),
    Members(
        Topic(
            "tree_graphs",
            "the graph that stores a draft head's context reads the target's hidden states",
        ),
        f"{_GRAPHS}:ModelCudaGraphManager",
        "aux_hidden_states",
    ),
    Members(
        Topic(
            "fp8_linear",
            "fp8 products of drafts on a GPU read half the bytes, by a kernel tuned for few rows",
        ),
        "vllm._custom_ops",
        "cutlass_scaled_mm cutlass_scaled_mm_supports_fp8",
    ),
)
