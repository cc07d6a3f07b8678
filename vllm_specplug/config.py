# SPDX-License-Identifier: Apache-2.0
"""Typed options of every method, their legal ranges and the text of every refusal.

`TreeOptions` is mixed into vLLM's `SpeculativeConfig` (see `compat/spec_config.py`), so each
field here is a key of `--speculative-config`. Nothing in this file imports vLLM or torch.
vLLM reads the annotations as types: no `from __future__ import annotations` here.
"""

from dataclasses import MISSING, fields
from typing import Any, Literal, get_args

from pydantic import Field
from pydantic.dataclasses import dataclass

TreeBuilderName = Literal["best_first", "accum_logp", "entropy", "hybrid"]
KernelName = Literal["auto", "cpp", "reference"]

MAX_TREE_NODES = 256
DEFAULT_TREE_NODES = 16
DEFAULT_TREE_WIDTH = 8


@dataclass(config={"extra": "forbid"})
class TreeOptions:
    """Options of the tree methods, beside vLLM's own speculative options."""

    tree_depth: int | None = Field(default=None, ge=1, le=64)
    """Deepest node of a tree. Default: what the head can draft (block size - 1)."""
    tree_width: int = Field(default=DEFAULT_TREE_WIDTH, ge=1, le=64)
    """Most children of one node. 1 drafts a chain."""
    tree_builder: TreeBuilderName = "best_first"
    """How the node budget is spent: exact best-first expansion, the JetSpec paper's
    accum_logp, its entropy-guided order, or cumulative log-probability plus
    `hybrid_lambda` x entropy."""
    hybrid_lambda: float = Field(default=0.1, ge=0.0, le=10.0)
    """Weight of the entropy term; only read by `tree_builder` "hybrid"."""
    causal: bool | None = None
    """Causal (true) or bidirectional (false) attention inside the draft block. Default: what
    the checkpoint says (`causal_head`), bidirectional when it says nothing."""
    ngram_topk: int | None = Field(default=None, ge=0, le=16)
    """N-gram branches (what followed the same tokens earlier in the request) merged into each
    tree under the same node budget; 0 switches them off. Default: 3."""
    max_step_rows: int | None = Field(default=None, ge=1, le=65536)
    """Most rows (roots and nodes of all requests) one step may verify; trees shrink as
    the batch grows and drafting stops where fewer than two nodes a request would be left.
    Default: chosen for the device."""
    tree_kernel: KernelName = "auto"
    """Tree attention kernel: "cpp" insists on the compiled one, "reference" is the readable torch
    version, "auto" takes the fastest one that runs here."""


def tree_option_names() -> tuple[str, ...]:
    """Names of the fields of `TreeOptions`."""
    return tuple(field.name for field in fields(TreeOptions))


def changed_tree_options(options: Any) -> list[str]:
    """Names of the tree options that differ from their default on `options`."""
    changed = []
    for field in fields(TreeOptions):
        default: Any = field.default
        if hasattr(default, "default"):
            default = default.default
        assert default is not MISSING
        if getattr(options, field.name) != default:
            changed.append(field.name)
    return changed


# vLLM options that mean nothing (or something else) for a tree, with what to do instead.
UNSUPPORTED_VLLM_OPTIONS: dict[str, str] = {
    "draft_tensor_parallel_size": "drafting is replicated on every rank; leave it out",
    "quantization": "draft heads are served unquantized; leave it out",
    "kv_cache_dtype": "the draft shares the target's cache dtype; leave it out",
    "attention_backend": "use tree_kernel to choose a kernel",
    "moe_backend": "draft heads have no experts; leave it out",
    "num_speculative_tokens_per_batch_size": "use max_step_rows to shrink trees under load",
    "prompt_lookup_max": "an option of method ngram; leave it out",
    "prompt_lookup_min": "an option of method ngram; leave it out",
    "synthetic_acceptance_rates": "the tree walk has no synthetic mode; leave it out",
    "synthetic_acceptance_length": "the tree walk has no synthetic mode; leave it out",
    "dspark_draft_topk": "an option of method dspark; leave it out",
    "index_share_for_mtp_iteration": "an option of method mtp; leave it out",
}

_REQUIRED_VALUES: dict[str, tuple[Any, str]] = {
    "rejection_sample_method": (
        "standard",
        "trees are verified by the target's own samples, which is exactly lossless",
    ),
    "draft_sample_method": ("greedy", "draft trees are deterministic"),
    "parallel_drafting": (False, "the head drafts all depths in one forward already"),
    "use_heterogeneous_vocab": (False, "the head must be trained for this target's vocabulary"),
    "use_local_argmax_reduction": (False, "tree drafting needs the top candidates, not one"),
    "enable_adaptive_verification": (False, "it belongs to method dspark; use max_step_rows"),
}


def option_error(field: str, value: object, legal: str, remedy: str) -> ValueError:
    """The one form of every refusal: field, value, legal set, what to do."""
    return ValueError(f"speculative_config.{field}={value!r} is not usable: {legal}. {remedy}.")


def check_num_nodes(num_speculative_tokens: int) -> None:
    """Raises ValueError unless the node budget is within 1..MAX_TREE_NODES."""
    if not 1 <= num_speculative_tokens <= MAX_TREE_NODES:
        raise option_error(
            "num_speculative_tokens",
            num_speculative_tokens,
            f"the node budget of a tree (root excluded) must be within 1..{MAX_TREE_NODES}",
            f"Choose a value from 1 to {MAX_TREE_NODES}; 8 to 64 is usual",
        )


def check_tree_shape(num_speculative_tokens: int, tree_depth: int | None, width: int) -> None:
    """Raises ValueError when budget, depth and width cannot go together."""
    check_num_nodes(num_speculative_tokens)
    if tree_depth is not None and num_speculative_tokens < tree_depth:
        raise option_error(
            "num_speculative_tokens",
            num_speculative_tokens,
            f"the node budget must be at least tree_depth={tree_depth}, or the deepest level "
            "can never be reached",
            f"Raise num_speculative_tokens to {tree_depth} or more, or lower tree_depth",
        )
    assert width >= 1


def check_tree_depth(tree_depth: int | None, block_size: int) -> int:
    """The depth to draft with a head of `block_size` slots (slot 0 holds the anchor).

    Raises:
        ValueError: when `tree_depth` asks for more than the head can draft.
    """
    deepest = block_size - 1
    if tree_depth is None:
        return deepest
    if tree_depth > deepest:
        raise option_error(
            "tree_depth",
            tree_depth,
            f"this head drafts blocks of {block_size} slots, so depths 1..{deepest} are possible",
            f"Lower tree_depth to {deepest} or less, or use a head trained with longer blocks",
        )
    return tree_depth


def check_vllm_options(options: Any, defaults: dict[str, Any], method: str) -> None:
    """Refuses vLLM speculative options that the tree methods do not honour.

    Args:
        options: anything with the options as attributes.
        defaults: the default of each option by name.
        method: the method's name, for the message.

    Raises:
        ValueError: naming the first such option.
    """
    for name, remedy in UNSUPPORTED_VLLM_OPTIONS.items():
        value = getattr(options, name, None)
        if value != defaults.get(name):
            raise option_error(
                name, value, f"method {method!r} does not have it", remedy[0].upper() + remedy[1:]
            )
    for name, (required, reason) in _REQUIRED_VALUES.items():
        value = getattr(options, name, required)
        if value != required:
            raise option_error(
                name,
                value,
                f"method {method!r} only has {required!r} ({reason})",
                f"Leave {name} out",
            )


BUILDER_NAMES: tuple[str, ...] = get_args(TreeBuilderName)
