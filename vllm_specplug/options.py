# SPDX-License-Identifier: Apache-2.0
"""Options that all methods share: types, legal ranges, and the messages of all refusals.

`TreeOptions` is mixed into vLLM's `SpeculativeConfig` (see `engine/spec_config.py`), so each
field here is a key of `--speculative-config`. Nothing in this file imports vLLM or torch.
vLLM reads the annotations as types: no `from __future__ import annotations` here.
"""

import dataclasses
import difflib
import json
import types
from pathlib import Path
from typing import Any, Literal, Self, TypeGuard, Union, get_args, get_origin

from pydantic import Field
from pydantic.dataclasses import dataclass

KernelName = Literal["auto", "cpp", "reference", "triton", "flash", "cute"]
DraftWeightsName = Literal["auto", "int8", "fp8", "full"]
TargetProductsName = Literal["auto", "packed", "vllm"]

MAX_TREE_NODES = 256
DEFAULT_TREE_NODES = 16
# 16 rows with the root. A GPU kernel packs rows times query heads per KV head (usually a power of
# two) into row tiles: 16 rows fill them, and a 17th row would need another tile.
DEFAULT_CUDA_TREE_NODES = 15
DEFAULT_TREE_WIDTH = 8

REMOVED_OPTIONS = {
    "tree_builder": "trees are built best-first",
    "hybrid_lambda": "trees are built best-first",
    "ngram_size": "n-grams of up to 4 tokens are looked up",
    "unigram_smoothing": "counts are smoothed by 1",
    "gate_table_mb": "tables of input gates take up to 64 MiB",
    "local_candidates": "a local head scores the 128 likeliest tokens of each depth",
    "confidence_weight": "a confidence head has weight 0.5",
    "beam_widths": "trees are drafted best-first, within num_speculative_tokens nodes",
    "window_size": "set it in the config.json of the head",
    "gamma": "a base prediction and all heads draft; tree_depth limits how many of them",
    "tree_widths": "trees are drafted best-first; tree_width is the most children of a node",
    "sink_size": "a partial cache always keeps the first 16 tokens, or an eighth of kv_budget",
    "kv_refresh": "the kept tokens are selected again when new ones have replaced them",
    "alpha": "set it in the config.json of the local head",
    "beta": "set it in the config.json of the local head",
    "anchor_input": "set it in the config.json of the local head",
    "unigram": "put the counts beside the local head, as unigram.safetensors",
    "aux_layers": (
        'set "target_layer_ids", counted from 0, in the config.json of a copy of the head\'s folder'
    ),
    "causal": 'set "is_causal" in the config.json of a copy of the head\'s folder',
    "expand_width": "a level expands the 16 best nodes of each request",
    "max_draft_context": 'tree_budget "auto" counts what contexts cost',
}
"""Options of earlier versions by name, and what replaces each of them."""


