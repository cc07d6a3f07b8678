# SPDX-License-Identifier: Apache-2.0
"""Packed weights of `reload_checks` in a compiled engine; see test_reload.py."""

from __future__ import annotations

from tests.e2e.reload_checks import packed_weights_follow


def check_compiled_engines_read_the_new_packed_weights() -> None:
    packed_weights_follow("tied", enforce_eager=False)
