# SPDX-License-Identifier: Apache-2.0
"""Sampling options that vLLM refuses under speculation and trees honour.

Ledger: sampling_options. The refusal stays for every other speculative method.
"""

from __future__ import annotations

import functools
from typing import Any

from vllm_specplug.compat.spec_config import SpecPlugSpeculativeConfig


def install() -> None:
    """Wraps `SamplingParams._validate_spec_decode`: `min_p` and `logit_bias` pass for trees."""
    from vllm.sampling_params import SamplingParams

    original = SamplingParams._validate_spec_decode
    if getattr(original, "_specplug_allows", False):
        return

    @functools.wraps(original)
    def validate(self: Any, speculative_config: Any) -> None:
        if (
            isinstance(speculative_config, SpecPlugSpeculativeConfig)
            and speculative_config.plugin_method is not None
        ):
            return
        original(self, speculative_config)

    validate._specplug_allows = True  # type: ignore[attr-defined]
    SamplingParams._validate_spec_decode = validate  # type: ignore[method-assign]
