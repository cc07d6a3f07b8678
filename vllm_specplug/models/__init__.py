# SPDX-License-Identifier: Apache-2.0
"""Draft heads as modules, and the reading and writing of their checkpoints."""
