# SPDX-License-Identifier: Apache-2.0
"""How many nodes each request may draft in a step."""

from vllm_specplug.budget.row_budget import RowBudget

__all__ = ["RowBudget"]
