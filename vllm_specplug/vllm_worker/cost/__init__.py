# SPDX-License-Identifier: Apache-2.0
"""What a step costs, and which requests draft in it."""
