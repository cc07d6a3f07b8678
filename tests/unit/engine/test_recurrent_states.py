# SPDX-License-Identifier: Apache-2.0
"""Targets with recurrent states are served where their trees can be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest


@pytest.mark.parametrize(
    ("device", "dtype", "message"),
    [
        ("cuda", "bfloat16", None),
        ("cuda", "float32", None),
        ("cpu", "bfloat16", None),
        ("cpu", "float32", r'dtype=float32 .*set dtype="bfloat16"'),
    ],
)
def test_recurrent_states_by_device(device: str, dtype: str, message: str | None) -> None:
    from vllm_specplug.engine.engine_args import _check_states

    text = dict.fromkeys(
        ("linear_conv_kernel_dim", "linear_num_key_heads", "linear_num_value_heads"), 4
    )
    config: Any = SimpleNamespace(
        device_config=SimpleNamespace(device_type=device),
        model_config=SimpleNamespace(
            dtype=f"torch.{dtype}", hf_text_config=SimpleNamespace(**text),
            architectures=["Qwen3NextForCausalLM"],
        ),
    )  # fmt: skip
    spec: Any = SimpleNamespace(plan=None)
    if message is None:
        _check_states("jetspec", spec, config)
        return
    with pytest.raises(ValueError, match=message):
        _check_states("jetspec", spec, config)
