# SPDX-License-Identifier: Apache-2.0
"""The target's layers, products and weights."""
