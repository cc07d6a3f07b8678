# SPDX-License-Identifier: Apache-2.0
"""Sampling options that vLLM refuses under speculation and trees honour.

Seam: sampling_options. The refusal stays for every other speculative method.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.exceptions import VLLMValidationError

from vllm_specplug.engine.spec_config import SpecPlugSpeculativeConfig
from vllm_specplug.options import parse_request_budget
from vllm_specplug.request_params import named_arg


def _check_budget(extra_args: dict[str, Any] | None, options: Any) -> None:
    """Refuses a request's own tree budget or context limit where it makes no sense."""
    try:
        parse_request_budget(extra_args, options)
    except ValueError as error:
        raise VLLMValidationError(str(error), parameter=named_arg(error)) from None


def wrap_sampling_params(original: Callable[..., None]) -> Callable[..., None]:
    """`SamplingParams._validate_spec_decode`: `min_p` and `logit_bias` pass for trees, what a
    request asks of the tree budget is checked."""

    def validate(self: Any, speculative_config: Any) -> None:
        if (
            isinstance(speculative_config, SpecPlugSpeculativeConfig)
            and speculative_config.plugin_method is not None
        ):
            _check_budget(self.extra_args, speculative_config)
            return
        original(self, speculative_config)

    return validate
