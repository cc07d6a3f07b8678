# SPDX-License-Identifier: Apache-2.0
"""Steps with vLLM's own kernels, in Triton's interpreter.

In every run `kernels/test_cpu_kernels.py` compares each kernel with vLLM's own.
"""

from __future__ import annotations

import pytest

from tests.e2e.steps import compare

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.own_process(fresh=True, env={"SPECPLUG_INTERPRETED": "1"}),
    pytest.mark.full,
]


@pytest.mark.parametrize("ahead", [False, True])
def test_greedy_and_seeded_with_vllms_own_kernels(ahead: bool) -> None:
    assert compare("oracle", ahead).skipping > 3
