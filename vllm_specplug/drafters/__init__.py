# SPDX-License-Identifier: Apache-2.0
"""Drafters, one file a method. Imported lazily through `vllm_specplug.methods`."""
