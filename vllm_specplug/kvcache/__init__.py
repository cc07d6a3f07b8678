# SPDX-License-Identifier: Apache-2.0
"""What happens to cached keys and values once a path is accepted."""

from vllm_specplug.kvcache.compaction import path_moves

__all__ = ["path_moves"]
