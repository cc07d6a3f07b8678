# SPDX-License-Identifier: Apache-2.0
"""LongSpec: one draft layer, run level by level, with constant memory."""
