# SPDX-License-Identifier: Apache-2.0
"""Caches of drafters and the groups of vLLM's KV cache."""
