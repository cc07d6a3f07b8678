# SPDX-License-Identifier: Apache-2.0
"""One folder per method; nothing outside this package names a method."""