@dataclass(config={"extra": "forbid", "use_attribute_docstrings": True})
class TreeOptions:
    """Options that the tree methods add to vLLM's speculative options."""

    tree_depth: int | None = Field(default=None, ge=1, le=64)
    """Maximum depth of a tree. Default: the depth that the method drafts; for n-gram branches, the
    number of nodes."""
    tree_width: int = Field(default=DEFAULT_TREE_WIDTH, ge=1, le=64)
    """Maximum number of children per node; 1 drafts a chain."""
    ngram_topk: int = Field(default=3, ge=0, le=16)
    """Maximum number of n-gram continuations. A lookup finds tokens that followed the same n-gram
    earlier in the request and adds them to the tree, within the same node budget. On a CPU the
    limit holds for the children that lookups add to each node of a head's tree. In `ngram_tree`,
    in `tokenswift` and in trees that stay on a CUDA device it holds for the branches from the root.
    0 switches lookups off."""
    tree_budget: int | Literal["auto"] = "auto"
    """Nodes per tree. "auto" chooses them in every step for all requests together: it adds those
    nodes that promise the most tokens per millisecond, and none if plain decoding is faster. A
    number up to `num_speculative_tokens` fixes the size; with 0, only requests that ask for drafts
    get them."""
    max_request_budget: int | None = Field(default=None, ge=0)
    """Maximum number of nodes that a request may ask for with `specplug_tree_budget`. The server
    drafts such nodes regardless of their cost. With 0 a request can only switch drafts off.
    Default: twice `tree_budget`, or 32 if `tree_budget` is "auto" or 0, but at most
    `num_speculative_tokens`."""
    max_step_rows: int | None = Field(default=None, ge=1, le=65536)
    """Maximum number of rows (roots and nodes of all requests) that one step verifies. It overrides
    `tree_budget`: a fixed budget shrinks to an equal share per request, and drafting stops if that
    share is below two nodes. Default: the scheduler's limit."""
    draft_weights: DraftWeightsName = "auto"
    """Number format of the draft head's matrices. "int8" quantizes matrices per row at start and
    their inputs per token: half the bytes and nearly twice the speed on a CPU with VNNI or AMX.
    "fp8" does the same in e4m3 on a GPU of compute capability 9.0 or more, for a target in
    bfloat16. "full" keeps the target's dtype. "auto" uses "int8" on such a CPU if the target is in
    bfloat16 or float16, and "fp8" on a GPU of compute capability 9.x for matrices of at least 2^23
    numbers."""
    target_products: TargetProductsName = "auto"
    """Kernels that multiply with the target's unquantized bfloat16 weights on a CPU: "packed" for
    this package's, "vllm" for vLLM's. "auto" uses "packed" where it is faster: on a CPU with
    AVX2 or AVX-512 but no AMX, unless AMD's zentorch is installed. On such a CPU the tree kernel
    also attends rows without drafts."""
    tree_kernel: KernelName = "auto"
    """Tree attention kernel. On a CPU, "cpp" requires the compiled kernel. On CUDA, "cute"
    (Hopper), "flash" (vLLM's FlashAttention for the context) and "triton" are preferences: if one
    does not work, the engine uses the next one that does. "reference" is the readable torch
    version. "auto" uses the fastest kernel that is correct on this machine; on CUDA
    the engine times all kernels that run at start."""


def tree_option_names() -> tuple[str, ...]:
    """Returns the names of the fields of `TreeOptions`."""
    return tuple(field.name for field in dataclasses.fields(TreeOptions))


def option_defaults(cls: Any) -> dict[str, Any]:
    """Returns the default of each field of a config class, whether it is plain or in a `Field`."""
    return {f.name: getattr(f.default, "default", f.default) for f in dataclasses.fields(cls)}


def changed_tree_options(options: Any) -> list[str]:
    """Returns the names of the tree options that differ from their default on `options`."""
    defaults = option_defaults(TreeOptions)
    return [name for name, default in defaults.items() if getattr(options, name) != default]


# vLLM options that do not apply to trees, and what to do instead.
UNSUPPORTED_VLLM_OPTIONS: dict[str, str] = {
    "draft_tensor_parallel_size": "drafting is replicated on every rank; leave it out",
    "tensor_parallel_size": "drafting is replicated on every rank; leave it out",
    "max_model_len": "drafts end at the target's length; leave it out",
    "revision": "give the folder of that revision as the model",
    "code_revision": "draft heads run no code; leave it out",
    "quantization": "draft heads are served unquantized; leave it out",
    "kv_cache_dtype": "the draft shares the target's cache dtype; leave it out",
    "attention_backend": "use tree_kernel to choose a kernel",
    "moe_backend": "experts of a draft run in vLLM's default kernels; leave it out",
    "num_speculative_tokens_per_batch_size": 'tree_budget "auto" follows the load; leave it out',
    "prompt_lookup_max": "an option of method ngram; leave it out",
    "prompt_lookup_min": "an option of method ngram; leave it out",
    "synthetic_acceptance_rates": "the tree walk has no synthetic mode; leave it out",
    "synthetic_acceptance_length": "the tree walk has no synthetic mode; leave it out",
    "dspark_draft_topk": "an option of method dspark; leave it out",
    "index_share_for_mtp_iteration": "an option of method mtp; leave it out",
    "disable_padded_drafter_batch": "an option of vLLM's own chains; leave it out",
    "enforce_eager": "drafts run as the target does; use --enforce-eager",
    **{
        f"suffix_decoding_{name}": "an option of method suffix; leave it out"
        for name in ("max_tree_depth", "max_cached_requests", "max_spec_factor", "min_token_prob")
    },
}

