# SPDX-License-Identifier: Apache-2.0
"""vllm-specplug: tree speculative decoding for stock vLLM, as a plugin.

Importing the package imports neither torch nor vLLM; its subpackages import them when needed.
"""

__version__ = "0.2.0.dev0"
