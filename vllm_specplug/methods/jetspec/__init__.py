# SPDX-License-Identifier: Apache-2.0
"""JetSpec: trees over a block head that is causal inside the block."""
