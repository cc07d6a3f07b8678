# SPDX-License-Identifier: Apache-2.0
"""Settings shared by all tests."""

from __future__ import annotations

from hypothesis import settings

# Busy machines make single examples slow without anything being wrong.
settings.register_profile("specplug", deadline=None, print_blob=True)
settings.load_profile("specplug")