_REQUIRED_VALUES: dict[str, tuple[Any, str]] = {
    "rejection_sample_method": (
        "standard",
        "trees are verified by the target's own samples, which is exactly lossless",
    ),
    "draft_sample_method": ("greedy", "draft trees are deterministic"),
    "parallel_drafting": (False, "the method decides it from the head"),
    "use_heterogeneous_vocab": (False, "the head must be trained for this target's vocabulary"),
    "use_local_argmax_reduction": (False, "tree drafting needs the top candidates, not one"),
    "enable_adaptive_verification": (
        False,
        'an option for chains; the tree methods have tree_budget "auto"',
    ),
}


VALUES_OF_DEVICE: dict[str, dict[str, tuple[str, ...]]] = {
    "tree_kernel": {
        "cpu": ("auto", "cpp", "reference"),
        "cuda": ("auto", "cute", "flash", "triton", "reference"),
    },
    "draft_weights": {"cpu": ("auto", "int8", "full"), "cuda": ("auto", "fp8", "full")},
    "target_products": {"cpu": ("auto", "packed", "vllm"), "cuda": ("auto", "vllm")},
}
"""Legal values of the options that depend on the device."""


def check_device_options(options: Any, device_type: str) -> None:
    """Raises ValueError for an option's value that the device does not support."""
    for name, by_device in VALUES_OF_DEVICE.items():
        value, legal = getattr(options, name), by_device[device_type]
        if value not in legal:
            raise option_error(
                name, value, f"on a {device_type} device, legal: {', '.join(legal)}", 'Use "auto"'
            )


def option_error(field: str, value: object, legal: str, remedy: str) -> ValueError:
    """Returns the error for an option: field, value, legal values and remedy."""
    return ValueError(f"speculative_config.{field}={value!r} is not usable: {legal}. {remedy}.")


def describe_type(hint: Any) -> tuple[str, str, tuple[str, ...]]:
    """Returns a type's name in JSON, its range in words, and its legal words."""
    if get_origin(hint) in (Union, types.UnionType):
        choices = [arg for arg in get_args(hint) if arg is not type(None)]
        if len(choices) > 1 and get_origin(choices[-1]) is Literal:
            return f"{choices[0].__name__} or string", "0 or more", get_args(choices[-1])
        hint = choices[0]
    if get_origin(hint) is Literal:
        return "string", "", get_args(hint)
    if hint is str:
        return "string", "a path", ()
    if get_origin(hint) is list:
        return "list", "integers", ()
    name = getattr(hint, "__name__", str(hint))
    return name, "", ("true", "false") if hint is bool else ()


def bounds(metadata: Any) -> str:
    """Returns a field's bounds as text: "low..high", "low or more", "" without a lower one."""
    low = next((entry.ge for entry in metadata if hasattr(entry, "ge")), None)
    high = next((entry.le for entry in metadata if hasattr(entry, "le")), None)
    if low is None:
        return ""
    return f"{low} or more" if high is None else f"{low}..{high}"


def value_error(
    field: str, value: object, hint: Any, metadata: Any = (), default: Any = None
) -> ValueError:
    """Returns the error for a value of a wrong type or out of range.

    Args:
        hint: the declared type.
        metadata: its bounds.
        default: the value if the option is left out.
    """
    kind, span, words = describe_type(hint)
    quoted = words if kind == "bool" else [json.dumps(word) for word in words]
    near = difflib.get_close_matches(str(value), words, n=1)
    if kind in ("bool", "string"):
        legal = f"one of {', '.join(quoted)}" if words else "a string"
    else:
        kind = kind.removesuffix(" or string")
        legal = ", or ".join([f"{kind} {bounds(metadata) or span}".rstrip(), *quoted])
    meant = f'Did you mean "{near[0]}"? ' if near else ""
    usual = "" if default is None else f" for its default, {json.dumps(default)}"
    remedy = f"{meant}Correct it, or leave it out{usual}"
    return option_error(field, value, f"legal: {legal}", remedy)


