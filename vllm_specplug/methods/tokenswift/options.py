# SPDX-License-Identifier: Apache-2.0
"""Checks of method tokenswift's options, and of the penalty that any request may ask for.

Nothing in this file imports vLLM or torch.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

from vllm_specplug.options import (
    REQUEST_BUDGET_ARG,
    REQUEST_CONTEXT_ARG,
    changed_tree_options,
    option_error,
    shown,
)

PENALTY_ARGS = ("specplug_penalty_window", "specplug_penalty")
REQUEST_ARGS = (REQUEST_BUDGET_ARG, REQUEST_CONTEXT_ARG, *PENALTY_ARGS)
"""All that a request may ask of the plugin."""
DEFAULT_PENALTY_WINDOW = 1024
LEAST_PENALTY, MOST_PENALTY = 1e-3, 1e3
"""Beyond these a float32 logit may overflow."""


def unknown_request_arg(extra_args: dict[str, Any] | None) -> tuple[str, str] | None:
    """The first argument that reads like the plugin's and is not, and what to tell its sender."""
    for name in extra_args or ():
        if not isinstance(name, str) or not name.lower().startswith("specplug"):
            continue
        if name not in REQUEST_ARGS:
            near = difflib.get_close_matches(name.lower()[:80], REQUEST_ARGS, n=1)
            meant = f"Did you mean {near[0]}?" if near else f"There are {', '.join(REQUEST_ARGS)}."
            return name[:80], f"{name[:80]} is not a request parameter of vllm-specplug. {meant}"
    return None


def parse_penalty(
    extra_args: dict[str, Any] | None, max_window: int | None = None
) -> tuple[int, float] | None:
    """A request's contextual penalty: window W in tokens and theta; None when it has none.

    Args:
        extra_args: the request's `extra_args` (`vllm_xargs` over HTTP).
        max_window: the longest text there can be; None for no limit on the window.

    Raises:
        ValueError: naming the parameter, its value and what is legal.
    """
    window_arg, theta_arg = PENALTY_ARGS
    extra = extra_args or {}
    if window_arg not in extra and theta_arg not in extra:
        return None
    window, theta = extra.get(window_arg, DEFAULT_PENALTY_WINDOW), extra.get(theta_arg)
    if theta is None:
        raise ValueError(
            f"{theta_arg} is missing: {window_arg} means nothing without it; give both"
        )
    is_integer = isinstance(window, int) and not isinstance(window, bool)
    if (
        not is_integer
        or window < 0
        or (max_window is not None and window_arg in extra and window > max_window)
    ):
        most = "or more" if max_window is None else f"to max_model_len={max_window}"
        raise ValueError(
            f"{window_arg}={shown(window)} is not usable: a number of tokens from 0 (no penalty) "
            f"{most}. Give an integer such as 1024"
        )
    numeric = isinstance(theta, int | float) and not isinstance(theta, bool)
    if not numeric or not LEAST_PENALTY <= theta <= MOST_PENALTY:
        raise ValueError(
            f"{theta_arg}={shown(theta)} is not usable: a number from {LEAST_PENALTY} to "
            f"{MOST_PENALTY:.0f}; 1 changes nothing. Give a number such as 1.2"
        )
    if window == 0 or theta == 1:
        return None
    return window, float(theta)


@dataclass(frozen=True)
class SelfDraftOptions:
    """How method tokenswift drafts, resolved."""

    source: str
    kv_budget: int
    sink_size: int
    kv_refresh: int
    max_requests: int
    gamma: int
    tree_widths: tuple[int, ...] | None


_SELF_DRAFT_FIELDS = (
    "draft_source",
    "kv_budget",
    "sink_size",
    "kv_refresh",
    "self_draft_requests",
    "gamma",
    "tree_widths",
)


def check_self_draft_options(
    options: Any, method: str, *, self_drafts: bool, num_heads: int = 0
) -> SelfDraftOptions | None:
    """The options of a method that drafts with the target itself; None for the others.

    Args:
        options: anything with the fields of `TreeOptions` as attributes.
        num_heads: heads of the checkpoint.

    Raises:
        ValueError: for another method's option, or a combination that cannot work.
    """
    if not self_drafts:
        changed = changed_tree_options(options)
        for name in _SELF_DRAFT_FIELDS:
            if name in changed:
                raise option_error(
                    name,
                    getattr(options, name),
                    f"method {method!r} does not have it, only 'tokenswift' does",
                    f"Leave {name} out",
                )
        return None
    if options.draft_source == "ngrams" and options.ngram_topk == 0:
        raise option_error(
            "ngram_topk",
            options.ngram_topk,
            'draft_source="ngrams" drafts by n-grams only, so 1..16',
            "Leave ngram_topk out or choose another draft_source",
        )
    least = options.sink_size + options.num_speculative_tokens + 1
    if options.kv_budget < least:
        raise option_error(
            "kv_budget",
            options.kv_budget,
            f"the budget must hold the sink and a tree: at least sink_size={options.sink_size} + "
            f"num_speculative_tokens={options.num_speculative_tokens} + 1 = {least}",
            f"Raise kv_budget to {least} or more; 1024 to 4096 is usual",
        )
    most = options.kv_budget - options.sink_size
    if options.kv_refresh is not None and options.kv_refresh > most:
        raise option_error(
            "kv_refresh",
            options.kv_refresh,
            f"after kv_budget - sink_size = {most} tokens nothing selected is left",
            f"Choose 1..{most}, or leave kv_refresh out",
        )
    gamma = num_heads + 1 if options.gamma is None else options.gamma
    if gamma > num_heads + 1:
        raise option_error(
            "gamma",
            options.gamma,
            f"the checkpoint has {num_heads} heads, which with the base prediction draft "
            f"{num_heads + 1} tokens",
            f"Choose 1..{num_heads + 1}, or leave gamma out",
        )
    widths = options.tree_widths
    if widths is not None:
        legal = f"a list of 1 to gamma={gamma} numbers, each 1..64"
        if not 1 <= len(widths) <= gamma or not all(1 <= width <= 64 for width in widths):
            raise option_error("tree_widths", widths, legal, "The published tree is [1, 3, 3, 3]")
        nodes, level = 0, 1
        for width in widths:
            level *= width
            nodes += level
        if nodes > options.num_speculative_tokens:
            raise option_error(
                "tree_widths",
                widths,
                f"this tree has {nodes} nodes, more than num_speculative_tokens="
                f"{options.num_speculative_tokens}",
                f"Raise num_speculative_tokens to {nodes} or narrow the tree",
            )
    return SelfDraftOptions(
        source=options.draft_source,
        kv_budget=options.kv_budget,
        sink_size=options.sink_size,
        kv_refresh=options.kv_refresh or most,
        max_requests=options.self_draft_requests,
        gamma=gamma,
        tree_widths=None if widths is None else tuple(widths),
    )
