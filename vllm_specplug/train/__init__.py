# SPDX-License-Identifier: Apache-2.0
"""Data from the target itself, losses, trainers, provenance."""
