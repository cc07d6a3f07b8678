# SPDX-License-Identifier: Apache-2.0
"""What a drafting method is given, and parts that methods share."""
