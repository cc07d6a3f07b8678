# SPDX-License-Identifier: Apache-2.0
"""Trees on vLLM's V2 model runner."""
