# SPDX-License-Identifier: Apache-2.0
"""Trees on vLLM's V1 model runner, in the order of a step."""
