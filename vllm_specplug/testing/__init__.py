# SPDX-License-Identifier: Apache-2.0
"""Checks that authors of drafting methods run: `check_method`."""

from vllm_specplug.testing.check import LosslessReport, SituationResult, check_method

__all__ = ["LosslessReport", "SituationResult", "check_method"]