def parse_object(option: str, text: str, example: str) -> dict[str, Any]:
    """Returns the JSON object that a command's option holds.

    Raises:
        ValueError: for anything else.
    """
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"{option} {text!r}, legal: a JSON object such as '{example}'; correct it")
    return found


def check_target(model: str | None) -> None:
    """Raises ValueError for a target path without a model.

    vLLM checks hub ids, single files and addresses.
    """
    if model is None or "://" in model:
        return
    path = Path(model).expanduser()
    is_hub_id = not model.startswith(("/", ".", "~")) and model.count("/") <= 1
    if path.is_dir():
        reason = None if (path / "config.json").is_file() else "it has no config.json"
    else:
        reason = None if is_hub_id or path.exists() else "there is no such folder"
    if reason is not None:
        raise ValueError(
            f"target={model!r} is not usable: {reason}. Give the folder of a model, or a hub id."
        )


def is_number(hint: Any) -> bool:
    """Whether a declared type takes numbers but no booleans, which pydantic reads as 0 and 1."""
    parts = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return bool not in parts and bool({int, float} & set(parts))


def is_integer(value: object) -> TypeGuard[int]:
    """Whether a value is an integer; booleans are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def short_repr(value: object) -> str:
    """Returns the `repr` of a user's value, cut to 80 characters for a message."""
    try:
        text = repr(value)
    except Exception:  # integers of thousands of digits; a `__repr__` that raises
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."


REQUEST_BUDGET_FACTOR = 2
"""Default of `max_request_budget`, as a multiple of the server's default number of nodes."""

REQUEST_BUDGET_ARG = "specplug_tree_budget"


def request_budget_limit(options: Any) -> int:
    """Returns the maximum number of nodes that a request may ask for."""
    max_nodes: int = options.num_speculative_tokens
    if options.max_request_budget is not None:
        return min(max_nodes, options.max_request_budget)
    default = DEFAULT_TREE_NODES if options.tree_budget in ("auto", 0) else options.tree_budget
    return min(max_nodes, REQUEST_BUDGET_FACTOR * int(default))


MIN_USEFUL_NODES = 2
"""Minimum nodes per request under a fixed budget: with fewer a draft forward does not pay."""


