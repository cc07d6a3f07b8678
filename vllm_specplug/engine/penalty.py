# SPDX-License-Identifier: Apache-2.0
"""The contextual penalty on every server with the plugin, with or without speculation.

Seam: penalty_processor. vLLM's entry point for logits processors is not used, because it loads the
same classes into both model runners, whose interfaces differ. The processor is one of V2.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from vllm_specplug.engine.spec_config import tree_config
from vllm_specplug.request_params import (
    PENALTY_ARGS,
    named_arg,
    parse_penalty,
    unknown_request_arg,
)

_PROCESSOR = "vllm_specplug.vllm_v2.penalty_processor"


class PenaltyProcessor:
    """The class that vLLM calls to build the processor; the front end also loads it."""

    def __new__(cls, vllm_config: Any, req_states: Any) -> Any:
        # Imported only in processes that build a runner.
        module = importlib.import_module(_PROCESSOR)
        return module.ContextualPenalty(vllm_config, req_states)

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Does nothing, because `check_request` has validated them."""


def wrap_load_logitsprocs(original: Callable[[Any], list[Any]]) -> Callable[[Any], list[Any]]:
    """The list of custom processors, with the plugin's before the user's own."""

    def load(logits_processors: Any) -> list[Any]:
        return [PenaltyProcessor, *original(logits_processors)]

    return load


def check_request(vllm_config: Any, params: Any) -> None:
    """Refuses unknown parameters of the plugin, an illegal penalty, and one that this server
    would not apply.

    Raises:
        VLLMValidationError: naming the parameter; the server answers 400.
    """
    from vllm.exceptions import VLLMValidationError

    extra = params.extra_args or {}
    unknown = unknown_request_arg(extra)
    if unknown is not None:
        raise VLLMValidationError(unknown[1], parameter=unknown[0])
    name = next((name for name in PENALTY_ARGS if name in extra), None)
    if name is None:
        return
    try:
        parse_penalty(extra, vllm_config.model_config.max_model_len)
    except ValueError as error:
        raise VLLMValidationError(str(error), parameter=named_arg(error)) from None
    reason = _unavailable(vllm_config)
    if reason is not None:
        raise VLLMValidationError(f"{name} is not available here: {reason}.", parameter=name)


def _unavailable(vllm_config: Any) -> str | None:
    if vllm_config.speculative_config is not None and tree_config(vllm_config) is None:
        return (
            f"speculative method {vllm_config.speculative_config.method!r} does not apply it; use "
            "one of vllm-specplug's methods, or none"
        )
    if not vllm_config.use_v2_model_runner:
        return (
            "this server uses vLLM's V1 model runner; use one of vllm-specplug's methods, or set "
            "VLLM_USE_V2_MODEL_RUNNER=1 where vLLM supports it"
        )
    return None


def wrap_params_validator(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """vLLM's validator of request parameters, which runs the plugin's checks first."""

    def build(self: Any) -> Any:
        validate = original(self)

        def checked(params: Any) -> None:
            check_request(self.vllm_config, params)
            validate(params)

        return checked

    return build
