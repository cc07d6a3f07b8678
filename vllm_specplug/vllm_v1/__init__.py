# SPDX-License-Identifier: Apache-2.0
"""The workers, and the one place that calls the other packages in order."""
