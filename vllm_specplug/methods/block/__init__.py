# SPDX-License-Identifier: Apache-2.0
"""Block heads: one forward drafts all depths. Shared by several methods."""