@dataclasses.dataclass
class RowBudget:
    """Equal shares of the rows that a step may have."""

    max_nodes: int
    """Maximum number of nodes of a tree, without its root."""
    max_step_rows: int
    """Maximum number of rows of a step: roots and nodes of all requests."""
    scheduler_rows: int
    """Maximum number of rows that the scheduler puts into a step."""
    max_requests: int
    """Maximum number of requests that the scheduler runs at once."""

    @classmethod
    def of(cls, options: Any, scheduler_config: Any) -> Self:
        """Returns the limits of an engine, from its speculative options and its scheduler's."""
        rows: int = scheduler_config.max_num_batched_tokens
        rows = min(rows, scheduler_config.max_num_scheduled_tokens or rows)
        nodes = options.num_speculative_tokens
        return cls(
            max_nodes=nodes if options.tree_budget == "auto" else int(options.tree_budget),
            # Beyond the scheduler's own limit the last requests of a batch would starve.
            max_step_rows=min(options.max_step_rows or rows, rows),
            scheduler_rows=rows,
            max_requests=scheduler_config.max_num_seqs,
        )

    def rows(self, num_requests: int) -> int:
        """Returns the maximum number of rows of `num_requests` requests and their trees.

        One share of the scheduler's rows stays free for a waiting request; otherwise it would wait
        until a running request ends.
        """
        has_room = num_requests < self.max_requests
        reserved = self.scheduler_rows // (num_requests + 1) if has_room else 0
        return min(self.max_step_rows, self.scheduler_rows - reserved)

    def share(self, num_requests: int) -> int:
        """Returns the nodes per request that the row limits allow."""
        return max(0, self.rows(num_requests) // num_requests - 1)

    def nodes_per_request(self, num_requests: int) -> int:
        """Returns the nodes that each of `num_requests` requests may draft; 0 for no drafts."""
        if num_requests == 0:
            return 0
        nodes = min(self.max_nodes, self.share(num_requests))
        return nodes if nodes >= min(MIN_USEFUL_NODES, self.max_nodes) else 0


def parse_request_budget(extra_args: dict[str, Any] | None, options: Any) -> int | None:
    """Returns the nodes per tree that a request asks for, 0 for no drafts; None for the engine's
    `tree_budget`.

    Args:
        extra_args: the request's `extra_args` (`vllm_xargs` over HTTP).
        options: the engine's speculative options.

    Raises:
        ValueError: naming the parameter, its value and what is legal.
    """
    extra = extra_args or {}
    max_nodes, name = request_budget_limit(options), "max_request_budget"
    if max_nodes == options.num_speculative_tokens:
        name = "num_speculative_tokens"
    nodes = extra.get(REQUEST_BUDGET_ARG, "auto")
    if isinstance(nodes, str) and nodes == "auto":
        return None
    if not (is_integer(nodes) and 0 <= nodes <= max_nodes):
        raise ValueError(
            f'{REQUEST_BUDGET_ARG}={short_repr(nodes)} is not usable: "auto" (the server '
            f"decides) or a number of nodes from 0 (no drafts) to {name}={max_nodes}. "
            "Give one of these, or leave it out"
        )
    return nodes


def check_num_nodes(num_speculative_tokens: Any) -> None:
    """Raises ValueError unless the node budget is within 1..MAX_TREE_NODES."""
    if not is_integer(num_speculative_tokens) or not 1 <= num_speculative_tokens <= MAX_TREE_NODES:
        raise option_error(
            "num_speculative_tokens",
            num_speculative_tokens,
            f"the node budget of a tree (root excluded) must be within 1..{MAX_TREE_NODES}",
            f"Choose a value from 1 to {MAX_TREE_NODES}; 8 to 64 is usual",
        )


def check_node_budgets(options: Any) -> None:
    """Raises ValueError for an illegal num_speculative_tokens, and for a depth or a budget that it
    does not allow."""
    nodes: int = options.num_speculative_tokens
    budget, most = options.tree_budget, options.max_request_budget
    check_num_nodes(nodes)
    if options.tree_depth is not None and nodes < options.tree_depth:
        raise option_error(
            "num_speculative_tokens",
            nodes,
            f"the node budget must be at least tree_depth={options.tree_depth}, or the deepest "
            "level can never be reached",
            f"Raise num_speculative_tokens to {options.tree_depth} or more, or lower tree_depth",
        )
    if budget != "auto" and not (is_integer(budget) and 0 <= budget <= nodes):
        raise option_error(
            "tree_budget",
            budget,
            f'"auto" or a number of nodes from 0 to num_speculative_tokens={nodes}',
            "Leave tree_budget out to let it follow the load, or raise num_speculative_tokens",
        )
    if most is not None and most > nodes:
        raise option_error(
            "max_request_budget",
            most,
            f"a number of nodes from 0 to num_speculative_tokens={nodes}",
            "Lower it, or raise num_speculative_tokens",
        )


def check_tree_depth(tree_depth: int | None, max_depth: int, reason: str) -> int:
    """Returns the depth to draft, by default `max_depth`.

    Args:
        max_depth: maximum depth that the head drafts.
        reason: what limits the head's depth, for the message.

    Raises:
        ValueError: if `tree_depth` exceeds `max_depth`.
    """
    if tree_depth is None:
        return max_depth
    if tree_depth > max_depth:
        raise option_error(
            "tree_depth",
            tree_depth,
            f"{reason}, so depths 1..{max_depth} are possible",
            f"Lower tree_depth to {max_depth} or less, or use a head trained to draft deeper",
        )
    return tree_depth


def check_vllm_options(options: Any, defaults: dict[str, Any], method: str) -> None:
    """Refuses vLLM's speculative options that the tree methods do not support.

    Args:
        options: an object with the options as attributes.
        defaults: default of each option by name.
        method: name of the method, for the message.

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
                f"method {method!r} supports only {required!r} ({reason})",
                f"Leave {name} out",
            )
