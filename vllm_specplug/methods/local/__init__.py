# SPDX-License-Identifier: Apache-2.0
"""Local heads, which correct a block head branch by branch. Shared by several methods."""

LOCAL_CANDIDATES = 128
"""Number of likeliest tokens of the block head that a local head scores at each depth. Wider trees
score as many as their width."""
