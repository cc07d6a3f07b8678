# SPDX-License-Identifier: Apache-2.0
"""Local heads: what methods share that correct a block head branch by branch."""
