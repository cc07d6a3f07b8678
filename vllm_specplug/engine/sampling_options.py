# SPDX-License-Identifier: Apache-2.0
"""Allows sampling options that vLLM refuses under speculation and that trees honour.

Seam: sampling_options. vLLM still refuses them for every other speculative method.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.exceptions import VLLMValidationError

from vllm_specplug.engine.spec_config import SpecPlugSpeculativeConfig
from vllm_specplug.options import parse_request_budget
from vllm_specplug.request_params import named_arg


def wrap_sampling_params(original: Callable[..., None]) -> Callable[..., None]:
    """`SamplingParams._validate_spec_decode`, which for trees allows `min_p` and `logit_bias`, and
    checks the request's tree budget."""

    def validate(self: Any, speculative_config: Any) -> None:
        if (
            not isinstance(speculative_config, SpecPlugSpeculativeConfig)
            or speculative_config.plugin_method is None
        ):
            original(self, speculative_config)
            return
        try:
            parse_request_budget(self.extra_args, speculative_config)
        except ValueError as error:
            raise VLLMValidationError(str(error), parameter=named_arg(error)) from None

    return validate
