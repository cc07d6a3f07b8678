# SPDX-License-Identifier: Apache-2.0
"""Requests with a contextual penalty: what is refused, and with which name."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from vllm_specplug.engine.penalty import check_request
from vllm_specplug.request_params import parse_penalty


def _config(**overrides):
    plain = {
        "use_v2_model_runner": True,
        "speculative_config": None,
        "model_config": SimpleNamespace(max_model_len=4096),
    }
    return SimpleNamespace(**{**plain, **overrides})


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        (None, None),
        ({"other": 1}, None),
        ({"specplug_penalty": 1.2}, (1024, 1.2)),
        ({"specplug_penalty": 2, "specplug_penalty_window": 64}, (64, 2.0)),
        ({"specplug_penalty": 1.2, "specplug_penalty_window": 0}, None),
        ({"specplug_penalty": 1}, None),
    ],
)
def test_penalties_are_read(extra, expected) -> None:
    assert parse_penalty(extra) == expected
    check_request(_config(), SamplingParams(extra_args=extra))


@pytest.mark.parametrize(
    ("extra", "parameter"),
    [
        ({"specplug_penalty": 0}, "specplug_penalty"),
        ({"specplug_penalty": -1.2}, "specplug_penalty"),
        ({"specplug_penalty": float("nan")}, "specplug_penalty"),
        ({"specplug_penalty": float("inf")}, "specplug_penalty"),
        ({"specplug_penalty": "1.2"}, "specplug_penalty"),
        ({"specplug_penalty": True}, "specplug_penalty"),
        ({"specplug_penalty_window": 64}, "specplug_penalty"),
        ({"specplug_penalty": 1.2, "specplug_penalty_window": -1}, "specplug_penalty_window"),
        ({"specplug_penalty": 1.2, "specplug_penalty_window": 1.5}, "specplug_penalty_window"),
        ({"specplug_penalty": 1.2, "specplug_penalty_window": 4097}, "specplug_penalty_window"),
        ({"specplug_penalty": 1.2, "specplug_penalty_window": 10**5000}, "specplug_penalty_window"),
        ({"specplug_penalty": 10**400}, "specplug_penalty"),
        ({"specplug_penalty": 10**5000}, "specplug_penalty"),
        ({"specplug_penalty": 1e-300}, "specplug_penalty"),
        ({"specplug_penalty": ["x" * 10**6]}, "specplug_penalty"),
    ],
)
def test_bad_penalties_are_refused_by_name(extra, parameter) -> None:
    params = SamplingParams()
    params.extra_args = extra  # vLLM refuses some numbers before
    with pytest.raises(VLLMValidationError, match=f"^{parameter}") as error:
        check_request(_config(), params)
    assert error.value.parameter == parameter


def test_the_default_window_fits_any_model() -> None:
    short = _config(model_config=SimpleNamespace(max_model_len=256))
    check_request(short, SamplingParams(extra_args={"specplug_penalty": 1.2}))


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("specplug_tree_bugdet", "Did you mean specplug_tree_budget?"),
        ("specplug_penaltywindow", "Did you mean specplug_penalty_window?"),
        ("Specplug_Penalty", "Did you mean specplug_penalty?"),
        ("specplug_zzzzzzzz", "Legal: specplug_tree_budget, "),
        ("specplug" + "x" * 10**6, "Legal: specplug_tree_budget, "),
    ],
)
def test_misspelt_names_are_refused_with_the_near_one(name, near) -> None:
    with pytest.raises(VLLMValidationError) as error:
        check_request(_config(), SamplingParams(extra_args={"other": 1, name: 3}))
    assert near in str(error.value) and len(str(error.value)) < 500
    check_request(_config(), SamplingParams(extra_args={"special": 1, 7: 3}))


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ({"speculative_config": SimpleNamespace(method="ngram")}, "'ngram'"),
        ({"use_v2_model_runner": False}, "V1 model runner; use one of .* methods, or set VLLM_USE"),
    ],
)
def test_a_server_that_would_not_apply_it_says_so(overrides, reason) -> None:
    asks = SamplingParams(extra_args={"specplug_penalty": 1.2})
    with pytest.raises(VLLMValidationError, match=reason):
        check_request(_config(**overrides), asks)
    check_request(_config(**overrides), SamplingParams())
