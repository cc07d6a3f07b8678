# SPDX-License-Identifier: Apache-2.0
"""V2 admits our methods where it was asked for and serves them.

Seam: model_runner_v2.

What: `VllmConfig._get_v2_model_runner_unsupported_features` leaves out the entry that stands for
our methods: they reach vLLM as `custom_class`, which V2 does not run.

Remove when: vLLM has a proposer registry.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_specplug.vllm_process.spec_config import tree_config


def admitting_trees(original: Callable[[Any], list[str]]) -> Callable[[Any], list[str]]:
    """The list of what V2 lacks, without the methods that run in it."""

    def unsupported_features(self: Any) -> list[str]:
        features = original(self)
        spec = tree_config(self)
        if spec is None or not spec.uses_v2:
            return features
        return [name for name in features if name != f"speculative method {spec.method!r}"]

    return unsupported_features
