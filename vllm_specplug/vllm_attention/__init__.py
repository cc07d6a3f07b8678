# SPDX-License-Identifier: Apache-2.0
"""Attention backends that understand tree rows."""
