# SPDX-License-Identifier: Apache-2.0
"""Local heads, which correct a block head branch by branch. Shared by several methods."""
