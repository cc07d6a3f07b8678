# SPDX-License-Identifier: Apache-2.0
"""How many nodes each request may draft in a step."""

from vllm_specplug.budget.adaptive_budget import AdaptiveBudget, NextStep, Plan
from vllm_specplug.budget.row_budget import RowBudget
from vllm_specplug.budget.step_cost import Calibration, StepCostModel, draft_rows

__all__ = [
    "AdaptiveBudget",
    "Calibration",
    "NextStep",
    "Plan",
    "RowBudget",
    "StepCostModel",
    "draft_rows",
]
