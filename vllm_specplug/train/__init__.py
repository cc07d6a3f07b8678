# SPDX-License-Identifier: Apache-2.0
"""Training data from the target, losses, the trainer, provenance."""
