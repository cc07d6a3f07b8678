# SPDX-License-Identifier: Apache-2.0
"""A request's own budget is checked where requests come in; tree schedulers do not pad."""

from __future__ import annotations

from types import SimpleNamespace
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


@pytest.mark.parametrize(("ours", "table"), [(True, [6] * 5), (False, None)])
def test_only_our_schedulers_decline_placeholders(
    monkeypatch: pytest.MonkeyPatch, ours: bool, table: list[int] | None
) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    from vllm_specplug.engine.placeholders import wrap_scheduler

    def init(self: Any) -> None:
        self.vllm_config = SimpleNamespace(speculative_config=_spec("jetspec" if ours else None))
        self.dynamic_sd_lookup = None
        self.num_spec_tokens = 6
        self.scheduler_config = SimpleNamespace(max_num_seqs=4, async_scheduling=False)

    monkeypatch.setattr(Scheduler, "__init__", wrap_scheduler(init))
    assert Scheduler().dynamic_sd_lookup == table
