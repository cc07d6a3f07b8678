# SPDX-License-Identifier: Apache-2.0
"""TokenSwift: the target drafts for itself, for very long outputs."""
