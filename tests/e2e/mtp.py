# SPDX-License-Identifier: Apache-2.0
"""Prompts for targets with a module of their own."""

from __future__ import annotations

VOCAB = 24
PROMPTS = [[3 + (5 * i * i + k) % 20 for i in range(8 + 9 * k)] for k in range(4)]
