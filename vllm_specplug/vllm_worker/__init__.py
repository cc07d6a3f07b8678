# SPDX-License-Identifier: Apache-2.0
"""What the workers of all devices share: the drafter, its caches and its budget."""
