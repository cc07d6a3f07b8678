# SPDX-License-Identifier: Apache-2.0
"""Recognises targets that ship a multi-token-prediction module from their files.

It also recognises kinds that the reader refuses later with a reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_specplug.drafting.head_files import HeadFiles
from vllm_specplug.options import is_integer

# Names of the number of modules, in configs of several model families.
COUNT_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")


def ships_mtp_module(head: HeadFiles) -> bool:
    """Returns whether the config is a model's, or a single module's in speculators' format, and
    states a number of modules."""
    return head.speculators_type in (None, "mtp") and module_count(head.config)[1] > 0


def layer_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the part of a config that describes the target's layers."""
    for name in ("text_config", "transformer_layer_config"):
        part = config.get(name)
        if isinstance(part, Mapping):
            return part
    return config


def module_count(config: Mapping[str, Any]) -> tuple[str, int]:
    """Returns the key under which a config states its number of modules, and the number.

    Qwen3-Next's configs state none, and its checkpoints have one module.
    """
    stated = [
        (name, source[name])
        for source in (config, layer_config(config))
        for name in COUNT_KEYS
        if source.get(name) is not None
    ]
    for name, value in stated:
        if is_integer(value) and value > 0:
            return name, value
    has_one = not stated and layer_config(config).get("model_type") == "qwen3_next"
    return COUNT_KEYS[0], int(has_one)
