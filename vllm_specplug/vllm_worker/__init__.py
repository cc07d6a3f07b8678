# SPDX-License-Identifier: Apache-2.0
"""What the workers of both model runners share: the drafter, its caches, its budget."""
