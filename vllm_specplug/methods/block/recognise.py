# SPDX-License-Identifier: Apache-2.0
"""Recognises block heads and their kind from checkpoint files.

It also recognises kinds that the reader refuses later with a reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_specplug.drafting.head_files import HeadFiles
from vllm_specplug.methods.block.config import (
    ARCHITECTURES,
    OTHER_ARCHITECTURES,
    SPECULATORS_ARCHITECTURES,
    block_containers,
    stated_mask,
)

# Tensors that every block head has. Other kinds have `fc.weight` too, but norm features per layer.
_TENSORS = ("fc.weight", "hidden_norm.weight", "norm.weight", "layers.0.self_attn.q_norm.weight")
# Keys of a Markov head, or of Domino's recurrent head, in a config.
MARKOV_KEYS = (
    "markov_rank", "markov_head_type", "enable_confidence_head", "use_confidence_head",
    "confidence_head_with_markov", "confidence_head_alpha", "projector_type", "emb_dim",
    "gru_hidden_dim", "pure_draft_prefix_len",
)  # fmt: skip
# Keys of DFlash2's layers and of its candidate selector.
SELECTOR_KEYS = (
    "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k",
    "input_embedding_scale", "output_multiplier", "final_logit_softcapping", "projector_type",
)  # fmt: skip
SELECTOR_ARCHITECTURE = "DFlash2DraftModel"
DOMINO_ARCHITECTURE = "DominoDraftModel"
_OWN_CONTAINERS = ("dflash_config", "dspark_config", "domino_config")
_MARKOV_TENSORS = (
    "markov_head.", "confidence_head.", "markov_w1.", "confidence_proj.", "prefix_gru.",
    "logit_head.",
)  # fmt: skip


def is_causal_block_head(head: HeadFiles) -> bool:
    """Returns whether a checkpoint is a JetSpec head."""
    return _is_block_head(head) and _is_causal(head)


def is_bidirectional_block_head(head: HeadFiles) -> bool:
    """Returns whether a checkpoint is a DFlash head."""
    return _is_block_head(head) and not _is_causal(head)


def is_markov_block_head(head: HeadFiles) -> bool:
    """Returns whether a checkpoint is a DSpark head, with a Markov or a confidence head, or a
    Domino head."""
    if head.speculators_type is not None:
        # The method's reader refuses Domino heads of speculators with a reason.
        return head.speculators_type in ("dspark", "domino")
    return _has_block(head) and _has_markov(head)


def is_selector_block_head(head: HeadFiles) -> bool:
    """Returns whether a checkpoint is a DFlash2 head, with a candidate selector."""
    if head.speculators_type is not None:
        return head.speculators_type == "dflash2"
    return _has_block(head) and _has_selector(head)


def _has_selector(head: HeadFiles) -> bool:
    own = stated_values(head.config, SELECTOR_KEYS)
    if own.get("selector_rank") or own.get("projector_type") == "dflash2":
        return True
    named = SELECTOR_ARCHITECTURE in head.architectures
    return named or any(name.startswith("candidate_selector.") for name in head.tensors)


def _has_markov(head: HeadFiles) -> bool:
    own = stated_values(head.config, MARKOV_KEYS)
    if own.get("markov_rank") or own.get("projector_type") in ("dspark", "domino"):
        return True
    if DOMINO_ARCHITECTURE in head.architectures:
        return True
    return any(name.startswith(_MARKOV_TENSORS) for name in head.tensors)


def stated_values(config: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """Returns a config's values of `keys`, from all containers that trainers use."""
    values: dict[str, Any] = {}
    for source in (config, *(config.get(name) for name in _OWN_CONTAINERS)):
        if isinstance(source, Mapping):
            values.update({k: source[k] for k in keys if source.get(k) is not None})
    return values


def as_dflash(config: Mapping[str, Any], keys: Sequence[str], architecture: str) -> dict[str, Any]:
    """Returns a config whose containers and top level lack `keys`, and which names DFlash in place
    of `architecture`."""
    part = {key: value for key, value in config.items() if key not in keys}
    for name in _OWN_CONTAINERS:
        inner = config.get(name)
        if isinstance(inner, Mapping):
            part[name] = {key: value for key, value in inner.items() if key not in keys}
    stated = part.get("architectures")
    if isinstance(stated, list):
        part["architectures"] = [ARCHITECTURES[0] if n == architecture else n for n in stated]
    return part


def _is_block_head(head: HeadFiles) -> bool:
    if head.speculators_type is not None:
        # The method's reader refuses the others with a reason.
        return head.speculators_type in ("dflash", "jetspec")
    return _has_block(head) and not _has_markov(head) and not _has_selector(head)


def _has_block(head: HeadFiles) -> bool:
    if head.architectures:
        known = {*ARCHITECTURES, *SPECULATORS_ARCHITECTURES, *OTHER_ARCHITECTURES}
        return bool(known & set(head.architectures))
    return head.has_tensors(_TENSORS)


def _is_causal(head: HeadFiles) -> bool:
    if head.speculators_type == "jetspec":
        return True
    try:
        return stated_mask(head.config, block_containers(head.config)) is True
    except (ValueError, TypeError, AttributeError):
        return False  # the method's reader refuses the value
