# SPDX-License-Identifier: Apache-2.0
"""DeLS-Spec: a DFlash head corrected branch by branch by a local head."""
