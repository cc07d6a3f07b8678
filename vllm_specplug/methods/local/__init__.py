# SPDX-License-Identifier: Apache-2.0
"""Local heads: what methods share that correct a block head branch by branch."""

LOCAL_CANDIDATES = 128
"""Tokens of each depth, the likeliest of the block head, that a local head scores; more only where
a tree is wider."""
