# SPDX-License-Identifier: Apache-2.0
"""The checks of reload_checks.py on Model Runner V2; see test_reload.py."""

from __future__ import annotations

from vllm_specplug.vllm_v2.plain_engine import use_v2

use_v2()

from tests.e2e.reload_checks import *  # noqa: E402, F403
