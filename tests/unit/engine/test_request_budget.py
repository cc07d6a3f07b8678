# SPDX-License-Identifier: Apache-2.0
"""A request's own budget is checked where requests come in."""

from __future__ import annotations

from typing import Any

import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from vllm_specplug.engine.spec_config import SpecPlugSpeculativeConfig

pytestmark = pytest.mark.usefixtures("installed")


def _spec(plugin_method: str | None = "jetspec") -> Any:
    spec = object.__new__(SpecPlugSpeculativeConfig)
    values = {
        "plugin_method": plugin_method,
        "num_speculative_tokens": 8,
        "max_draft_context": None,
        "tree_budget": "auto",
        "max_request_budget": None,
    }
    for name, value in values.items():
        object.__setattr__(spec, name, value)
    return spec


BAD = {"specplug_tree_budget": 9}


@pytest.mark.parametrize(
    ("method", "extra", "message"),
    [
        ("jetspec", None, None),
        ("jetspec", {"specplug_tree_budget": 8}, None),
        ("jetspec", {"specplug_tree_budget": "auto", "specplug_max_draft_context": 0}, None),
        ("jetspec", BAD, r"specplug_tree_budget=9 .*num_speculative_tokens=8"),
        ("jetspec", {"specplug_max_draft_context": 1.5}, "specplug_max_draft_context=1.5"),
        # A method of vLLM's.
        (None, BAD, None),
    ],
)
def test_senseless_budgets_are_refused_as_the_clients_mistake(
    method: str | None, extra: dict | None, message: str | None
) -> None:
    params = SamplingParams(extra_args=extra)
    if message is None:
        params._validate_spec_decode(_spec(method))
        return
    with pytest.raises(VLLMValidationError, match=message) as error:
        params._validate_spec_decode(_spec(method))
    assert error.value.parameter == next(iter(extra or {}))
