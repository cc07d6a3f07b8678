# SPDX-License-Identifier: Apache-2.0
"""DDTree: trees over a DFlash head, bidirectional inside the block."""
