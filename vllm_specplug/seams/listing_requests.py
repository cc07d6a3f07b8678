# SPDX-License-Identifier: Apache-2.0
"""Seams of the parameters of single requests."""

from __future__ import annotations

from vllm_specplug.seams.seam import Seam, Wrap

REQUEST_SEAMS: tuple[Seam, ...] = (
    Wrap(
        "sampling_options",
        "vllm.sampling_params:SamplingParams._validate_spec_decode",
        "vLLM refuses min_p and logit_bias under any speculation; tree verification honours them",
        "vLLM asks the method which options it honours",
        make="vllm_specplug.engine.sampling_options:wrap_sampling_params",
    ),
    Wrap(
        "request_body",
        "vllm.entrypoints.serve.utils.api_utils:validate_json_request",
        "vllm_xargs takes no booleans, so true is read as 1; unknown fields of a request are "
        "silently dropped",
        "vllm_xargs keeps booleans, and a plugin may declare request fields",
        make="vllm_specplug.engine.request_body:wrap_validate_json_request",
    ),
)
