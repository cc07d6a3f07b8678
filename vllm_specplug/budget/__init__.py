# SPDX-License-Identifier: Apache-2.0
"""How many nodes each request may draft in a step."""

from vllm_specplug.budget.adaptive_budget import AdaptiveBudget, Batch, NextStep, Plan
from vllm_specplug.budget.row_budget import RowBudget
from vllm_specplug.budget.step_cost import Calibration, StepCostModel, draft_rows

__all__ = [
    "AdaptiveBudget",
    "Batch",
    "Calibration",
    "NextStep",
    "Plan",
    "RowBudget",
    "StepCostModel",
    "draft_rows",
]
