# SPDX-License-Identifier: Apache-2.0
"""Every touch on vLLM internals: what, why, and what would let us drop it.

`compat/` holds those made in every process, `runtime/` and `verify/` those made in workers. An
entry's key is named in the docstring of the code it describes.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LedgerEntry:
    """One touch."""

    key: str
    where: str
    """Our module."""
    touches: str
    """vLLM's attribute."""
    why: str
    remove_when: str


_REGISTRY = "https://github.com/vllm-project/vllm/issues/36219"
_TREE = "https://github.com/vllm-project/vllm/issues/40809"

LEDGER: tuple[LedgerEntry, ...] = (
    LedgerEntry(
        "spec_config",
        "compat.spec_config",
        "engine.arg_utils.SpeculativeConfig (module global)",
        "vLLM's list of methods is closed and unknown keys are refused",
        f"vLLM has a proposer registry with typed options ({_REGISTRY})",
    ),
    LedgerEntry(
        "engine_config",
        "compat.engine_args",
        "EngineArgs.create_engine_config (wrapped)",
        "combinations such as LoRA or a quantised cache only show in the whole config, and "
        "must stop before a process starts",
        f"a registered method may validate the engine config ({_REGISTRY})",
    ),
    LedgerEntry(
        "refusal",
        "compat.refusal",
        "EngineArgs.create_engine_config (wrapped, unsupported vLLM only)",
        "our methods must say why they are unavailable instead of being unknown",
        "never needed on a supported vLLM",
    ),
    LedgerEntry(
        "worker_cls",
        "compat.spec_config",
        "ParallelConfig.worker_cls (set when it is 'auto')",
        "the runner mixin needs a worker that builds it",
        f"a method may name its runner ({_REGISTRY})",
    ),
    LedgerEntry(
        "metrics_bridge",
        "compat.metrics_bridge",
        "Scheduler.update_from_output, EngineCoreOutputs.scheduler_stats, "
        "StatLoggerManager.__init__ (wrapped, retyped, wrapped)",
        "our numbers are made in a worker and scraped in the API server",
        "a runner may attach statistics that reach stat loggers",
    ),
    LedgerEntry(
        "sampling_options",
        "compat.sampling_options",
        "SamplingParams._validate_spec_decode (wrapped)",
        "min_p and logit_bias are refused under any speculation; the walk honours them",
        "vLLM asks the method which options it honours",
    ),
    LedgerEntry(
        "structured_output",
        "compat.structured_output",
        "Scheduler.update_draft_token_ids and schedule, StructuredOutputManager.validate_tokens "
        "and grammar_bitmask (wrapped; act on drafts that carry parents)",
        "vLLM walks a grammar along a flat draft list, where siblings get each other's masks",
        f"drafts carry their parents to the scheduler ({_TREE})",
    ),
    LedgerEntry(
        "logits_processors",
        "runtime.logits_processors",
        "v1.worker.gpu_model_runner.build_logitsprocs (module global, swapped while our runner "
        "is built)",
        "under speculation vLLM builds min_tokens alone and refuses custom processors",
        "vLLM builds all processors for methods that sample row by row",
    ),
    LedgerEntry(
        "penalty_processor",
        "compat.penalty",
        "v1.sample.logits_processor.BUILTIN_LOGITS_PROCESSORS (appended to), "
        "InputProcessor._build_logits_processors_params_validator (wrapped)",
        "the contextual penalty must hold with and without speculation; vLLM's entry point for "
        "processors loads one class into two incompatible runners",
        "the entry point tells the model runners apart",
    ),
    LedgerEntry(
        "placeholders",
        "compat.placeholders",
        "Scheduler.__init__ (wrapped: dynamic_sd_lookup is set)",
        "requests that resume or hit the prefix cache would verify num_speculative_tokens "
        "placeholder rows that cannot be accepted",
        "a proposer can decline the padding",
    ),
    LedgerEntry(
        "calibration",
        "runtime.calibration",
        "GPUModelRunner._dummy_run, _sync_device, compute_logits; "
        "CPUWorker.compile_or_warm_up_model (overridden)",
        "the adaptive budget needs to know what rows cost on this device before it serves",
        "vLLM measures step times by rows and shares them",
    ),
    LedgerEntry(
        "cpu_runner",
        "runtime.worker_cpu",
        "v1.worker.cpu_worker.CPUModelRunner (module global, swapped during init_device)",
        "CPUWorker names its runner class as a global",
        "CPUWorker gains the _make_model_runner seam that the GPU worker has",
    ),
    LedgerEntry(
        "gpu_runner",
        "runtime.worker_gpu",
        "v1.worker.gpu_worker.Worker._make_model_runner",
        "the documented seam for a runner of one's own",
        "never: it is a public seam",
    ),
    LedgerEntry(
        "gpu_backend",
        "runtime.worker_gpu",
        "register_backend(FLASH_ATTN, TRITON_ATTN), attention_config.backend, with trees; "
        "FlashAttentionImpl.forward, TritonAttentionImpl.forward and their builders' "
        "get_cudagraph_support (verify.gpu)",
        "stock attention has one causal mask; tree rows need their ancestors, and a full graph "
        "captured without them would leave them out",
        f"vLLM takes a mask per request ({_TREE})",
    ),
    LedgerEntry(
        "cpu_backend",
        "runtime.worker_cpu",
        "register_backend(CPU_ATTN), in workers that draft trees only, and the cache of "
        "v1.attention.selector._cached_get_attn_backend (cleared)",
        "stock attention has one causal mask; tree rows need their ancestors",
        f"vLLM takes a mask per request ({_TREE})",
    ),
    LedgerEntry(
        "draft_kv_layer",
        "runtime.draft_cache",
        "AttentionLayerBase in static_forward_context",
        "draft context lives in vLLM's pages, so prefix hits and preemption hold",
        "vLLM offers cache-only layers to proposers",
    ),
    LedgerEntry(
        "self_draft",
        "runtime.self_draft",
        "set_forward_context with the plugin's attention metadata; the model called with it",
        "the target drafts for itself over a partial cache",
        "vLLM lets a proposer run the target on a cache of its own",
    ),
    LedgerEntry(
        "packed_linear",
        "runtime.linear",
        "model_executor.layers.utils.dispatch_cpu_unquantized_gemm",
        "unpacked bf16 products on CPU reorder their weights at every call",
        "torch packs weights itself",
    ),
    LedgerEntry(
        "runner_inputs",
        "runtime.runner",
        "GPUModelRunner._update_states, _prepare_inputs, _build_attention_metadata",
        "state of requests that ended is dropped in every step, the empty ones too; rotary "
        "positions follow depth; tree rows are attached to the attention metadata",
        f"vLLM takes per-node positions and masks ({_TREE})",
    ),
    LedgerEntry(
        "runner_sample",
        "runtime.runner",
        "GPUModelRunner._sample, _bookkeeping_sync",
        "acceptance is a walk; compaction must end before blocks are hashed; vLLM rewinds "
        "CPU generators of prompt chunks, which raises",
        "a registered method may bring its own acceptance",
    ),
    LedgerEntry(
        "runner_draft",
        "runtime.runner",
        "GPUModelRunner.propose_draft_token_ids, _input_fits_in_drafter",
        "custom proposers get neither hidden states nor per-request limits",
        "https://github.com/vllm-project/vllm/pull/39487 passes hidden states",
    ),
    LedgerEntry(
        "runner_setup",
        "runtime.runner",
        "GPUModelRunner._get_eagle3_aux_layers_from_config, initialize_kv_cache, "
        "use_aux_hidden_state_outputs",
        "drafters read the target's hidden states; caches are known only after allocation",
        f"vLLM has a proposer registry ({_REGISTRY})",
    ),
    LedgerEntry(
        "target_sampler",
        "runtime.target_sampler",
        "Sampler.forward, LogitsProcessor.update_state between depths, "
        "ThinkingBudgetStateHolder._state and in_spec_mode; state of built-in logits processors",
        "each visited node is sampled as plain decoding would sample it",
        "vLLM's sampler takes (request, depth) rows",
    ),
)
