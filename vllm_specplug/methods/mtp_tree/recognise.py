# SPDX-License-Identifier: Apache-2.0
"""Which checkpoints are targets that ship a multi-token-prediction module, judged by their files.

Kinds that the reader refuses later are recognised too, so that the refusal can say why.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_specplug.drafting.head_files import HeadFiles

# How many modules a config says the target ships, by the names of its families.
COUNT_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")


def ships_mtp_module(head: HeadFiles) -> bool:
    """By the config of a whole model, or of a single module in speculators' format; drafts of other
    kinds do not count modules."""
    return head.speculators_type in (None, "mtp") and module_count(head.config)[1] > 0


def layer_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Where a config describes the target's layers."""
    for name in ("text_config", "transformer_layer_config"):
        part = config.get(name)
        if isinstance(part, Mapping):
            return part
    return config


def module_count(config: Mapping[str, Any]) -> tuple[str, int]:
    """How many modules a config states, and under which name."""
    for source in (config, layer_config(config)):
        for name in COUNT_KEYS:
            value = source.get(name) if isinstance(source, Mapping) else None
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return name, value
    return COUNT_KEYS[0], 0
